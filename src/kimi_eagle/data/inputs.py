"""Whether the files of a source could be read at all, without reading a row of them.

Names and sizes of all files, first and last bytes of some, and of the first Parquet file its
columns. What is wrong with rows only `sources.read_rows` finds.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kimi_eagle.data.formats import FORMATS, detect_format
from kimi_eagle.data.sources import SUFFIXES, find_files
from kimi_eagle.errors import UsageError
from kimi_eagle.modelfiles import LFS_MARK

OPENED = 16
"""Files of a source that are opened: of a folder of thousands each costs a round trip."""
MAGIC = b"PAR1"
"""What a Parquet file begins and ends with."""


def look_at(path: Path, format: str) -> list[Path]:
    """The files of a source, in the order in which they are read.

    format: as in the recipe, `any` for whatever columns. UsageError where there is none, or one is
    empty, unreadable, of an unknown kind, a git-LFS pointer, cut off, or without the columns that
    the format needs.
    """
    files = find_files(path)
    for file in files:
        try:
            _check_size(file)
            if file in files[:OPENED]:
                _check_ends(file)
        except OSError as e:
            raise UsageError(f"cannot be read: {e.strerror or e}", where=file) from None
    if files[0].suffix == ".parquet" and format != "any":
        _check_columns(files[0], format)
    return files


def _check_size(file: Path) -> None:
    if file.suffix not in SUFFIXES:
        raise UsageError("unknown kind of file", where=file, expected=", ".join(SUFFIXES))
    found = os.stat(file)
    if not stat.S_ISREG(found.st_mode):
        raise UsageError("not a regular file", where=file)
    if found.st_size == 0:
        raise UsageError("empty file", where=file, expected="at least one row")


def _check_ends(file: Path) -> None:
    with open(file, "rb") as f:
        start = f.read(len(LFS_MARK))
        if start == LFS_MARK:
            fix = "git lfs pull in its checkout"
            raise UsageError("a git-LFS pointer, not data", where=file, fix=fix)
        if file.suffix == ".parquet":
            f.seek(-min(len(MAGIC), os.fstat(f.fileno()).st_size), os.SEEK_END)
            if not start.startswith(MAGIC) or f.read() != MAGIC:
                raise UsageError("not a Parquet file, or cut off", where=file)


def _check_columns(file: Path, format: str) -> None:
    """By the footer alone."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        footer = pq.read_metadata(file)
        columns = footer.schema.to_arrow_schema().names
    except (pa.ArrowException, OSError) as e:
        raise UsageError(f"not parquet: {str(e).splitlines()[0]}", where=file) from None
    needed = FORMATS.get(detect_format(columns) or "" if format == "auto" else format)
    if needed is None or not set(needed) <= set(columns):
        forms = ", ".join("+".join(n) for n in FORMATS.values())
        raise UsageError(
            "no known columns" if needed is None else f"no columns {'+'.join(needed)}",
            where=file,
            expected=f"{'+'.join(needed) if needed else 'one of ' + forms}; "
            f"it has {', '.join(columns)}",
        )
