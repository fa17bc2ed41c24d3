"""Losses that a person has accepted: RUN/accepted.jsonl, one line a decision, never rewritten.

A gate stays shut while more was rejected or failed than the recipe's `allow_rejected`. Changing the
recipe would open it without a trace; `kimi-eagle accept` opens it with who, when and why, for one
stage of one run. The last line of a stage is the one that holds, so that a decision can be taken
back with a smaller share.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
from typing import Any

from kimi_eagle import files
from kimi_eagle.rundir import RunDir


def read(run: RunDir) -> list[dict[str, Any]]:
    """Every decision, oldest first; a line cut short by a full disk is left out."""
    try:
        lines = (run.accepted).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("share"), int | float):
            found.append(entry)
    return found


def share_of(run: RunDir, stage: str) -> float:
    """The share of lost samples that was accepted for a stage; 0 where nothing was."""
    return next((e["share"] for e in reversed(read(run)) if e.get("stage") == stage), 0.0)


def add(run: RunDir, stage: str, share: float, reason: str, **facts: Any) -> dict[str, Any]:
    """Append a decision, durable when this returns. facts: what was lost at that moment."""
    entry = {
        "stage": stage,
        "share": share,
        "reason": reason,
        "user": _user(),
        "host": socket.gethostname(),
        "time": time.time(),
        **facts,
    }
    path = run.accepted
    # One write with O_APPEND: two people at once give two lines. The newline in front ends a line
    # that a full disk cut short.
    cut = path.exists() and not path.read_bytes().endswith(b"\n")
    line = ("\n" if cut else "") + files.to_json(entry) + "\n"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(fd, line.encode("utf-8", "backslashreplace"))
        os.fsync(fd)
    finally:
        os.close(fd)
    files.fsync_dir(run.path)
    return entry


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no name for this uid, as in many containers
        return str(os.getuid())
