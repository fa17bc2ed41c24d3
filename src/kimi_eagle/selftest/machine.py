"""What there is: versions, driver, GPUs and how they are joined, kernel, disk speed."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kimi_eagle.provenance import provenance

PACKAGES = ("compressed-tensors", "hs-connectors", "safetensors", "numba", "nvidia-nccl-cu13")
VARIABLES = ("CUDA_", "NCCL_", "VLLM_", "OMP_", "SLURM_JOB_PARTITION", "LD_PRELOAD")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
DISK_BYTES = 512 << 20
BLOCK = 8 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)


def facts() -> dict[str, Any]:
    """provenance() and what a report from far away is asked for next; nothing secret."""
    from kimi_eagle.provenance import version

    found = {k: v for k, v in provenance().items() if k not in ("host", "partition")}
    found["packages"] = found["packages"] | {n: v for n in PACKAGES if (v := version(n))}
    found["kernel"] = platform.release()
    found["libc"] = " ".join(platform.libc_ver())
    found["memory_gb"] = round(_meminfo("MemTotal") / 1e6, 1)
    found["shm_gb"] = round(shutil.disk_usage("/dev/shm").total / 1e9, 1)
    found["environment"] = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(VARIABLES) and not any(word in name for word in SECRET)
    }
    for name, command in (
        ("nvidia-smi", ["nvidia-smi", "--query-gpu=name,memory.total,pcie.link.gen.current,"
                        "pcie.link.width.current,compute_cap", "--format=csv,noheader"]),
        ("topology", ["nvidia-smi", "topo", "-m"]),
    ):  # fmt: skip
        if text := _says(command):
            found[name] = text
    return found


def torch_sees() -> list[dict[str, Any]]:
    """Name, memory (GB) and architecture of each GPU that torch sees; asked in a process of its
    own, since a process that has used CUDA cannot start others by fork."""
    code = (
        "import json, torch; n = range(torch.cuda.device_count());"
        "p = [torch.cuda.get_device_properties(i) for i in n];"
        "print(json.dumps([{'name': x.name, 'memory_gb': round(x.total_memory / 1e9, 1),"
        " 'capability': f'{x.major}.{x.minor}'} for x in p]))"
    )
    text = _says([sys.executable, "-c", code], timeout=120)
    return json.loads(text.splitlines()[-1]) if text else []


def disk(folder: Path) -> dict[str, Any]:
    """Write DISK_BYTES with fsync, read them back past the page cache where the disk allows it.

    -> {write_mb_s, read_mb_s, direct (whether the read was), free_gb, filesystem}; 1 MB = 10^6 B.
    """
    path = folder / ".disk-speed"
    block = os.urandom(BLOCK)
    try:
        begun = time.monotonic()
        with path.open("wb") as file:
            for _ in range(DISK_BYTES // BLOCK):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        written = time.monotonic() - begun
        os.sync()
        begun = time.monotonic()
        direct = _read(path)
        read = time.monotonic() - begun
    finally:
        path.unlink(missing_ok=True)
    return {
        "write_mb_s": round(DISK_BYTES / written / 1e6),
        "read_mb_s": round(DISK_BYTES / read / 1e6),
        "direct": direct,
        "free_gb": round(shutil.disk_usage(folder).free / 1e9, 1),
        "filesystem": _filesystem(folder),
    }


def _read(path: Path) -> bool:
    """Read a file whole; -> whether past the page cache."""
    import mmap

    buffer = mmap.mmap(-1, BLOCK)  # aligned, as O_DIRECT wants it
    for flags in (os.O_RDONLY | _DIRECT, os.O_RDONLY):
        try:
            fd = os.open(path, flags)
        except OSError:
            continue
        try:
            if flags == os.O_RDONLY:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            while os.readv(fd, [buffer]):
                pass
            return bool(flags & _DIRECT)
        except OSError:
            continue
        finally:
            os.close(fd)
    return False


def _filesystem(folder: Path) -> str:
    text = _says(["stat", "-f", "-c", "%T", str(folder)])
    return text or "unknown"


def _meminfo(key: str) -> int:
    """kB of a line of /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    return 0


def _says(command: list[str], timeout: float = 30) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
