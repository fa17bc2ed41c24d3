"""A safetensors file copied tensor by tensor: some left out, some renamed, no byte changed.

The header (8 bytes of length, JSON) is written anew, the tensors' bytes are copied as they are: no
torch, no number format to know, any size in constant memory. Offsets follow the order of the old
file; the header is padded with spaces to a multiple of 8 bytes, as the format asks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import xxhash

from kimi_eagle.errors import RunError
from kimi_eagle.modelfiles import Header, read_header

BLOCK = 4 << 20
Progress = Callable[[int], None]


def rewrite(source: Path, target: Path, rename: Callable[[str], str | None], tell: Progress) -> int:
    """Write `target` with the tensors whose new name is not None; gives its number of tensors.

    tell: is told the bytes of each block. Raises UsageError for a source that is not whole.
    """
    header, _ = read_header(source)
    with open(source, "rb") as f:
        start = 8 + int.from_bytes(f.read(8), "little")
        kept = sorted(
            (entry["data_offsets"], name, new)
            for name, entry in header.items()
            if name != "__metadata__" and (new := rename(name)) is not None
        )
        written: Header = {k: v for k, v in header.items() if k == "__metadata__"}
        offset = 0
        for (begin, end), name, new in kept:
            if new in written:
                raise RunError(f"two tensors would be named {new}", where=source)
            span = [offset, offset + end - begin]
            written[new] = {**header[name], "data_offsets": span}
            offset = span[1]
        text = json.dumps(written, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(target, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for (begin, end), _, _ in kept:
                f.seek(start + begin)
                _pour(f, out, end - begin, tell)
    return len(kept)


def copy(source: Path, target: Path, recorded: str | None, tell: Progress) -> None:
    """Copy a file; RunError where its bytes are not the recorded ones (xxh3-128, 32 hex digits)."""
    state = xxhash.xxh3_128()
    with open(source, "rb") as f, open(target, "wb") as out:
        while block := f.read(BLOCK):
            state.update(block)
            out.write(block)
            tell(len(block))
    _same(source, state.hexdigest(), recorded)


def check(source: Path, recorded: str | None, tell: Progress) -> None:
    """Read a file as `copy` does, and write nothing."""
    state = xxhash.xxh3_128()
    with open(source, "rb") as f:
        while block := f.read(BLOCK):
            state.update(block)
            tell(len(block))
    _same(source, state.hexdigest(), recorded)


def _same(source: Path, found: str, recorded: str | None) -> None:
    if recorded is not None and found != recorded:
        raise RunError(
            "the bytes are not those that were written",
            where=source,
            expected=f"xxh3 {recorded}",
            fix="kimi-eagle verify RUN --deep, then kimi-eagle retry RUN and run it again",
        )


def _pour(source: BinaryIO, target: BinaryIO, count: int, tell: Progress) -> None:
    while count:
        block = source.read(min(BLOCK, count))
        if not block:
            raise RunError("the file became shorter while it was read", where=source.name)
        target.write(block)
        tell(len(block))
        count -= len(block)
