"""What a process says of itself: code, image, GPUs, environment."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kimi_eagle import provenance
from kimi_eagle.images import build

ROOT = Path(__file__).resolve().parents[1]


def git(folder: Path, *args: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    argv = ["git", "-C", str(folder), *who, *args]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of its own with the package in it."""
    folder = tmp_path / "checkout"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src/kimi_eagle", folder / "src/kimi_eagle", ignore=ignore)
    (folder / ".gitignore").write_text("__pycache__\n")
    (folder / "README.md").write_text("one\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def facts(package: Path, **env: str) -> dict[str, Any]:
    """`provenance` of a process that runs this copy of the package."""
    code = "import json; from kimi_eagle.provenance import provenance as p; print(json.dumps(p()))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(package), **env},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_what_changed_in_a_checkout(checkout: Path) -> None:
    head, clean = git(checkout, "rev-parse", "HEAD").strip(), facts(checkout / "src")
    assert clean["commit"] == head and "dirty" not in clean
    (checkout / "notes.txt").write_text("not tracked")
    assert facts(checkout / "src") == clean
    (checkout / "README.md").write_text("two\n")
    found = facts(checkout / "src")
    assert found["commit"] == f"{head}+dirty"
    diff = git(checkout, "diff", "--no-color", "--binary", "HEAD")
    assert found["dirty"] == hashlib.sha256(diff.encode()).hexdigest()
    assert found["source"] == clean["source"]
    with open(checkout / "src/kimi_eagle/vocab.py", "a") as f:
        f.write("# another\n")
    changed = facts(checkout / "src")
    assert len({clean["source"], changed["source"]}) == len({found["dirty"], changed["dirty"]}) == 2


def test_a_pinned_image_is_no_change_of_code(checkout: Path) -> None:
    pins = checkout / "containers" / "images.lock.json"
    pins.parent.mkdir()
    clean = facts(checkout / "src")
    pins.write_text("new\n")
    assert build.revision(checkout) == clean["commit"]
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "pins")
    pins.write_text("another\n")
    head = git(checkout, "rev-parse", "HEAD").strip()
    assert facts(checkout / "src") == clean | {"commit": head}
    assert build.revision(checkout) == head
    (pins.parent / "cpu.lock").write_text("")
    assert build.revision(checkout) == f"{head}+dirty"


def test_a_copy_without_git_has_the_same_source(checkout: Path, tmp_path: Path) -> None:
    shutil.copytree(checkout / "src", tmp_path / "lib")
    one, two = facts(checkout / "src"), facts(tmp_path / "lib")
    assert two["commit"] is None and two["source"] == one["source"]


def test_the_job_says_its_partition_and_no_shell_its_image(checkout: Path) -> None:
    found = facts(checkout / "src", KIMI_EAGLE_IMAGE="sha256:ab", SLURM_JOB_PARTITION="h200")
    assert found["partition"] == "h200" and "partition" not in facts(checkout / "src")
    assert "image" not in found  # a shell that exports the name is in no image


def test_inside_an_image_the_build_noted_the_commit(tmp_path: Path, monkeypatch: Any) -> None:
    home = tmp_path / "opt"
    (home / "lib/kimi_eagle").mkdir(parents=True)
    (home / "revision").write_text("abc+dirty\n")
    monkeypatch.setattr(provenance, "REVISION", home / "revision")
    asked = provenance.commit.__wrapped__
    monkeypatch.setattr(provenance, "_checkout", lambda: None)
    assert asked() is None  # the host has such a folder; our code is not in it
    monkeypatch.setattr(provenance.kimi_eagle, "__file__", str(home / "lib/kimi_eagle/__init__.py"))
    assert asked() == "abc+dirty"


VERSIONS = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
    "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n": "535.104.05",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (d@b)\n"
    "GCC version:  gcc version 12.3.0\n": "570.124.06",
    "something else\n": None,
}


@pytest.mark.parametrize(("text", "driver"), VERSIONS.items())
def test_gpus_as_the_driver_lists_them(
    text: str, driver: str | None, tmp_path: Path, monkeypatch: Any
) -> None:
    for number in range(8):
        folder = tmp_path / f"gpus/0000:{number:02x}:00.0"
        folder.mkdir(parents=True)
        lines = f"Model: \t\t NVIDIA H200\nIRQ:   \t\t {number}\nGPU UUID: \t GPU-{number}\n"
        (folder / "information").write_text(lines)
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(provenance, "_DRIVER", tmp_path)
    assert provenance._gpus() == ({"NVIDIA H200": 8}, driver)
    monkeypatch.setattr(provenance, "_DRIVER", tmp_path / "not there")
    monkeypatch.setattr(provenance, "_nvidia_smi", lambda: (None, None))
    assert provenance._gpus() == (None, None)


def test_the_lock_file_that_setup_noted(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert provenance.environment_lock() is None
    (tmp_path / ".kimi-eagle-lock").write_text(f"/x/.venv Python 3.11.7 {'ab' * 32}  -\n")
    assert provenance.environment_lock() == "ab" * 32
