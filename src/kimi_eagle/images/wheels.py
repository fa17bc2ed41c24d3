"""What goes into an image from package indexes, fetched on the host: the wheels of a lock.

The host's own pip settings decide where from (its index, `find-links`, `TORCH_INDEX` for torch's
CPU build), so that none of this gets into an image. Every file is checked against the lock's
sha256 by pip. A folder of wheels is there whole or not at all, and named by its lock's digest.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.files import sha256_file, sha256_of_all
from kimi_eagle.images.inside import lock_versions

Say = Callable[[str], object]

PYTHON = {"cpu": "3.11", "cuda": "3.12"}
"""The CPython of each flavour's lock."""
_GLIBC = {"cpu": 36, "cuda": 35}
"""Minor version of the image's libc: Debian 12, Ubuntu 22.04."""
_OLD_NAMES = ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64")


def cache() -> Path:
    """Where wheels and base images are kept: $KIMI_EAGLE_CACHE, else ~/.cache/kimi-eagle."""
    return Path(os.environ.get("KIMI_EAGLE_CACHE") or "~/.cache/kimi-eagle").expanduser()


def checkout() -> Path:
    """The checkout that images are built from; UsageError where we run from a wheel."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "containers" / "install-image.sh").is_file():
        raise UsageError(
            "an image is built from a checkout of kimi-eagle, and this is an installed package",
            where=root,
            fix="type this in a checkout after `make setup`, or: kimi-eagle image import FILE",
        )
    return root


def lock_file(flavour: str) -> Path:
    """containers/cpu.lock or cuda.lock; UsageError for another flavour."""
    if flavour not in PYTHON:
        raise UsageError(f"no flavour {flavour!r}", expected=" or ".join(PYTHON))
    return checkout() / "containers" / f"{flavour}.lock"


def wheels(flavour: str, *, lock: Path | None = None, say: Say = print) -> Path:
    """The folder with every wheel of the flavour's lock (or of `lock`), fetched if needed.

    RunError with pip's last words where a wheel cannot be had.
    """
    lock = lock or lock_file(flavour)
    folder = cache() / "wheels" / f"{sha256_file(lock)[:16]}-cp{PYTHON[flavour].replace('.', '')}"
    with exclusive(folder.with_suffix(".busy")):
        if folder.is_dir():
            return folder
        count = len(lock_versions(lock.read_text()))
        say(f"fetching {count} wheels of {lock.name}")
        with _whole(folder) as fresh:
            if count:
                _fetch(lock, fresh, flavour)
    return folder


def pip_wheel() -> Path:
    """The pip that installs inside (containers/pip.lock), one wheel."""
    lock = checkout() / "containers" / "pip.lock"
    return next(wheels("cpu", lock=lock, say=lambda text: None).glob("pip-*.whl"))


def own_wheel(into: Path) -> Path:
    """This project's wheel, built from the checkout in about two seconds."""
    argv = [*_pip(), "wheel", "--quiet", "--no-input", "--no-deps", "--disable-pip-version-check"]
    try:
        import hatchling  # noqa: F401
    except ImportError:
        pass  # pip then fetches it for the build alone
    else:
        argv += ["--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [*argv, "--wheel-dir", str(into), str(checkout())], capture_output=True, text=True
    )
    if done.returncode:
        raise RunError(f"this project's wheel could not be built: {_last(done.stderr)}")
    return next(into.glob("kimi_eagle-*.whl"))


def source_digest(wheel: Path) -> str:
    """What `inside.source_digest` gives where this wheel is installed."""
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith("kimi_eagle/") and n[-1] != "/"]
        return sha256_of_all({n: hashlib.sha256(archive.read(n)).hexdigest() for n in names})


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """One process at a time; the lock ends with the process that holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name at the end and goes away on any failure."""
    fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        yield fresh
        fresh.chmod(0o755)
        fresh.rename(folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _fetch(lock: Path, into: Path, flavour: str) -> None:
    index = os.environ.get("TORCH_INDEX")
    platforms = [f"manylinux_2_{n}_x86_64" for n in range(_GLIBC[flavour], 4, -1)]
    argv = [
        *(*_pip(), "download", "--quiet", "--no-input", "--disable-pip-version-check"),
        *("--no-deps", "--require-hashes", "--only-binary=:all:"),
        *("--implementation", "cp", "--python-version", PYTHON[flavour]),
        *(f"--platform={name}" for name in (*platforms, *_OLD_NAMES)),
        *(["--extra-index-url", index] if index and flavour == "cpu" else []),
        *("--dest", str(into), "--requirement", str(lock)),
    ]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        why = _last(done.stderr)
        fix = "see whether `python -m pip download` works here"
        if "torch" in why and flavour == "cpu":
            fix = "TORCH_INDEX=https://download.pytorch.org/whl/cpu (torch's CPU build)"
        raise RunError(f"pip could not fetch a wheel: {why}", where=lock, fix=fix)


def _pip() -> list[str]:
    have = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True)
    if have.returncode == 0:
        return [sys.executable, "-m", "pip"]
    if program := shutil.which("pip3"):
        return [program]
    raise RunError("no pip here", where=sys.executable, fix="make setup")


def _last(text: str) -> str:
    """pip's last words without its warnings."""
    lines = [x.strip() for x in text.splitlines() if x.strip() and not x.startswith("WARNING")]
    return "; ".join(lines[-3:])[:600] or "pip said nothing"
