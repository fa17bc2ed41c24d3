"""An installed light base for tests: what a login node has, with a Python of its own (3.13).

    from light_base import light_base    # tests/containers_room on sys.path
    prefix = light_base()                # prefix / "bin" / "kimi-eagle"

Made from the checkout's present source by a bundle and install.sh, as on any machine; kept under
/var/tmp, where other users can read it, by the digest of what it is made from. The first time
takes minutes (a Python is built; root only), a change of the source some 15 s.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from bundles import ROOT, install, maker, unpack

from kimi_eagle.files import sha256_file
from kimi_eagle.images import wheels


@functools.cache
def bundled() -> Path:
    """The archive of `make bundle` without the model; prints once how long it took."""
    start, shelf = time.monotonic(), _shelf()
    digest = _digest()
    with wheels.exclusive(shelf / "bundle.busy"):
        folder = shelf / f"bundle-{digest}"
        if not folder.is_dir():
            _forget("bundle-")
            archive = maker.bundle(shelf / ".bundle-new", model=False)
            (shelf / ".bundle-new").rename(folder)
            print(f"bundle: {archive.name}, {time.monotonic() - start:.1f} s")
    return next(folder.glob("*.tar"))


@functools.cache
def light_base() -> Path:
    """PREFIX of an installed base of the present source; prints once how long it took."""
    archive, shelf = bundled(), _shelf()
    start = time.monotonic()
    prefix = shelf / f"base-{_digest()}"
    with wheels.exclusive(shelf / "base.busy"):
        if not (prefix / "bin/kimi-eagle").exists():
            _forget("base-")
            unpacked = unpack(archive, shelf / ".base-unpacked")
            done = install(unpacked, prefix)
            shutil.rmtree(shelf / ".base-unpacked")
            if done.returncode:
                raise RuntimeError(done.stderr)
            print(f"light base: {prefix}, {time.monotonic() - start:.1f} s")
    return prefix


def _shelf() -> Path:
    shelf = Path(f"/var/tmp/kimi-eagle-base-{os.getuid()}")
    shelf.mkdir(mode=0o755, exist_ok=True)
    return shelf


def _forget(kind: str) -> None:
    """What a killed session left, and those of sources of yesterday."""
    for path in (*_shelf().glob(f".{kind}*"), *_shelf().glob(f"{kind}*")):
        if path.is_dir() and (path.name[0] == "." or time.time() - path.stat().st_mtime > 86400):
            shutil.rmtree(path, ignore_errors=True)


@functools.cache
def _digest() -> str:
    """What a base is made from, as 16 hex digits."""
    digest = hashlib.sha256()
    trees = [path for part in ("src", "jobs", "slurm") for path in (ROOT / part).rglob("*")]
    made_by = [ROOT / "pyproject.toml", *(ROOT / "containers/python").iterdir()]
    for kind in ("lock", "sh", "py"):
        made_by += (ROOT / "containers").glob(f"*.{kind}")
    for path in sorted([*trees, *made_by]):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(ROOT)} {sha256_file(path)}\n".encode())
    return digest.hexdigest()[:16]
