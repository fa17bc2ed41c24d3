"""One at a time: submit, cancel and the other commands that change what is queued or followed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from kimi_eagle import files, liveness
from kimi_eagle.errors import RunError
from kimi_eagle.rundir import RunDir

LOCK_SECONDS = 120


@contextlib.contextmanager
def one_at_a_time(run: RunDir) -> Iterator[None]:
    """Hold RUN/slurm/submit.lock; whoever comes second waits, then sees what the first has done.

    A holder on this machine that is dead is pushed aside. One on another machine cannot be seen,
    and breaking a live one would double jobs: that is left to a person.
    """
    lock, me = run.slurm.lock, {**liveness.identity(), "time": time.time()}
    deadline = time.monotonic() + LOCK_SECONDS
    while not files.create_exclusive(lock, files.to_json(me)):
        who = files.read_json(lock)
        if isinstance(who, dict) and liveness.is_alive_here(who) is False:
            _push_aside(run, who)
            continue
        if time.monotonic() > deadline:
            who = who if isinstance(who, dict) else {}
            raise RunError(
                f"another command holds the lock (pid {who.get('pid')} on {who.get('host')})",
                where=lock,
                fix="wait for it; when it is gone from that machine, remove the file",
            )
        time.sleep(0.1)
    try:
        yield
    finally:
        if files.read_json(lock) == me:
            lock.unlink(missing_ok=True)


def _push_aside(run: RunDir, dead: dict[str, Any]) -> None:
    """Remove the lock of a dead holder, and not that of somebody who just took it."""
    lock = run.slurm.lock
    aside = files.temporary_name(lock)
    with contextlib.suppress(FileNotFoundError):
        lock.rename(aside)
        if files.read_json(aside) != dead:
            with contextlib.suppress(FileExistsError):
                os.link(aside, lock)
        aside.unlink()
