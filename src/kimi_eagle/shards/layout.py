"""What the bytes of a shard mean (FORMAT.md in code); reads and writes nothing itself.

A shard is STEM.safetensors (all samples of a unit end to end) and STEM.index.parquet (one row a
sample, see `index.py`). The safetensors file is an ordinary one: 8 bytes little-endian header
length, a JSON header padded with spaces, then the tensors without gaps (format: safetensors 0.8.0,
README). Two choices: the states come first, so that they can be written before the number of
tokens is known, and the header is padded so that they start on a 4096-byte page. The price is
up to 4 KiB a shard; the gain is a writer that holds no states and a reader that maps whole pages.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "shard/2"
CODECS = ("raw", "lossless", "fp8")
"""raw: the bfloat16 bits. lossless: the same bits, about 0.71 of the size. fp8: e4m3 with a scale
for each token and layer, half the size, not the same values."""

OWN_KEYS = ("format", "codec", "layers", "hidden_size")
"""Metadata that a writer sets itself."""

PAGE = 4096
MAX_HEADER = 1 << 20
ALIGN = 8
"""`blocks` of lossless is padded with zeros to a multiple of this: what follows is aligned."""

DTYPES = {
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
    "F32": np.float32,
    "I32": np.int32,
    "U8": np.uint8,
}
"""safetensors' names -> what numpy maps them as (bfloat16 as its bits, e4m3 as its byte)."""


@dataclass(frozen=True)
class Layout:
    """Sizes of a shard. tokens: all samples together; layers, hidden: of each token's states.

    block_bytes: size of `blocks` with its padding, for lossless.
    """

    codec: str
    tokens: int
    layers: int
    hidden: int
    block_bytes: int = 0

    def tensors(self) -> dict[str, tuple[str, list[int], int]]:
        """name -> (safetensors dtype, shape, bytes), in file order."""
        n, width = self.tokens, self.layers * self.hidden
        shape = [n, self.layers, self.hidden]
        states: dict[str, tuple[str, list[int], int]] = {
            "raw": {"hidden_states": ("BF16", shape, 2 * n * width)},
            "lossless": {"blocks": ("U8", [self.block_bytes], self.block_bytes)},
            "fp8": {
                "hidden_states": ("F8_E4M3", shape, n * width),
                "scales": ("F32", [n, self.layers], 4 * n * self.layers),
            },
        }[self.codec]
        return {**states, "token_ids": ("I32", [n], 4 * n), "loss_mask": ("U8", [n], n)}

    def header(self, meta: Mapping[str, str], size: int) -> bytes:
        """The first `size` bytes of the file: length, JSON, spaces."""
        entries: dict[str, Any] = {"__metadata__": {k: meta[k] for k in sorted(meta)}}
        end = 0
        for name, (dtype, shape, count) in self.tensors().items():
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + count]}
            end += count
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) + 8 > size:
            raise ValueError(f"header of {len(text)} bytes does not fit into {size}")
        return struct.pack("<Q", size - 8) + text.ljust(size - 8)


def header_size(codec: str, meta: Mapping[str, str], layers: int, hidden: int) -> int:
    """Bytes to reserve for the header, whatever the number of tokens turns out to be."""
    biggest = Layout(codec, 10**12, layers, hidden, 10**18)
    need = len(biggest.header(meta, MAX_HEADER).rstrip())
    return -(-need // PAGE) * PAGE


def index_path(shard: Path) -> Path:
    """STEM.safetensors -> STEM.index.parquet."""
    return Path(index_name(str(shard)))


def index_name(shard: str) -> str:
    """The same of names."""
    return f"{shard.removesuffix('.safetensors')}.index.parquet"


def digest64(parts: Iterable[np.ndarray | bytes | memoryview]) -> str:
    """16 hex digits: xxh3_64 over arrays and bytes laid end to end."""
    import xxhash

    state = xxhash.xxh3_64()
    for part in parts:
        state.update(flat(part) if isinstance(part, np.ndarray) else part)
    return state.hexdigest()


def flat(array: np.ndarray) -> memoryview:
    """The bytes of an array, copied only where it is not contiguous."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
