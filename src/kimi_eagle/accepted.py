"""What a person has accepted: RUN/accepted.jsonl, one line a decision, never rewritten.

Losses: a gate stays shut while more was rejected or failed than the recipe's `allow_rejected`.
Changing the recipe would open it without a trace; `kimi-eagle accept RUN STAGE` opens it with who,
when and why, for one stage of one run. The last line of a stage is the one that holds, so that a
decision can be taken back with a smaller share.

Images: a run goes on in the image that it began with. `kimi-eagle accept RUN --image FILE` notes
who let it go on with another one, and why; what holds is RUN/image.json.
"""

from __future__ import annotations

import getpass
import os
import socket
import time
from typing import Any

from kimi_eagle import files
from kimi_eagle.rundir import RunDir


def every(run: RunDir) -> list[dict[str, Any]]:
    """Every decision, oldest first; a line cut short by a full disk is left out."""
    return list(files.json_lines(run.accepted))


def read(run: RunDir) -> list[dict[str, Any]]:
    """The accepted losses, oldest first."""
    return [e for e in every(run) if isinstance(e.get("share"), int | float)]


def images(run: RunDir) -> list[dict[str, Any]]:
    """The accepted changes of image, oldest first: {"image", "before", "reason", "user", ...}."""
    return [e for e in every(run) if isinstance(e.get("image"), str)]


def share_of(run: RunDir, stage: str) -> float:
    """The share of lost samples that was accepted for a stage; 0 where nothing was."""
    return next((e["share"] for e in reversed(read(run)) if e.get("stage") == stage), 0.0)


def add(run: RunDir, stage: str, share: float, reason: str, **facts: Any) -> dict[str, Any]:
    """Note an accepted loss, durable when this returns. facts: what was lost at that moment."""
    return _append(run, {"stage": stage, "share": share, "reason": reason, **facts})


def add_image(run: RunDir, image: str, before: str | None, reason: str) -> dict[str, Any]:
    """Note that the run goes on in another image, durable when this returns.

    image, before: `sha256:...`; before is None for a run that had none.
    """
    return _append(run, {"image": image, "before": before, "reason": reason})


def _append(run: RunDir, decision: dict[str, Any]) -> dict[str, Any]:
    entry = {
        "user": _user(),
        "host": socket.gethostname(),
        "time": time.time(),
        **decision,
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
