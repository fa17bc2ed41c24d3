"""What the bytes of a shard mean; reads and writes nothing itself.

A shard is STEM.safetensors (all samples of a unit end to end) and STEM.index.parquet (one row a
sample). The safetensors file is an ordinary one: 8 bytes little-endian header length, a JSON
header padded with spaces, then the tensors without gaps (format: safetensors 0.8.0, README).
Two choices: `hidden_states` comes first, so that states can be written before the number of
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

FORMAT = "shard/1"
INDEX_FORMAT = "shard-index/1"
PAGE = 4096
MAX_HEADER = 1 << 20
TENSORS = ("hidden_states", "token_ids", "loss_mask")

BF16_MAGNITUDE = np.uint16(0x7FFF)
BF16_INFINITY = np.uint16(0x7F80)
"""Magnitude bits of +inf; every value at or above it is inf or NaN."""


@dataclass(frozen=True)
class Layout:
    """Sizes of a shard. tokens: all samples together; layers, hidden: of each token's states."""

    tokens: int
    layers: int
    hidden: int

    @property
    def state_bytes_per_token(self) -> int:
        return self.layers * self.hidden * 2

    def tensors(self) -> dict[str, tuple[str, list[int], int]]:
        """name -> (safetensors dtype, shape, bytes), in file order."""
        n, per_token = self.tokens, self.state_bytes_per_token
        return {
            "hidden_states": ("BF16", [n, self.layers, self.hidden], n * per_token),
            "token_ids": ("I32", [n], 4 * n),
            "loss_mask": ("U8", [n], n),
        }

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


def header_size(meta: Mapping[str, str], layers: int, hidden: int) -> int:
    """Bytes to reserve for the header, whatever the number of tokens turns out to be."""
    biggest = Layout(10**12, layers, hidden)
    need = len(biggest.header(meta, MAX_HEADER).rstrip())
    return -(-need // PAGE) * PAGE


def index_path(shard: Path) -> Path:
    """STEM.safetensors -> STEM.index.parquet."""
    return shard.with_name(shard.name.removesuffix(".safetensors") + ".index.parquet")


def sample_digest(states: np.ndarray, token_ids: np.ndarray) -> str:
    """16 hex digits: xxh3_64 over a sample's state bytes, then its int32 token id bytes."""
    import xxhash

    state = xxhash.xxh3_64(_bytes(states))
    state.update(_bytes(token_ids))
    return state.hexdigest()


def bytes_digest(parts: Iterable[np.ndarray]) -> str:
    """16 hex digits: xxh3_64 over arrays laid end to end."""
    import xxhash

    state = xxhash.xxh3_64()
    for part in parts:
        state.update(_bytes(part))
    return state.hexdigest()


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
