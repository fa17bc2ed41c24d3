"""One shard through a memory map: a sample is one slice, copied only where it has to be decoded.

Reads what `writer.py` makes; writes nothing. Opening reads the index alone; the safetensors file
is mapped at the first sample, and then its size and header must be those that the index names (a
truncated file never opens). `check` compares one sample's bytes with its digest, at the speed of
memory; `faults` does that for all. Arrays are numpy, states as uint16 (the bits of bfloat16):
`torch.from_numpy(...).view(torch.bfloat16)` on the reader's side costs nothing and keeps torch
out of here.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle import files
from kimi_eagle.errors import RunError
from kimi_eagle.shards import codecs, pages
from kimi_eagle.shards.index import AGAIN, Index, read
from kimi_eagle.shards.layout import ALIGN, DTYPES, FORMAT, MAX_HEADER, Layout, digest64, index_name


@dataclass(frozen=True)
class Fault:
    """Something that is not as it was written; sample_id None: the shard as a whole."""

    sample_id: str | None
    what: str


@dataclass(frozen=True)
class _Mapped:
    meta: dict[str, str]
    arrays: dict[str, np.ndarray]
    """By tensor name; loss_mask as bool."""
    parts: list[slice]
    """The tokens of each sample, in file order."""
    data: mmap.mmap
    base: int
    """Where the map lies in this process."""
    begin: int
    """Where the tensors begin in the file."""


class Shard:
    """One shard; may be pickled (data workers map the file anew) and used from many threads."""

    def __init__(self, path: Path, index_digest: str | None = None, *, later: bool = False):
        """index_digest: xxh3-128 that the index file must have (records hold it). later: open the
        index when it is first needed.

        RunError where the index is missing, damaged or not a shard's.
        """
        self.path = path if isinstance(path, Path) else Path(path)
        self._index_digest = index_digest
        self._lock = threading.Lock()
        self._map: _Mapped | None = None
        if not later:
            _ = self.index

    @cached_property
    def index(self) -> Index:
        """What the index says."""
        # As a string: 10,000 more Path objects take a tenth of the time of opening 10,000 indexes.
        return read(index_name(str(self.path)), self._index_digest)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "index_digest": self._index_digest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    @property
    def index_digest(self) -> str:
        """xxh3-128 of the index file."""
        return self._index_digest or self.index.digest

    # -- from the index --------------------------------------------------------------------------

    @property
    def sample_ids(self) -> list[str]:
        """Ids in file order."""
        return self.index.sample_ids

    @property
    def lengths(self) -> np.ndarray:
        """int32 [n]: tokens of each sample."""
        return self.index.lengths

    @property
    def layers(self) -> tuple[int, ...]:
        return self.index.layers

    @property
    def hidden_size(self) -> int:
        return self.index.hidden_size

    @property
    def codec(self) -> str:
        return self.index.codec

    @property
    def tokens(self) -> int:
        return self.index.tokens

    def __len__(self) -> int:
        return len(self.lengths)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._row_of

    @cached_property
    def _row_of(self) -> dict[str, int]:
        # Equal ids mean equal tokens and mask: the first of them stands for all.
        return {s: i for i, s in reversed(list(enumerate(self.sample_ids)))}

    def row(self, sample_id: str) -> int:
        """Place of a sample in the file; RunError for an unknown id."""
        try:
            return self._row_of[sample_id]
        except KeyError:
            raise RunError(f"no sample {sample_id}", where=self.path) from None

    def n_tokens(self, sample_id: str) -> int:
        return int(self.lengths[self.row(sample_id)])

    # -- from the map ----------------------------------------------------------------------------

    @property
    def mapped(self) -> bool:
        """Whether the file is open."""
        return self._map is not None

    @property
    def meta(self) -> dict[str, str]:
        """Metadata of the safetensors file."""
        return self._mapped.meta

    def sample(self, sample_id: str) -> dict[str, np.ndarray]:
        """As `at`, by id."""
        return self.at(self.row(sample_id))

    def at(self, row: int) -> dict[str, np.ndarray]:
        """hidden_states uint16 [T, layers, hidden] (bf16 bits), token_ids int32 [T], loss_mask
        bool [T]; read-only views of the map, but for states that had to be decoded.

        RunError where states cannot be decoded.
        """
        mapped = self._map or self._mapped
        arrays, part = mapped.arrays, mapped.parts[row]
        return {
            "hidden_states": self._states(row, mapped, part),
            "token_ids": arrays["token_ids"][part],
            "loss_mask": arrays["loss_mask"][part],
        }

    def tokens_at(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """token_ids int32 [T] and loss_mask bool [T], without touching the states."""
        mapped = self._mapped
        part = mapped.parts[row]
        return mapped.arrays["token_ids"][part], mapped.arrays["loss_mask"][part]

    def check(self, row: int) -> str | None:
        """None where the bytes of a sample are those that were written, else what is wrong."""
        try:
            mapped = self._mapped
            part = mapped.parts[row]
            # A file cut short since would end this process (SIGBUS) at the first missing page.
            if (size := self.path.stat().st_size) != self.index.bytes:
                return f"{self.path} has {size} bytes now, {self.index.bytes} were written"
        except (RunError, OSError) as e:
            return str(e)
        want = self.index.stored_digests if self.codec == "lossless" else self.index.digests
        tokens = [mapped.arrays["token_ids"][part], mapped.arrays["loss_mask"][part]]
        if digest64([*self._stored(row), *tokens]) != want[row]:
            return "the bytes are not those that were written"
        return None

    def faults(self, deep: bool = True) -> Iterator[Fault]:
        """All that is wrong with the shard, given that the index is right.

        deep=False: size and header alone. deep: every byte, and lossless states decoded.
        """
        try:
            mapped = self._mapped
        except RunError as e:
            yield Fault(None, str(e))
            return
        if not deep:
            return
        for row, sample_id in enumerate(self.sample_ids):
            if fault := self.check(row) or self._decoding_fault(row):
                yield Fault(sample_id, fault)
        if self.codec == "lossless":
            blocks, columns = mapped.arrays["blocks"], self.index.columns
            ends = np.cumsum(columns["n_bytes"])
            end = int(ends[-1]) if len(ends) else 0
            if not np.array_equal(columns["offset"], ends - columns["n_bytes"]):
                yield Fault(None, "the index leaves gaps between blocks")
            if len(blocks) - end not in range(ALIGN) or blocks[end:].any():
                yield Fault(None, "bytes after the last block")

    def close(self) -> None:
        """Let go of the map until the next sample is asked for; views that were given stay good."""
        self._map = None

    # -- inside ----------------------------------------------------------------------------------

    def _stored(self, row: int) -> list[np.ndarray]:
        """The stored bytes of a sample's states, asked for where they are not in memory."""
        mapped = self._mapped
        return self._stored_in(mapped, mapped.parts[row], row)

    def _stored_in(self, mapped: _Mapped, part: slice, row: int) -> list[np.ndarray]:
        codec = self.index.codec
        if codec == "lossless":
            start = int(self.index.columns["offset"][row])
            found = [
                mapped.arrays["blocks"][start : start + int(self.index.columns["n_bytes"][row])]
            ]
        else:
            found = [mapped.arrays["hidden_states"][part]]
            start = part.start * found[0].strides[0]
        pages.bring_in(mapped.data, mapped.base, mapped.begin + start, found[0].nbytes)
        return [*found, mapped.arrays["scales"][part]] if codec == "fp8" else found

    def _states(self, row: int, mapped: _Mapped, part: slice) -> np.ndarray:
        codec = self.index.codec
        if codec == "raw":  # `_stored_in` written out: reading raw is as fast as this is short
            states = mapped.arrays["hidden_states"][part]
            start = mapped.begin + part.start * states.strides[0]
            pages.bring_in(mapped.data, mapped.base, start, states.nbytes)
            return states
        stored = self._stored_in(mapped, part, row)
        if codec == "fp8":
            return codecs.dequantise(*stored)
        shape = (int(self.lengths[row]), len(self.layers), self.hidden_size)
        try:
            return codecs.decompress(stored[0], int(np.prod(shape))).reshape(shape)
        except ValueError as e:
            raise self._damaged(f"sample {self.sample_ids[row]} cannot be decoded ({e})") from None

    def _decoding_fault(self, row: int) -> str | None:
        """What `check` cannot see: states that are as written, but not as they were given."""
        try:
            if self.codec == "fp8":
                fine = codecs.finite_fp8(*self._stored(row))
            else:
                sample = self.at(row)
                fine = codecs.finite(np.ascontiguousarray(sample["hidden_states"]))
        except RunError as e:
            return str(e)
        if not fine:
            return "inf or NaN in the states"
        if self.codec == "lossless" and digest64(sample.values()) != self.index.digests[row]:
            return "the decoded states are not those that were given"
        return None

    @property
    def _mapped(self) -> _Mapped:
        mapped = self._map  # another thread may close it at any moment
        if mapped is None:
            with self._lock:
                mapped = self._map or self._open()
                self._map = mapped
        return mapped

    def _open(self) -> _Mapped:
        index = self.index
        try:
            with open(self.path, "rb") as f:
                size = os.fstat(f.fileno()).st_size
                if size != index.bytes:
                    raise self._damaged(f"{size} bytes", f"{index.bytes} bytes")
                length = 8 + int.from_bytes(f.read(8), "little")
                if not 8 < length <= min(MAX_HEADER, size):
                    raise self._damaged("no safetensors header")
                f.seek(0)
                head = f.read(length)
                if files.bytes_digest(head) != index.meta["header_xxh3"]:
                    raise self._damaged("the header is not the one that was written")
                data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as e:
            raise RunError(f"cannot be read: {e.strerror}", where=self.path) from e
        try:
            header = json.loads(head[8:])
            meta: dict[str, str] = header.pop("__metadata__")
            if meta["format"] != FORMAT:
                raise ValueError(f"format {meta['format']}")
            blocks = header["blocks"]["shape"][0] if index.codec == "lossless" else 0
            layout = Layout(index.codec, index.tokens, len(index.layers), index.hidden_size, blocks)
            arrays, whole = {}, memoryview(data)
            for name, (dtype, shape, count) in layout.tensors().items():
                begin, end = (length + o for o in header[name]["data_offsets"])
                if (header[name]["dtype"], header[name]["shape"], end - begin) != (
                    dtype,
                    shape,
                    count,
                ):
                    raise ValueError(f"{name} is {header[name]}, expected {dtype} {shape}")
                arrays[name] = np.frombuffer(whole[begin:end], DTYPES[dtype]).reshape(shape)
        except (ValueError, KeyError, TypeError) as e:
            raise self._damaged(f"header cannot be read ({e})") from e
        arrays["loss_mask"] = arrays["loss_mask"].view(np.bool_)
        ends = (index.starts + index.lengths).tolist()
        parts = [slice(a, b) for a, b in zip(index.starts.tolist(), ends, strict=True)]
        return _Mapped(meta, arrays, parts, data, pages.address(data), length)

    def _damaged(self, what: str, expected: str = "") -> RunError:
        return RunError(f"not a whole shard: {what}", where=self.path, expected=expected, fix=AGAIN)
