"""Who submits a case, and what its jobs run in.

`host`: whoever runs the tests, and this checkout's Python. `root` and `user`: the image of the
whole stack, submitted by root and by an account without any rights. That account has what a login
node has: a Python with the light base alone, no torch, no vLLM, no checkout. `newer`: the same with
what install.sh installs from a bundle, whose Python is two minor versions newer than the image's.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/containers_room"))

IN_IMAGE = pytest.mark.parametrize(
    "case", [pytest.param("host", marks=pytest.mark.campaign), "user"], indirect=True
)
"""For tests whose jobs run in an image in CI, and in both ways under `make campaign`."""

INHERITED = ("PATH", "SLURM_CONF", "OMP_NUM_THREADS", "TMPDIR")


@dataclass(frozen=True)
class Place:
    """Where a case takes place."""

    program: tuple[str, ...] = (sys.executable, "-m", "kimi_eagle")
    image: Path | None = None
    ids: dict[str, Any] = field(default_factory=dict)
    """Arguments for subprocess to become the account."""
    home: Path | None = None
    """None: the environment of whoever runs the tests."""
    data: Path = ROOT / "jobs/data"
    verifier: Path | None = None
    """None: where the recipe says."""

    def env(self) -> dict[str, str]:
        """The shell that submits."""
        if self.home is None:
            return dict(os.environ)
        inherited = {k: v for k, v in os.environ.items() if k in INHERITED}
        return inherited | {"HOME": str(self.home)}

    def own(self, path: Path) -> None:
        """Give it to the account."""
        if self.ids:
            subprocess.run(["chown", "-R", self.ids["user"], str(path)], check=True)


@contextmanager
def places(verifier: Path) -> Iterator[Callable[[str], Place]]:
    """name -> Place; what a place needs is made when it is first asked for."""
    ground = Path(tempfile.mkdtemp(prefix="ke-", dir="/tmp"))
    ground.chmod(0o755)
    made: dict[str, Place] = {"host": Place()}

    def named(name: str) -> Place:
        if name == "newer" and name not in made:
            made[name] = replace(named("user"), program=_installed())
        elif name not in made:
            made[name] = _root() if name == "root" else _user(ground, verifier)
        return made[name]

    try:
        yield named
    finally:
        if ids := made.get("user", made["host"]).ids:
            subprocess.run(["userdel", ids["user"]], check=True, capture_output=True)
        shutil.rmtree(ground)


def _root() -> Place:
    return Place(image=_image())


def _user(ground: Path, verifier: Path) -> Place:
    """An account of this session; whoever runs the tests, where that is not root."""
    image = _image()
    program = (str(light_base(ground / "light")), "-m", "kimi_eagle")
    if os.geteuid():
        return Place(program, image)
    name, home = f"kes{os.getpid()}", ground / "home"
    subprocess.run(["useradd", "-m", "-d", home, name], check=True, capture_output=True)
    pwd.getpwnam(name)
    # Root's home is closed to others.
    for source, target in ((verifier, ground / "verifier"), (ROOT / "jobs/data", ground / "data")):
        shutil.copytree(source, target)
        subprocess.run(["chmod", "-R", "a+rX", target], check=True)
    ids = {"user": name, "group": name, "extra_groups": []}
    return Place(program, image, ids, home, ground / "data", ground / "verifier")


def light_base(folder: Path) -> Path:
    """A Python with the package and what it needs on a login node, from the lock's wheels."""
    from kimi_eagle.images import wheels

    names = _names(ROOT / "containers/base.lock") | {"kimi-eagle"}
    found = wheels.wheels("cpu")
    lock = "".join(b for b in _blocks(ROOT / "containers/cpu.lock") if b.split("==")[0] in names)
    folder.mkdir()
    (folder / "lock").write_text(lock)
    subprocess.run([_open_python(), "-m", "venv", "--without-pip", folder / "env"], check=True)
    python = folder / "env/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--isolated"]
    pip += ["--no-index", "--no-deps"]
    subprocess.run([*pip, "--find-links", found, "-r", folder / "lock"], check=True)
    subprocess.run([*pip, wheels.own_wheel(folder)], check=True)
    done = subprocess.run([python, "-c", "import torch"], capture_output=True)
    assert done.returncode, "the light base must not have torch"
    return python


def _installed() -> tuple[str, ...]:
    from light_base import light_base

    return (str(light_base() / "bin/kimi-eagle"),)


def _open_python() -> str:
    """A CPython of the lock's minor version that other accounts may run, too."""
    minor = "python{}.{}".format(*sys.version_info)
    for name in (sys.executable, f"/usr/bin/{minor}", f"/usr/local/bin/{minor}"):
        path = Path(name).resolve()
        if path.exists() and all(p.stat().st_mode & 0o005 == 0o005 for p in (path, *path.parents)):
            return name
    pytest.fail(f"no {minor} that other accounts may run; fix: apt-get install {minor}")


def _image() -> Path:
    from stack import stack_image

    installer = ["bash", ROOT / "containers/install-apptainer.sh"]
    done = subprocess.run([*installer, *(["--check"] if os.geteuid() else [])], capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return stack_image()


def _blocks(lock: Path) -> list[str]:
    import re

    return re.split(r"(?m)^(?=[a-z0-9])", lock.read_text())


def _names(lock: Path) -> set[str]:
    return {block.split("==")[0] for block in _blocks(lock) if "==" in block}
