"""Is that worker still alive?

A worker's file holds host, boot id, pid namespace, pid with its start time, and a heartbeat
counter. On the same machine the process table answers at once; elsewhere a worker is dead when its
counter has not moved for 3 beats of the *reader's* own clock. Clocks of different machines and
file times are never compared: they lie (DESIGN promise 6).
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

BEAT_SECONDS = float(os.environ.get("KIMI_EAGLE_BEAT_SECONDS", "2"))
"""Seconds between heartbeats; a test switch, also for slow shared file systems."""

STALE_BEATS = 3


def identity() -> dict[str, Any]:
    """Who this process is, as far as another process can check it."""
    return {
        "host": socket.gethostname(),
        "boot": _read("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": _pid_namespace(),
        "pid": os.getpid(),
        "pid_started": process_start(os.getpid()),
    }


def process_start(pid: int) -> str | None:
    """Start time of a live process in clock ticks since boot; None for dead ones and zombies.

    Pids are reused; pid and start time together are not (man 5 proc, stat fields 3 and 22).
    """
    stat = _read(f"/proc/{pid}/stat")
    if not stat:
        return None
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else rest[18]


def is_alive_here(who: dict[str, Any]) -> bool | None:
    """True or False for a process of this machine, None where only its heartbeat can tell."""
    if who.get("ended"):
        return False
    me = identity()
    if who.get("host") != me["host"]:
        return None
    if who.get("boot") != me["boot"]:
        return False
    if who.get("pid_namespace") != me["pid_namespace"]:
        return None
    return process_start(who["pid"]) == who["pid_started"]


class Watch:
    """Remembers heartbeat counters between looks, on this process's monotonic clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def alive(self, name: str, who: dict[str, Any] | None) -> bool | None:
        """True, False, or None: not known yet, look again within the next beats."""
        if who is None:
            return False
        here = is_alive_here(who)
        if here is not None:
            return here
        beat, now = who.get("beat", 0), time.monotonic()
        last, since = self._seen.setdefault(name, (beat, now))
        if beat != last:
            self._seen[name] = (beat, now)
            return True
        return False if now - since > STALE_BEATS * who.get("beat_seconds", BEAT_SECONDS) else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
