"""OUT, written as a whole: a temporary folder beside it, fsynced, then renamed.

An OUT that is there already is replaced only where it is an export of ours with nothing added to
it: people edit cards and add files, and no second export may take these away.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from kimi_eagle import files
from kimi_eagle.errors import UsageError

MARKER = "kimi-eagle-export.json"
"""Says that we wrote a folder, and what: {format, kind, files: {name: [bytes, mtime_ns]}}. No
digests: a draft of 7 GB would be read again only to be replaced. A copy of an export that got other
times counts as changed."""
FORMAT = "export/1"


def writable(out: Path) -> None:
    """UsageError where OUT is something else than a place for an export; nothing is made."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(
            "a file or a link lies there", where=out, fix="choose another folder or move it away"
        )
    if not out.exists() or not any(out.iterdir()):
        return
    if fault := _changed(out):
        raise UsageError(
            f"the folder holds {fault}",
            where=out,
            expected="no folder, an empty one or an export nobody changed",
            fix="choose another folder or move it away",
        )


def write(out: Path, kind: str, fill: Callable[[Path], None]) -> None:
    """Let `fill` write all files into a folder that then becomes OUT."""
    writable(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temp = files.temporary_name(out)
        temp.mkdir()
    except OSError as e:
        raise UsageError(f"cannot be written: {e.strerror}", where=out) from None
    try:
        fill(temp)
        written = {p.name: _stat(p) for p in sorted(temp.iterdir())}
        about = {"format": FORMAT, "kind": kind, "files": written}
        (temp / MARKER).write_text(json.dumps(about, indent=1, sort_keys=True) + "\n")
        for file in temp.iterdir():
            file.chmod(0o644)
            files.fsync_file(file)
        files.fsync_dir(temp)
        _replace(temp, out)
    except BaseException as e:
        shutil.rmtree(temp, ignore_errors=True)
        if isinstance(e, OSError) and e.filename is None:
            e.filename = str(out)  # a full disk should say where
        raise


def _replace(temp: Path, out: Path) -> None:
    if not out.exists():
        temp.rename(out)
    else:
        writable(out)  # somebody may have changed it meanwhile
        old = files.temporary_name(out)
        out.rename(old)
        temp.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    files.fsync_dir(out.parent)


def _changed(out: Path) -> str | None:
    """What in a folder is not ours any more; None where all is."""
    about = files.read_json(out / MARKER)
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        return "something else"
    known = about.get("files")
    if not isinstance(known, dict):
        return "something else"
    for path in sorted(out.iterdir()):
        if path.name == MARKER:
            continue
        if path.name not in known or not path.is_file():
            return f"{path.name}, which no export wrote"
        if _stat(path) != known[path.name]:
            return f"{path.name}, which was changed since it was exported"
    return None


def _stat(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]
