"""images.lock.json: which image files are meant, by their sha256.

    {"format": "images/1", "images": {NAME: {"file", "sha256", "bytes", "sif_id", "arch", "labels",
                                             "locked"}}}

`file` is relative to the lock file's folder, or absolute. The file may lie in git and be merged by
hand; so it is read with suspicion, and what this version does not know is written back as it was.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_eagle import files
from kimi_eagle.errors import UsageError
from kimi_eagle.turns import turn

NAME = "images.lock.json"
FORMAT = "images/1"
_FIELDS = ("file", "sha256", "bytes", "sif_id", "arch", "labels", "locked")
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Entry:
    """One pinned image."""

    lock: Path
    """The lock file it stands in."""
    name: str
    file: str
    sha256: str
    bytes: int
    sif_id: str
    arch: str
    labels: dict[str, str]
    locked: str
    """When, RFC 3339."""

    @property
    def path(self) -> str:
        """Where the image was when it was locked; it may have moved."""
        return os.path.normpath(self.lock.parent / self.file)


def read(lock: Path) -> dict[str, Entry]:
    """The entries by name, {} where there is no such file; UsageError where it is damaged."""
    return _entries(lock, _document(lock))


def add(lock: Path, entry: Entry, *, replace: bool) -> None:
    """Write one entry, whole or not at all, and lose nobody else's that comes at the same time.

    UsageError where the name stands for another sha256 and `replace` is not set.
    """
    if (old := read(lock).get(entry.name)) and dataclasses.replace(old, locked="") == (
        dataclasses.replace(entry, locked="")
    ):
        return  # as it stands, and git sees no change
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock = lock.resolve()  # a link stays one
        with turn(lock.with_name(f".{lock.name}.turn")):
            document = _document(lock)
            if not replace:
                _refuse_other(_entries(lock, document), lock, entry.name, entry.sha256)
            document["images"][entry.name] = {name: getattr(entry, name) for name in _FIELDS}
            text = json.dumps(document, indent=1, sort_keys=True)
            mode = stat.S_IMODE(lock.stat().st_mode) if lock.exists() else None
            files.write_atomic(lock, text + "\n")
            if mode is not None:  # others can still read what they could
                lock.chmod(mode)
    except OSError as e:
        raise unwritable(lock, f": {e.strerror or e}") from None


def unwritable(where: Path, why: str = "") -> UsageError:
    """What to say of a lock file, or the folder for it, that this user may not write."""
    return UsageError(
        f"the lock file cannot be written{why}",
        where=where,
        fix="--into ~/.config/kimi-eagle, or another folder of your own",
    )


def refuse_other(lock: Path, name: str, sha256: str | None) -> None:
    """UsageError where the name stands for another sha256 already; None is another than any."""
    _refuse_other(read(lock), lock, name, sha256)


def _refuse_other(entries: dict[str, Entry], lock: Path, name: str, sha256: str | None) -> None:
    if (before := entries.get(name)) and before.sha256 != sha256:
        raise UsageError(
            f"{name!r} is pinned to sha256:{before.sha256}, not to {sha256 or 'what is new'}",
            where=lock,
            fix="--replace if the change is meant, or another --name",
        )


def _document(lock: Path) -> dict[str, Any]:
    try:
        seen = lock.stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {"format": FORMAT, "images": {}}
    except OSError as e:
        raise UsageError(f"lock file cannot be read: {e.strerror}", where=lock) from None
    if not stat.S_ISREG(seen.st_mode) or seen.st_size > _MOST_BYTES:
        raise _damaged(lock, "not a file of JSON")
    try:
        document = json.loads(lock.read_bytes(), object_pairs_hook=_once)
    except OSError as e:
        raise UsageError(f"lock file cannot be read: {e.strerror}", where=lock) from None
    except (ValueError, RecursionError) as e:
        raise _damaged(lock, str(e)) from None
    if not isinstance(document, dict) or not isinstance(document.get("images"), dict):
        raise _damaged(lock, "no object with images in it")
    if document.get("format") != FORMAT:
        raise UsageError(
            f"format {document.get('format')!r}", where=lock, expected=FORMAT, fix=_MEND
        )
    return document


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two entries of one name, as a merge leaves them: the last one must not win silently."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"twice: {next(n for n in names if names.count(n) > 1)!r}")
    return found


def _entries(lock: Path, document: dict[str, Any]) -> dict[str, Entry]:
    return {name: _entry(lock, name, value) for name, value in document["images"].items()}


def _entry(lock: Path, name: str, value: Any) -> Entry:
    if not isinstance(value, dict):
        raise _damaged(lock, f"images.{name} is no object")
    for key in ("file", "sha256", "sif_id", "arch", "locked"):
        if not isinstance(value.get(key), str) or "\0" in value[key]:
            raise _damaged(lock, f"images.{name}.{key} is no text")
    if not re.fullmatch("[0-9a-f]{64}", value["sha256"]):
        raise _damaged(lock, f"images.{name}.sha256 is not 64 hex digits")
    if type(value.get("bytes")) is not int or value["bytes"] < 0:
        raise _damaged(lock, f"images.{name}.bytes is no number of bytes")
    labels = value.get("labels")
    if not isinstance(labels, dict) or not all(isinstance(v, str) for v in labels.values()):
        raise _damaged(lock, f"images.{name}.labels is no object of texts")
    return Entry(lock, name, **{key: value[key] for key in _FIELDS})


_MEND = "take it from git again, or move it away and lock each image anew: kimi-eagle image lock"


def _damaged(lock: Path, why: str) -> UsageError:
    return UsageError(f"damaged lock file: {why}", where=lock, fix=_MEND)
