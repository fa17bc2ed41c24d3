"""The CPU image of the checkout's present source, for every test that runs stages in a container.

    from stack import stack_image    # tests/containers_room on sys.path, or importlib
    image = stack_image()

Built by `images/build.py` when it is not there (about 40 s on a kept base image, about 3 min
without one), kept by the digests of lock and source, and pinned beside it. KIMI_EAGLE_TEST_IMAGE
names another file to take. Other users may read it. Two test sessions at once build once.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from kimi_eagle.files import sha256_file
from kimi_eagle.images import build as builder
from kimi_eagle.images import pins, wheels

_held = []
"""Open files whose shared locks say that this session uses an image."""


@functools.cache
def stack_image() -> Path:
    """Path of the image; prints once how long it took and its size."""
    if named := os.environ.get("KIMI_EAGLE_TEST_IMAGE"):
        return Path(named).resolve()
    start = time.monotonic()
    shelf = _open_folder()
    folder = shelf / _digest()
    image = folder / "kimi-eagle-cpu.sif"
    with wheels.exclusive(shelf / "stack.busy"):
        _hold(folder)
        if not (folder / "images.lock.json").is_file():  # written last
            _forget_others(shelf, folder)
            builder.build("cpu", image, replace=True)
            pins.lock(image)
    size, took = image.stat().st_size, time.monotonic() - start
    print(f"stack image: {image} ({size / 1e9:.2f} GB, {took:.1f} s)")
    return image


def _digest() -> str:
    """What the image is made from, as 16 hex digits."""
    containers = wheels.checkout() / "containers"
    made_from = ("cpu.lock", "pip.lock", "install-image.sh", "kimi-eagle-cpu.def")
    digest = hashlib.sha256("".join(sha256_file(containers / n) for n in made_from).encode())
    with tempfile.TemporaryDirectory() as folder:
        digest.update(wheels.source_digest(wheels.own_wheel(Path(folder))).encode())
    return digest.hexdigest()[:16]


def _open_folder() -> Path:
    """A folder that other users reach: in the cache, unless a folder above it is closed."""
    folder = wheels.cache() / "test-images"
    folder.mkdir(parents=True, exist_ok=True)
    if not all(p.stat().st_mode & 0o005 == 0o005 for p in (folder, *folder.resolve().parents)):
        folder = Path(f"/var/tmp/kimi-eagle-test-{os.getuid()}")
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    return folder


def _hold(folder: Path) -> None:
    """Say, until this process ends, that the image is in use."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    file = open(folder / "use", "w")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_SH)
    _held.append(file)


def _forget_others(shelf: Path, folder: Path) -> None:
    """Remove images of other sources that no session uses."""
    for use in shelf.glob("*/use"):
        if use.parent != folder:
            with open(use) as file, contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(use.parent)
