"""Files that are either whole or not there, and digests of what is in them.

Everything that a run keeps is written through here: to a temporary name in the same folder,
fsynced, then renamed (replace) or linked (first one wins). The price is one extra directory
entry and two fsyncs a file; nothing half-written is ever seen under a final name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

TEMPORARY = ".tmp-"
"""Prefix of names that no reader looks at; `gc` removes those of dead workers."""

ENVIRONMENT_FAULTS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE}
)
"""OSErrors that say something about the machine, not about the unit being worked on."""


def temporary_name(path: Path) -> Path:
    """A name beside `path` that readers ignore and no other writer uses."""
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}-{path.name}")


def write_atomic(path: Path, data: bytes | str, *, sync: bool = True) -> None:
    """Create or replace `path` with `data`, whole or not at all.

    sync=False leaves out the fsyncs: for heartbeats, which mean nothing after a crash.
    """
    with _temporary(path, data, sync=sync) as temp:
        os.replace(temp, path)
    if sync:
        fsync_dir(path.parent)


def create_exclusive(path: Path, data: bytes | str) -> bool:
    """Create `path` with `data` if it does not exist yet; False when somebody was first.

    Uses link(2), which is atomic on local disks, NFS and Lustre alike.
    """
    with _temporary(path, data, sync=True) as temp:
        try:
            os.link(temp, path)
        except FileExistsError:
            return False
        finally:
            temp.unlink(missing_ok=True)
    fsync_dir(path.parent)
    return True


def link_exclusive(existing: Path, path: Path) -> bool:
    """Give a whole, fsynced file a second name; False when that name is taken."""
    try:
        os.link(existing, path)
    except FileExistsError:
        return False
    fsync_dir(path.parent)
    return True


@contextlib.contextmanager
def _temporary(path: Path, data: bytes | str, *, sync: bool) -> Iterator[Path]:
    temp = temporary_name(path)
    try:
        with open(temp, "wb") as f:
            # A lone surrogate in a quoted input must not hide the error that quotes it.
            f.write(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)
            if sync:
                f.flush()
                os.fsync(f.fileno())
        yield temp
    except BaseException as e:
        temp.unlink(missing_ok=True)
        if isinstance(e, OSError) and e.filename is None:
            e.filename = str(path)  # a full disk should say where
        raise


def fsync_dir(folder: Path) -> None:
    """Make renames and links in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_file(path: Path) -> None:
    """Make the bytes of an already written file durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def to_json(value: Any) -> str:
    """Canonical JSON: sorted keys, no spaces, so that equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """32 hex digits that stand for a JSON-able value (blake2b-128 of its canonical JSON)."""
    return hashlib.blake2b(to_json(value).encode(), digest_size=16).hexdigest()


def read_json(path: Path) -> Any | None:
    """The JSON in `path`, or None where the file is missing or not whole."""
    try:
        with open(path, "rb", buffering=0) as f:  # half the time of Path.read_bytes
            return json.loads(f.read())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file of JSON lines; a line that is none (cut short, foreign) is left out.
    None where there is no file."""
    try:
        stream = path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    with stream:
        for text in stream:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


def file_digest(path: Path) -> str:
    """xxh3-128 of a file's bytes, 32 hex digits (finds damage, not tampering; 10 GB/s a core)."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as f:
        while block := f.read(1 << 22):
            state.update(block)
    return state.hexdigest()


def bytes_digest(data: bytes) -> str:
    """The same of bytes at hand."""
    return xxhash.xxh3_128_hexdigest(data)


def sha256_of_all(digests: Mapping[str, str]) -> str:
    """One sha256 for {name: sha256 of a file}: over the lines of sha256sum, in order of names."""
    lines = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """sha256 of a file's bytes, 64 hex digits."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
