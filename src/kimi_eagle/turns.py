"""One at a time: whoever changes what is queued, or reads a file, changes it and writes it back."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kimi_eagle import files, liveness
from kimi_eagle.errors import RunError

TURN_SECONDS = 120


@contextlib.contextmanager
def turn(holder: Path) -> Iterator[None]:
    """Hold the file `holder`, made by link(2), which works on NFS too; wait while others do.

    A dead holder of this machine is pushed aside. One on another machine cannot be seen: RunError
    after TURN_SECONDS, and a person decides. OSError where the folder cannot be written.
    """
    me = {**liveness.identity(), "time": time.time()}
    deadline = time.monotonic() + TURN_SECONDS
    while not files.create_exclusive(holder, files.to_json(me)):
        who = files.read_json(holder)
        if isinstance(who, dict) and _is_dead(who):
            _push_aside(holder, who)
            continue
        if time.monotonic() > deadline:
            who = who if isinstance(who, dict) else {}
            raise RunError(
                f"another command is at work (pid {who.get('pid')} on {who.get('host')})",
                where=holder,
                fix="wait for it; when it is gone from that machine, remove this file",
            )
        time.sleep(0.02)
    try:
        yield
    finally:
        if files.read_json(holder) == me:
            holder.unlink(missing_ok=True)


def _is_dead(who: dict[str, Any]) -> bool:
    try:
        return liveness.is_alive_here(who) is False
    except (KeyError, TypeError, ValueError):  # not a file of ours
        return False


def _push_aside(holder: Path, dead: dict[str, Any]) -> None:
    """Remove the file of a dead holder, and not that of somebody who just took the turn."""
    aside = files.temporary_name(holder)
    with contextlib.suppress(FileNotFoundError):
        holder.rename(aside)
        if files.read_json(aside) != dead:
            with contextlib.suppress(FileExistsError):
                os.link(aside, holder)
        aside.unlink()
