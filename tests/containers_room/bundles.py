"""Bundles for tests: a small one of real parts that is made in seconds, and how one is installed.

The small one has this machine's Python in place of the one that takes minutes to build, and only
those packages of base.lock that `--version` and `--help` need.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("click", "markdown-it-py", "mdurl", "pygments", "rich")


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("bundle", ROOT / "containers" / "bundle.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["bundle"] = module
    spec.loader.exec_module(module)
    return module


maker = _load()
"""containers/bundle.py."""


def locked(name: str) -> dict[str, str]:
    """{package: its lines} of a lock."""
    text = (ROOT / f"containers/{name}.lock").read_text()
    found = re.split(r"(?m)^(?=[a-z0-9])", text)[1:]
    return {block.split("==")[0]: block for block in found}


def small_lock(folder: Path) -> Path:
    """A lock with the packages of SMALL as base.lock has them."""
    blocks = locked("base")
    path = folder / "base.lock"
    path.write_text("".join(blocks[name] for name in SMALL))
    return path


def system_python(folder: Path) -> Path:
    """A tar of this machine's own Python and its pip, in the shape of what build.sh makes."""
    tree = folder / "python"
    program = Path("/usr/bin/python3").resolve()
    library = f"lib/{program.name}"
    (tree / "bin").mkdir(parents=True)
    shutil.copy(program, tree / "bin")
    (tree / "bin/python3").symlink_to(program.name)
    left_out = shutil.ignore_patterns(
        "test", "tests", "idlelib", "lib2to3", "config-*", "*.a", "EXTERNALLY-*"
    )
    shutil.copytree(Path("/usr", library), tree / library, ignore=left_out, symlinks=True)
    shutil.rmtree(tree / library / "__pycache__", ignore_errors=True)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.check_output([tree / "bin" / program.name, "-I", "-c", ask], text=True)
    # Not `import pip`: from then on setuptools, which vLLM imports, refuses (_distutils_hack).
    theirs = Path(str(metadata.distribution("pip").locate_file("")))
    for part in theirs.glob("pip*"):
        shutil.copytree(part, Path(packages.strip()) / part.name, ignore=left_out)
    with tarfile.open(folder / "python.tar", "w") as archive:
        archive.add(tree, ".")
    shutil.rmtree(tree)
    return folder / "python.tar"


@functools.cache
def small_bundle(again: bool = False) -> Path:
    """The small bundle; `again`: the same once more, made by itself."""
    folder = _workplace()
    python, lock = folder / "python.tar", folder / "base.lock"
    if not python.exists():
        system_python(folder)
        small_lock(folder)
    return maker.bundle(folder / ("b" if again else "a"), model=False, python=python, lock=lock)


@functools.cache
def _workplace() -> Path:
    """A folder that other users can read, gone with this process."""
    folder = Path(tempfile.mkdtemp(prefix="ke-bundle-"))
    folder.chmod(0o755)
    atexit.register(shutil.rmtree, folder)
    return folder


def unpack(archive: Path, into: Path) -> Path:
    """The folder of an unpacked bundle, as tar makes it."""
    into.mkdir(parents=True)
    subprocess.run(["tar", "-xf", archive, "-C", into], check=True)
    (folder,) = into.iterdir()
    return folder


def install(
    bundle: Path,
    prefix: Path | str,
    *options: str,
    via: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    """install.sh of an unpacked bundle; via: a command that starts it, such as unshare -n."""
    argv = [*via, "bash", str(bundle / "install.sh"), "--offline", "--prefix", str(prefix)]
    env = {"PATH": os.environ["PATH"], "HOME": "/dev/null/home"} | dict(env or {})
    return subprocess.run([*argv, *options], env=env, capture_output=True, text=True, **more)


def rewrite(file: Path, data: bytes) -> None:
    """New content under the name alone: other hard links keep the old."""
    file.unlink()
    file.write_bytes(data)
