"""What a stage has written of a finished unit, and what stat(2) says of the files it names.

A record belongs to the unit and the key of its file name. One that says another (copied over it,
restored to the wrong place) is as good as none, like one that is cut short: every reader is told
so, and `retry` sets the *file* aside.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kimi_eagle.rundir import StageDir

MACHINE = {
    *(errno.EACCES, errno.EPERM, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}
"""Why a file cannot be read that may be whole all the same: who asks has no right to, or the
machine is ill. No damage, and nothing is made again for it."""
CONTENT = "content/1:"
"""How `info.content` of a unit of extract begins (shards/writer.py, content_of). What begins
otherwise means something else, and is not compared."""
UNREADABLE = "cannot be read ("
RIGHTS = "give the rights to read these files, or mend mount or disk; nothing is made again for it"


@dataclass(frozen=True)
class Record:
    """What is known of a finished unit (`state` done) or one given up (`state` failed)."""

    stage_dir: StageDir
    data: dict[str, Any]

    @property
    def unit(self) -> str:
        return self.data["unit"]

    @property
    def key(self) -> str:
        return self.data["key"]

    @property
    def state(self) -> str:
        return self.data["state"]

    @property
    def counts(self) -> dict[str, Any]:
        return self.data.get("counts", {})

    @property
    def info(self) -> dict[str, Any]:
        return self.data.get("info", {})

    @cached_property
    def kinds(self) -> dict[str, Path]:
        """What follows unit and attempt in a file's name -> the file."""
        return {f["name"].split(".", 2)[-1]: self._at(f) for f in self.data["files"]}

    def _at(self, entry: dict[str, Any]) -> Path:
        return self.stage_dir.files / entry["name"]

    def path(self, suffix: str) -> Path:
        """The one file of the unit whose name ends with `suffix`."""
        (entry,) = [f for f in self.data["files"] if f["name"].endswith(suffix)]
        return self._at(entry)

    @property
    def attempt_name(self) -> str:
        """`UNIT.KEY.aN`: this record and no other of the unit."""
        return f"{self.unit}.{self.key}.a{self.data.get('attempt', 0)}"

    def files_whole(self) -> str | None:
        """None when every file is there with its size, else what is wrong (no bytes are read).

        Damage comes before what only this machine cannot read (`of_the_machine`).
        """
        unread = None
        for entry in self.data["files"]:
            path = self._at(entry)
            if fault := size_fault(path, entry["bytes"]):
                if not of_the_machine(fault):
                    return f"{path}: {fault}"
                unread = unread or f"{path}: {fault}"
        return unread


def why_none(data: Any, name: str) -> str | None:
    """Why the JSON in `NAME.json` is no record of `UNIT.KEY`; None where it is one."""
    if not isinstance(data, dict) or not all(
        isinstance(data.get(k), str) for k in ("unit", "key", "state")
    ):
        return "not a record"
    if not all(isinstance(data.get(k, {}), dict) for k in ("counts", "info")):
        return "not a record: counts or info"
    entries = data.get("files")
    if not isinstance(entries, list) or not all(
        isinstance(e, dict) and isinstance(e.get("name"), str) and isinstance(e.get("bytes"), int)
        for e in entries
    ):
        return "not a record: its list of files"
    if (own := f"{data['unit']}.{data['key']}") != name:
        return f"not a record of this unit, but that of {own}"
    return None


def size_fault(path: str | Path, size: int) -> str | None:
    """What is wrong with a file as far as stat tells; None for a regular one of this size."""
    try:
        found = os.stat(path)
    except OSError as e:
        return unreadable(e, path)
    if not stat.S_ISREG(found.st_mode):
        return "not a regular file"
    return None if found.st_size == size else f"{found.st_size} bytes, recorded {size}"


def open_fault(path: Path) -> str | None:
    """Why a file cannot be opened to be read. A pipe is not opened: that would wait for ever."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return "not a regular file"
        with open(path, "rb"):
            return None
    except OSError as e:
        return unreadable(e, path)


def unreadable(error: OSError, path: str | Path, *, opened: bool = False) -> str:
    """`missing`, `cannot be read: WHY`, or `cannot be read (WHY)` where that is the machine's.

    opened: the file was open already, so an I/O error is that of a block.
    """
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "missing"
    why = error.strerror or str(error)
    alone = opened or error.errno != errno.EIO or _answers(os.path.dirname(path))
    if error.errno in MACHINE or not alone:
        return f"{UNREADABLE}{why})"
    return f"cannot be read: {why}"


def of_the_machine(fault: str) -> bool:
    """Whether a fault says nothing of the bytes: the file could not be looked at."""
    return UNREADABLE in fault


def _answers(folder: str) -> bool:
    """Whether a folder can be listed: where it cannot, an I/O error is not that of one file."""
    try:
        os.listdir(folder or ".")
    except OSError:
        return False
    return True
