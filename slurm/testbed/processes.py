"""Which processes are ours, and ending them.

A process is known by its id, its start time and the boot it was started in, written to a file when
it starts; ids alone are reused. What has no such file (a slurmstepd that outlived its slurmd, a
task of a job) is found by what is private to a testbed: a file held open, SLURM_CONF in its
environment. Nothing is ended for its name.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A row of /proc: enough to find and to end a process."""

    pid: int
    parent: int
    start: int
    comm: str


def look(pid: int) -> Process | None:
    """The live process with this id. A zombie is dead: some machines reap orphans late."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    comm, _, rest = text.partition(" (")[2].rpartition(") ")
    fields = rest.split()
    if fields[0] in "ZX":
        return None
    return Process(pid, int(fields[1]), int(fields[19]), comm)


def lives(process: Process) -> bool:
    """Whether it still runs (its parent may be another by now)."""
    now = look(process.pid)
    return now is not None and now.start == process.start


def boot_id() -> str:
    """Changes with every boot, when ids and start times begin anew."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def remember(file: Path, pid: int) -> None:
    """Write who this is, whole or not at all."""
    process = look(pid)
    if process:
        draft = file.with_suffix(".new")
        draft.write_text(f"{pid} {process.start} {boot_id()}\n")
        draft.replace(file)


def recall(file: Path) -> Process | None:
    """The process that was remembered here, if it is still that one and alive."""
    try:
        pid, start, boot = file.read_text().split()
        process = look(int(pid))
    except (OSError, ValueError):
        return None
    return process if process and process.start == int(start) and boot == boot_id() else None


def everyone() -> Iterator[Process]:
    """All live processes but this one."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            process = look(int(entry))
            if process:
                yield process


def environment(pid: int) -> set[str]:
    """NAME=VALUE of a process as it was started; empty if it is another user's."""
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0"))
    except OSError:
        return set()


def open_files(pid: int) -> list[str]:
    """Paths of what a process holds open; empty if it is another user's."""
    try:
        return [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    except OSError:
        return []


def with_descendants(roots: Iterable[Process]) -> list[Process]:
    """These and all that they started, parents first."""
    children: dict[int, list[Process]] = {}
    for process in everyone():
        children.setdefault(process.parent, []).append(process)
    found = {p.pid: p for p in roots}
    for process in (queue := list(found.values())):
        for child in children.get(process.pid, []):
            if child.pid not in found:
                found[child.pid] = child
                queue.append(child)
    return list(found.values())


def send(process: Process, number: int) -> None:
    """Signal it if it is still itself."""
    if lives(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def end(processes: Iterable[Process], patience_seconds: float = 10) -> None:
    """Ask all to end, wait, and kill those that do not."""
    left = list(processes)
    for process in left:
        send(process, signal.SIGTERM)
    left = wait_gone(left, patience_seconds)
    for process in left:
        send(process, signal.SIGKILL)
    wait_gone(left, 5)


def wait_gone(processes: list[Process], seconds: float) -> list[Process]:
    """Those that still live after this time."""
    deadline = time.monotonic() + seconds
    while True:
        processes = [p for p in processes if lives(p)]
        if not processes or time.monotonic() > deadline:
            return processes
        time.sleep(0.03)
