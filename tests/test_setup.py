"""Set-up says in one line what is missing, and does nothing where nothing is to be done."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def setup(tmp_path: Path, **fakes: str) -> subprocess.CompletedProcess[str]:
    """Run set-up in a copy of what it reads, with these commands replaced by shell lines."""
    checkout, bin_dir = tmp_path / "checkout", tmp_path / "bin"
    shutil.copytree(ROOT / "containers", checkout / "containers")
    bin_dir.mkdir()
    for name, line in fakes.items():
        (bin_dir / name.replace("_", ".")).write_text(f"#!/bin/sh\n{line}\n")
        (bin_dir / name.replace("_", ".")).chmod(0o755)
    env = {"PATH": f"{bin_dir}:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(tmp_path)}
    command = [checkout / "containers/setup.sh"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def one_error(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("setup: error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_another_kind_of_machine(tmp_path: Path) -> None:
    assert "Darwin arm64" in one_error(setup(tmp_path, uname="echo Darwin arm64"))


def test_no_python_of_the_lock(tmp_path: Path) -> None:
    line = one_error(setup(tmp_path, python3_11="exit 127", python3="exit 1"))
    assert "CPython 3.11" in line and "fix: " in line
    assert not (tmp_path / "checkout/.venv").exists()


def test_a_user_gets_the_line_to_type_for_system_packages(tmp_path: Path) -> None:
    # python3.11 is right in all but its venv module, as Debian's is without python3.11-venv.
    python = 'case "$2" in *ensurepip*) exit 1;; esac; exit 0'
    line = one_error(setup(tmp_path, python3_11=python, id="echo 1000"))
    assert "fix: sudo apt-get install python3.11-venv" in line
    assert not (tmp_path / "checkout/.venv").exists()


def test_nothing_is_done_twice() -> None:
    if not (ROOT / ".venv/.kimi-eagle-package").is_file():
        pytest.skip("this checkout was not set up by make setup")
    before = (ROOT / ".venv/.kimi-eagle-lock").stat().st_mtime_ns
    command = [ROOT / "containers/setup.sh"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "setup: ready\n"
    assert (ROOT / ".venv/.kimi-eagle-lock").stat().st_mtime_ns == before
