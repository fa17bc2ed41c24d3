"""sha256 of an image file, and the memory of it: 20 GB are read once, not at each submit.

What is remembered holds while size, both times to the nanosecond and the inode are the same; the
time of change (ctime) cannot be set back by anybody but root with the clock. It lies in
$XDG_CACHE_HOME/kimi-eagle/images.json, or ~/.cache; where that cannot be written, each call reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kimi_eagle import files
from kimi_eagle.errors import UsageError
from kimi_eagle.images import sif

SETTLED_SECONDS = 2.0
"""A file younger than this is not remembered: a second change might get the same time stamps."""

_MOST_FILES = 200
_FORMAT = "image-digests/1"
_BLOCK = 4 << 20

Progress = Callable[[int], None]
"""Called with the bytes read since the last call."""


def stat_line(path: str | os.PathLike[str]) -> str:
    """What GNU `stat -Lc '%s %.9Y %.9Z %i' FILE` prints in the C locale: size, times, inode."""
    return line_of(os.stat(path))


def line_of(seen: os.stat_result) -> str:
    """`stat_line` of a result of os.stat."""
    times = f"{_seconds(seen.st_mtime_ns)} {_seconds(seen.st_ctime_ns)}"
    return f"{seen.st_size} {times} {seen.st_ino}"


def _seconds(ns: int) -> str:
    whole, part = divmod(abs(ns), 10**9)
    return f"{'-' if ns < 0 else ''}{whole}.{part:09d}"


def sha256(
    path: str, seen: os.stat_result, *, fresh: bool = False, progress: Progress | None = None
) -> str:
    """64 hex digits. UsageError where the file is not the one of `seen`, or changes meanwhile.

    path: absolute and resolved. fresh: read it even where its digest is remembered.
    """
    key = line_of(seen)
    if not fresh and (known := _remembered().get(path)) and known["stat"] == key:
        if key != _line_now(path):
            raise changed(path)
        return str(known["sha256"])
    age = time.time() - max(seen.st_ctime_ns, seen.st_mtime_ns) / 1e9
    with sif.open_image(path) as file:
        state = hashlib.sha256()
        for block in blocks(file, path, seen.st_size, progress):
            state.update(block)
        # Of the open file, and of what the path names now: it may have been replaced.
        if not key == line_of(os.fstat(file.fileno())) == _line_now(path):
            raise changed(path)
    if age > SETTLED_SECONDS:
        _remember(path, {"stat": key, "sha256": state.hexdigest()})
    return state.hexdigest()


def blocks(
    file: BinaryIO, path: str, size: int, progress: Progress | None
) -> Iterator[memoryview]:
    """The bytes of an open image, each block good until the next; UsageError beyond `size`."""
    block = memoryview(bytearray(_BLOCK))
    while True:
        try:
            count = file.readinto(block)  # type: ignore[attr-defined]
        except OSError as e:
            raise UsageError(f"image cannot be read: {e.strerror}", where=path) from None
        if not count:
            return
        size -= count
        if size < 0:  # it grows, perhaps for ever
            raise changed(path)
        yield block[:count]
        if progress:
            progress(count)


def changed(path: str) -> UsageError:
    """What to say of a file that was not left alone while it was read."""
    fix = "wait until it is written or copied, then again"
    return UsageError("the image changed while it was read", where=path, fix=fix)


def _line_now(path: str) -> str:
    try:
        return stat_line(path)
    except OSError:
        return ""


def _cache_file() -> Path | None:
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # the standard says: then it does not count
        folder = os.path.expanduser("~/.cache")
    return Path(folder, "kimi-eagle", "images.json") if os.path.isabs(folder) else None


def _remembered() -> dict[str, dict[str, str]]:
    """What is known, without a word about what is damaged or somebody else's."""
    path = _cache_file()
    try:
        # Through sudo HOME may be another user's, whose word is not enough.
        if path is None or path.stat().st_uid != os.geteuid():
            return {}
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        return {}
    entries = data.get("files")
    return {k: v for k, v in entries.items() if _whole(v)} if isinstance(entries, dict) else {}


def _whole(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("stat"), str)
        and isinstance(entry.get("sha256"), str)
        and re.fullmatch("[0-9a-f]{64}", entry["sha256"]) is not None
    )


def _remember(path: str, entry: dict[str, str]) -> None:
    """Two at once: one of the entries may be lost, and its file is read once more."""
    cache = _cache_file()
    if cache is None:
        return
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        kept = {k: v for k, v in _remembered().items() if k != path and os.path.exists(k)}
        kept = dict(list(kept.items())[1 - _MOST_FILES :]) | {path: entry}
        files.write_atomic(cache, json.dumps({"format": _FORMAT, "files": kept}))
