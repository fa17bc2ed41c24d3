"""`kimi-eagle image ...` as a user types it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
from small_image import LABELS, other_arch, patch

from kimi_eagle import cli, files
from kimi_eagle.images import build, pins

pytestmark = pytest.mark.usefixtures("nobodys_home")

LOCK = "images.lock.json"
Call = Callable[..., click.testing.Result]


@pytest.fixture
def ke() -> Call:
    """`ke("verify", FILE)`; checks the exit code."""

    def call(*args: object, code: int = 0) -> click.testing.Result:
        result = click.testing.CliRunner().invoke(cli.main, ["image", *map(str, args)])
        assert result.exit_code == code, result.output
        return result

    return call


def test_from_import_to_refusal(
    small: Path, tmp_path: Path, eagle: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """The whole life of an image, in processes of their own."""
    made = eagle("image", "import", small, "-o", "a b.sif", "--name", "mine", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    path, digest = tmp_path / "a b.sif", files.sha256_file(small)
    pinned = f"pinned as mine in {tmp_path / LOCK}"
    assert made.stdout.splitlines() == [str(path), f"sha256:{digest}", pinned]
    seen = eagle("image", "verify", "a b.sif", cwd=tmp_path)
    assert seen.returncode == 0 and "ok" in seen.stdout
    patch(path, path.stat().st_size - 100, b"\xee")
    for args in ((), ("a b.sif",)):
        seen = eagle("image", "verify", *args, "--json", cwd=tmp_path)
        assert seen.returncode == 1 and json.loads(seen.stdout)["ok"] is False
    again = eagle("image", "lock", path, "--name", "mine", cwd=tmp_path)
    assert again.returncode == 2 and "--replace" in again.stderr
    assert again.stderr.count("\n") == 1 and "Traceback" not in again.stderr


def test_verify_all(ke: Call, own: Path, plain: Path, tmp_path: Path) -> None:
    result = ke("verify", "--json", code=2)
    assert "no image is pinned" in result.output and str(tmp_path / LOCK) in result.output
    ke("lock", own)
    shutil.copy(plain, "plain.sif")
    ke("lock", "plain.sif", "--into", "containers", "--name", "other")
    shown = json.loads(ke("verify", "--json").output)
    states = {row["name"]: row["state"] for row in shown["images"]}
    assert shown["ok"] is True and states == {"own": "ok", "other": "unfit"}
    assert shown["images"][0]["sha256"] == files.sha256_file(own)
    os.remove("plain.sif")
    own.write_bytes(own.read_bytes()[:-1])
    shown = json.loads(ke("verify", "--json", code=1).output)
    assert {r["name"]: r["state"] for r in shown["images"]} == {
        "own": "problem",
        "other": "missing",
    }
    table = ke("verify", code=1).output
    assert "truncated" in table and "no such file" in table


def test_verify_reads_the_file_whatever_is_remembered(
    ke: Call, own: Path, nobodys_home: Path
) -> None:
    """A cache that lies about this very file."""
    ke("lock", own)
    good = files.sha256_file(own)
    patch(own, own.stat().st_size - 100, b"\xee")
    cache = nobodys_home / ".cache" / "kimi-eagle" / "images.json"
    cache.parent.mkdir(parents=True)
    entry = {"stat": pins.stat_line(own), "sha256": good}
    cache.write_text(json.dumps({"format": "image-digests/1", "files": {str(own): entry}}))
    assert pins.verified(own).sha256 == good  # such is the lie
    for args in ((), (own,)):
        assert "problem" in ke("verify", *args, code=1).output


def test_verify_several(ke: Call, own: Path, sandbox: Path) -> None:
    ke("lock", own)
    args = (own, "nothing.sif", sandbox, "a\nb")
    shown = json.loads(ke("verify", *args, "--json", code=1).output)
    assert [row["state"] for row in shown["images"]] == ["ok"] + ["problem"] * 3
    assert "image import" in shown["images"][2]["why"]
    lines = ke("verify", *args, code=1).output.splitlines()
    assert any("'a\\nb'" in line for line in lines)


def test_lock(ke: Call, own: Path, tmp_path: Path) -> None:
    shown = json.loads(ke("lock", own, "--json").output)
    assert shown["lock"] == str(tmp_path / LOCK) and shown["unfit"] == ""
    assert {k: shown[k] for k in ("name", "path", "bytes")} == {
        "name": "own", "path": str(own), "bytes": own.stat().st_size,
    }  # fmt: skip
    assert "jobs do not look" in ke("lock", own, "--into", tmp_path / "nowhere").output
    assert "jobs do not look" not in ke("lock", own, "--into", "containers").output
    assert "not a name" in ke("lock", own, "--name", "a\nb", code=2).output
    assert "not a name" in ke("lock", own, "--name", "", code=2).output
    other_arch(own)
    assert "'own' is pinned" in ke("lock", own, code=2).output
    assert "jobs refuse it here: image for another" in ke("lock", own, "--replace").output


def test_show(ke: Call, own: Path, plain: Path, tmp_path: Path) -> None:
    shown = json.loads(ke("show", own, "--json").output)
    assert shown["pinned"] == [] and "no lock file" in shown["jobs"]
    assert shown["sha256"] == files.sha256_file(own) and LABELS.items() <= shown["labels"].items()
    ke("lock", own, "--name", "a name")
    assert json.loads(ke("show", "a name", "--json").output) == shown | {
        "pinned": [{"lock": str(tmp_path / LOCK), "name": "a name"}], "jobs": "ok",
    }  # fmt: skip
    lines = ke("show", "a name").output.splitlines()
    assert f"file     {own}" in lines and "jobs     take it" in lines
    assert '  org.opencontainers.image.version: of a "test", sion=1' in lines
    assert "not an image of kimi-eagle" in ke("show", plain).output
    assert "neither a file nor a name" in ke("show", "other", code=2).output
    own.unlink()
    assert "no such image" in ke("show", "a name", code=2).output


def test_import(ke: Call, own: Path, plain: Path, sandbox: Path, tmp_path: Path) -> None:
    assert "--foreign" in ke("import", sandbox, code=2).output
    assert "apptainer build image.sif docker://a/b" in ke("import", "docker://a/b", code=2).output
    (tmp_path / "containers").mkdir()
    shown = json.loads(_stdout(ke("import", own, "--json")))
    assert shown["path"] == str(tmp_path / "containers" / "own.sif")
    assert shown["lock"] == str(tmp_path / "containers" / LOCK)
    result = ke("import", plain, "--foreign", "-o", "x.sif", "--into", "containers")
    assert "note: jobs refuse it here: not an image of kimi-eagle" in result.output
    assert json.loads(_stdout(ke("verify", "--json")))["ok"]


def _stdout(result: click.testing.Result) -> str:
    """What a pipe would get; `say` goes to standard error."""
    return result.stdout


@pytest.fixture
def built(small: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A build that takes no minutes: what `build` was called with."""
    calls: list[dict[str, Any]] = []

    def copy(flavour: str, out: Path, **more: Any) -> build.BuildReport:
        calls.append({"flavour": flavour, "out": out, **more})
        print("building")
        shutil.copy(small, out)
        return build.BuildReport(out, {"image": 1.5}, 3)

    monkeypatch.setattr(build, "build", copy)
    return calls


def test_build(ke: Call, built: list[dict[str, Any]], tmp_path: Path) -> None:
    shown = json.loads(ke("build", "--json").stdout)
    assert shown["path"] == str(tmp_path / "kimi-eagle-cpu.sif") and shown["seconds"]
    assert pins.verified("kimi-eagle-cpu.sif").name == "kimi-eagle-cpu"
    # Said before minutes are spent, not after.
    assert "is pinned" in ke("build", "-o", "b.sif", "--name", "kimi-eagle-cpu", code=2).output
    assert "not a name" in ke("build", "-o", "a\nb.sif", code=2).output
    assert len(built) == 1
    args = ("--flavour", "cuda", "--base", "localimage:a:b.sif", "--build-arg", "A=b=c")
    ke("build", *args, "--replace", "--workdir", "w", "-o", "kimi-eagle-cpu.sif")
    assert built[1] == {
        "flavour": "cuda", "out": tmp_path / "kimi-eagle-cpu.sif", "replace": True,
        "base": ("localimage", "a:b.sif"), "build_args": {"A": "b=c"}, "workdir": Path("w"),
    }  # fmt: skip
    for wrong in (["--base", "x"], ["--build-arg", "x"], ["--flavour", "tpu"]):
        ke("build", *wrong, code=2)
    assert len(built) == 2


@pytest.mark.parametrize("command", ["build", "import", "lock", "verify", "show"])
def test_help_has_an_example(ke: Call, command: str) -> None:
    assert f"kimi-eagle image {command}" in ke(command, "--help").output


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, kimi_eagle.cli.image\n"
        "heavy = ('rich', 'kimi_eagle.containers', 'numpy')\n"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
