"""Reads shards through memory maps: a sample is one slice, nothing is copied.

Reads what `writer.py` makes; writes nothing. Opening checks sizes against the header and the
index (a truncated file never opens); `verify` reads the bytes and compares digests. Arrays are
read-only numpy views (states as uint16, the bits of bfloat16): `torch.from_numpy(...).view(
torch.bfloat16)` on the reader's side costs nothing and keeps torch out of here.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle.errors import RunError
from kimi_eagle.shards.layout import (
    FORMAT,
    MAX_HEADER,
    TENSORS,
    Layout,
    bytes_digest,
    index_path,
    sample_digest,
)

DTYPES = {"hidden_states": np.uint16, "token_ids": np.int32, "loss_mask": np.uint8}


class Shard:
    """One shard; may be pickled (data workers map the file anew) and used from many threads."""

    def __init__(self, path: Path):
        """RunError where the file or its index is missing, truncated or not a shard."""
        self.path = Path(path)
        self._map()
        self._read_index()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._row_of

    @property
    def sample_ids(self) -> list[str]:
        """Ids in file order."""
        return self._ids

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(json.loads(self.meta["layers"]))

    @property
    def tokens(self) -> int:
        return self.layout.tokens

    @property
    def hidden_size(self) -> int:
        return self.layout.hidden

    def n_tokens(self, sample_id: str) -> int:
        return int(self._counts[self._row(sample_id)])

    def sample(self, sample_id: str) -> dict[str, np.ndarray]:
        """hidden_states uint16 [T, layers, hidden] (bf16 bits), token_ids int32 [T], loss_mask
        bool [T]: read-only views. RunError for an unknown id."""
        part = self._slice(self._row(sample_id))
        return {
            "hidden_states": self.arrays["hidden_states"][part],
            "token_ids": self.arrays["token_ids"][part],
            "loss_mask": self.arrays["loss_mask"][part].view(np.bool_),
        }

    def verify(self, sample_id: str | None = None) -> None:
        """Compare the digests of one sample, or of all samples and the loss mask; RunError names
        the first that differs."""
        rows = range(len(self._ids)) if sample_id is None else (self._row(sample_id),)
        for row in rows:
            part = self._slice(row)
            states, ids = self.arrays["hidden_states"][part], self.arrays["token_ids"][part]
            if sample_digest(states, ids) != self._digests[row]:
                raise RunError(
                    "the bytes are not those that were written",
                    where=f"{self.path}, sample {self._ids[row]}",
                    fix="set the unit aside and run extract again",
                )
        if sample_id is None and bytes_digest([self.arrays["loss_mask"]]) != self._mask_digest:
            raise RunError("the loss mask is not the one that was written", where=self.path)

    def _row(self, sample_id: str) -> int:
        try:
            return self._row_of[sample_id]
        except KeyError:
            raise RunError(f"no sample {sample_id}", where=self.path) from None

    def _slice(self, row: int) -> slice:
        start = int(self._starts[row])
        return slice(start, start + int(self._counts[row]))

    def _map(self) -> None:
        try:
            with open(self.path, "rb") as f:
                size = os.fstat(f.fileno()).st_size
                head = f.read(8)
                length = struct.unpack("<Q", head)[0] if len(head) == 8 else MAX_HEADER + 1
                if length > MAX_HEADER or 8 + length > size:
                    raise self._damaged("no safetensors header")
                header = json.loads(f.read(length))
                self.meta: dict[str, str] = header.pop("__metadata__", {})
                if self.meta.get("format") != FORMAT or set(header) != set(TENSORS):
                    raise self._damaged(f"format {self.meta.get('format')!r}", FORMAT)
                self.layout = Layout(*header["hidden_states"]["shape"])
                ends = [header[n]["data_offsets"][1] for n in TENSORS]
                if size != 8 + length + max(ends):
                    raise self._damaged(f"{size} bytes", f"{8 + length + max(ends)} bytes")
                data = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as e:
            raise RunError(f"cannot be read: {e.strerror}", where=self.path) from e
        except (ValueError, KeyError, TypeError) as e:
            raise self._damaged(f"header cannot be read ({e})") from e
        self.arrays = {}
        for name, (dtype, shape, count) in self.layout.tensors().items():
            entry = header[name]
            begin, end = entry["data_offsets"]
            if (entry["dtype"], entry["shape"], end - begin) != (dtype, shape, count):
                raise self._damaged(f"{name} is {entry}", f"{dtype} {shape}")
            raw = data[8 + length + begin : 8 + length + end]
            self.arrays[name] = np.frombuffer(raw, dtype=DTYPES[name]).reshape(shape)

    def _read_index(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = index_path(self.path)
        try:
            table = pq.read_table(path, memory_map=False)
        except OSError as e:
            raise RunError(f"the shard's index cannot be read: {e}", where=path) from e
        except pa.ArrowInvalid as e:
            raise RunError(f"the shard's index is damaged: {e}", where=path) from e
        self._ids: list[str] = table.column("sample_id").to_pylist()
        self._starts = table.column("start").to_numpy()
        self._counts = table.column("n_tokens").to_numpy()
        self._digests: list[str] = table.column("xxh3").to_pylist()
        self._mask_digest = (
            (table.schema.metadata or {}).get(b"kimi_eagle.loss_mask_xxh3", b"").decode()
        )
        ends = np.cumsum(self._counts, dtype=np.int64)
        if (ends[-1] if len(ends) else 0) != self.layout.tokens or not np.array_equal(
            self._starts, ends - self._counts
        ):
            raise RunError("the index does not describe this shard", where=path)
        # Equal ids mean equal tokens and mask: the first of them stands for all.
        self._row_of = {s: i for i, s in reversed(list(enumerate(self._ids)))}

    def _damaged(self, what: str, expected: str = "") -> RunError:
        return RunError(
            f"not a whole shard: {what}",
            where=self.path,
            expected=expected,
            fix="set the unit aside and run extract again",
        )


class ShardSet:
    """Many shards as one store keyed by sample id; a sample found twice counts once."""

    def __init__(self, paths: Iterable[Path]):
        """RunError where a shard does not open or differs in layers or hidden size."""
        self.shards = [Shard(p) for p in paths]
        self._shard_of: dict[str, Shard] = {}
        for shard in self.shards:
            first = self.shards[0]
            if (shard.layers, shard.hidden_size) != (first.layers, first.hidden_size):
                raise RunError(
                    f"layers {list(shard.layers)}, hidden {shard.hidden_size}",
                    where=shard.path,
                    expected=f"layers {list(first.layers)}, hidden {first.hidden_size}",
                )
            for sample_id in shard.sample_ids:
                self._shard_of.setdefault(sample_id, shard)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._shard_of

    def __len__(self) -> int:
        return len(self._shard_of)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def n_tokens(self, sample_id: str) -> int:
        return self._find(sample_id).n_tokens(sample_id)

    def sample(self, sample_id: str) -> dict[str, np.ndarray]:
        """As Shard.sample."""
        return self._find(sample_id).sample(sample_id)

    def verify(self, sample_id: str | None = None) -> None:
        """As Shard.verify, over all shards where no sample is named."""
        if sample_id is not None:
            self._find(sample_id).verify(sample_id)
            return
        for shard in self.shards:
            shard.verify()

    def _find(self, sample_id: str) -> Shard:
        try:
            return self._shard_of[sample_id]
        except KeyError:
            raise RunError(f"no shard holds sample {sample_id}") from None
