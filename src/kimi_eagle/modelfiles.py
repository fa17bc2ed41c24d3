"""The files of a checkpoint directory: settings as JSON, weights by their headers.

A header (8 bytes of length, then JSON) and the file's size tell whether a weight file is there,
real and whole: some milliseconds a file instead of half a terabyte, which `content_hashes` alone
reads. Writes nothing; no torch at import.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kimi_eagle.errors import UsageError

Header = dict[str, dict[str, Any]]
"""Tensor name -> {dtype, shape, data_offsets}; `__metadata__` -> free words."""

FLOATS = frozenset({"BF16", "F16", "F32", "F64"})
FOREIGN = re.compile(
    r"(?:^|\.)(?:\d+|(?:vision|visual|image|audio|speech|talker|code|mtp|nextn|draft|eagle)\w*)\."
)
"""Parts of a tensor's name that say: not the language model's own."""
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits a value of the safetensors format's types; one that is not named is not measured."""
HEADER_LIMIT = 100 << 20  # bytes; the safetensors format's own limit
LFS_MARK = b"version https://git-lfs"


class Missing(UsageError):
    """A weight file that is not there, or a link to one that is not."""


class Pointer(UsageError):
    """The few lines that git-LFS leaves in a weight file's place."""


class Cut(UsageError):
    """A weight file that is none, or has another size than its header says."""


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; UsageError where it is missing, a pointer or something else."""
    try:
        read = file.read_bytes()
        if read.startswith(LFS_MARK):
            raise UsageError("a git-LFS pointer", where=file, fix="git lfs pull in its checkout")
        # As text: transformers refuses a byte order mark and UTF-16, which json takes as bytes.
        data = json.loads(read.decode("utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"model directory without {file.name}", where=file.parent, expected="a checkpoint"
        ) from None
    except OSError as e:
        raise UsageError(f"cannot be read: {e.strerror}", where=file) from None
    except ValueError as e:
        raise UsageError(f"not JSON: {e}", where=file) from None
    if not isinstance(data, dict):
        raise UsageError("not a JSON object", where=file)
    return data


@contextmanager
def collector_off() -> Iterator[None]:
    """For parsing many headers: each is thousands of small objects without a cycle, and Python's
    cycle collector would walk all of them again and again (Kimi-K2.5: 0.60 s, without it 0.25)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def weight_file(file: Path) -> Path:
    """The file, if it is really there; Missing."""
    if file.is_symlink() and not file.exists():
        raise Missing(f"dangling link to {os.readlink(file)}", where=file, fix="restore its target")
    if not file.is_file():
        raise Missing(
            "weight file missing", where=file, expected="every shard that the index names"
        )
    return file


def read_header(file: Path) -> tuple[Header, int]:
    """The header and the bytes of data behind it, checked against the file's size.

    Raises Missing, Pointer or Cut.
    """
    size = weight_file(file).stat().st_size
    with open(file, "rb") as f:
        start = f.read(len(LFS_MARK))
        if start == LFS_MARK:
            raise Pointer(
                "a git-LFS pointer, not weights", where=file, fix="git lfs pull in its checkout"
            )
        length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
        if not 0 < length <= min(HEADER_LIMIT, size - 8):
            raise Cut("not a safetensors file", where=file)
        f.seek(8)
        try:
            header = json.loads(f.read(length))
            held, odd = _measure(header)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise Cut("not a safetensors file: broken header", where=file) from None
    if odd:
        raise Cut(f"broken header: {odd}", where=file, fix="copy it again")
    expected = 8 + length + held
    if size != expected:
        wanted = f"{expected} by its header"
        raise Cut(f"weight file has {size} bytes", where=file, expected=wanted, fix="copy it again")
    return header, held


def _measure(header: Header) -> tuple[int, str]:
    """Bytes of data by a header, and "" or what safetensors 0.8.0 refuses in it: bytes that no
    tensor or two have, or other than dtype and shape make."""
    spans = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        bits = BITS.get(entry["dtype"])
        if bits and math.prod(entry["shape"]) * bits != 8 * (end - start):
            return 0, f"{name} {entry['dtype']} {entry['shape']} in bytes {start} to {end}"
        spans.append((start, end))
    spans.sort()
    held = 0
    for start, end in spans:
        if start != held or end < start:
            return 0, f"a tensor begins at byte {start}, the one before ends at {held}"
        held = end
    return held, ""


def content_hashes(folder: Path, progress: Callable[[int], None] | None = None) -> dict[str, str]:
    """File name -> sha256 hex of every file of a folder (no sub-folders), read in full.

    `progress` gets the number of bytes of each block read.
    """
    result = {}
    for file in sorted(p for p in folder.iterdir() if p.is_file()):
        h = hashlib.sha256()
        with open(file, "rb") as f:
            while block := f.read(8 << 20):
                h.update(block)
                if progress:
                    progress(len(block))
        result[file.name] = h.hexdigest()
    return result
