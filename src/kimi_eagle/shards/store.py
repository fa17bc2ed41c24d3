"""Many shards as one store keyed by sample id, opened from their indexes alone.

10,000 shards open in about a second; each file is mapped when its first sample is read. Reading
in a given order with `read` runs ahead in threads: they bring pages in, compare digests and
decode, while the caller computes.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kimi_eagle.errors import RunError
from kimi_eagle.shards.reader import Shard

if TYPE_CHECKING:
    import pyarrow as pa

OPEN = 400
"""Shards mapped at once, the oldest let go first: Python's maps hold a file descriptor each (up to
3.12), and a process may have 1,024."""


class ShardSet:
    """Samples numbered 0..n-1: shards in the order given, samples in file order; a sample found
    twice counts once (the first). May be pickled, and used from many threads."""

    def __init__(self, paths: Iterable[Path], index_digests: Sequence[str | None] | None = None):
        """index_digests: the xxh3-128 that each index must have, from the records.

        RunError where an index does not open, or a shard differs in layers or hidden size.
        """
        import pyarrow as pa

        paths = [p if isinstance(p, Path) else Path(p) for p in paths]
        digests = [None] * len(paths) if index_digests is None else list(index_digests)
        self._lock, self._open = threading.Lock(), deque[Shard]()
        with _no_collection():
            self.shards = [Shard(p, d) for p, d in zip(paths, digests, strict=True)]
            self._judge()
            tables = [s.index.table for s in self.shards]
            counts = [t.num_rows for t in tables]
            ids = [c for t in tables for c in t.column("sample_id").chunks]
            self._ids = pa.chunked_array(ids, pa.string()).combine_chunks()
            lengths = [c for t in tables for c in t.column("n_tokens").chunks]
            self.lengths = pa.chunked_array(lengths, pa.int32()).to_numpy()
            """int32 [n]: tokens of each sample."""
        self.shard_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        """int32 [n]: number of each sample's shard."""
        firsts = np.cumsum(counts, dtype=np.int64) - counts
        self.row_of = (np.arange(len(self._ids)) - np.repeat(firsts, counts)).astype(np.int32)
        """int32 [n]: its row in that shard."""
        if _some_twice(self._ids):
            kept = np.fromiter(self._number_of.values(), np.int64)
            self._ids = self._ids.take(pa.array(kept))
            self.shard_of, self.row_of = self.shard_of[kept], self.row_of[kept]
            self.lengths = self.lengths[kept]
            del self._number_of, self.ids

    def _judge(self) -> None:
        first = self.shards[0].index.meta if self.shards else {}
        for shard in self.shards:
            meta = shard.index.meta
            if all(meta[k] == first[k] for k in ("layers", "hidden_size")):
                continue
            found = f"layers {list(shard.layers)}, hidden {shard.hidden_size}"
            wanted = f"layers {list(self.layers)}, hidden {self.hidden_size}"
            if found != wanted:
                raise RunError(found, where=shard.path, expected=wanted)

    @cached_property
    def ids(self) -> list[str]:
        """Sample ids by number; a list of a million strings is made only where it is asked for."""
        return self._ids.to_pylist()

    @cached_property
    def _number_of(self) -> dict[str, int]:
        found = dict(zip(self.ids, range(len(self.ids)), strict=True))
        if len(found) < len(self.ids):  # an id found twice means its first sample
            for number in range(len(self.ids) - 1, -1, -1):
                found[self.ids[number]] = number
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Without maps and indexes: a data worker opens those of the shards that it reads."""
        shards = [(s.path, s.index_digest) for s in self.shards]
        left_out = ("_lock", "_open", "_number_of", "ids")
        return {k: v for k, v in vars(self).items() if k not in left_out} | {"shards": shards}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.shards = [Shard(p, d, later=True) for p, d in state["shards"]]
        self._lock, self._open = threading.Lock(), deque[Shard]()

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._number_of

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    @property
    def layers(self) -> tuple[int, ...]:
        """RunError where there is no shard."""
        return self._first.layers

    @property
    def hidden_size(self) -> int:
        """RunError where there is no shard."""
        return self._first.hidden_size

    @property
    def _first(self) -> Shard:
        if not self.shards:
            raise RunError("no shards")
        return self.shards[0]

    def number(self, sample_id: str) -> int:
        """RunError for an unknown id."""
        try:
            return self._number_of[sample_id]
        except KeyError:
            raise RunError(f"no shard holds sample {sample_id}") from None

    def n_tokens(self, sample_id: str) -> int:
        return int(self.lengths[self.number(sample_id)])

    def sample(self, sample_id: str) -> dict[str, np.ndarray]:
        """As `at`, by id."""
        return self.at(self.number(sample_id))

    def at(self, number: int) -> dict[str, np.ndarray]:
        """As Shard.at."""
        return self._shard(number).at(self.row_of[number])

    def tokens_at(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """As Shard.tokens_at."""
        return self._shard(number).tokens_at(self.row_of[number])

    def check(self, number: int) -> str | None:
        """As Shard.check."""
        return self._shard(number).check(self.row_of[number])

    def name(self, number: int) -> str:
        """`FILE, sample ID`, for messages."""
        return f"{self.shards[self.shard_of[number]].path}, sample {self._ids[number]}"

    def _shard(self, number: int) -> Shard:
        shard = self.shards[self.shard_of[number]]
        if not shard.mapped:
            with self._lock:
                self._open.append(shard)
                if len(self._open) > OPEN:
                    self._open.popleft().close()
        return shard

    def proven(self, number: int) -> dict[str, np.ndarray]:
        """As `at`, after `check`; RunError names what is damaged."""
        if fault := self.check(number):
            raise RunError(fault, where=self.name(number))
        return self.at(number)

    def read(
        self, numbers: Iterable[int], *, ahead: int = 8, threads: int = 2
    ) -> Iterator[dict[str, np.ndarray]]:
        """`proven` samples in this order, `ahead` of them fetched and decoded before they are
        asked for."""
        with ThreadPoolExecutor(threads, "shard-read") as pool:
            waiting: deque[Future] = deque()
            try:
                for number in numbers:
                    waiting.append(pool.submit(self.proven, int(number)))
                    if len(waiting) > ahead:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()


def _some_twice(ids: pa.StringArray) -> bool:
    """Whether an id occurs twice. Of a million ids of 32 digits in a fifth of the time that Arrow
    takes: a hash of each by numpy, sorted; where two hashes are equal Arrow decides."""
    import pyarrow.compute as pc

    if len(ids) < 2:
        return False
    _, offsets, data = ids.buffers()
    ends = np.frombuffer(offsets, "<i4")[ids.offset : ids.offset + len(ids) + 1]
    if (np.diff(ends) == 32).all():
        words = np.frombuffer(data, "u1")[ends[0] : ends[-1]].view("<u8").reshape(-1, 4)
        hashes = np.zeros(len(ids), np.uint64)
        for column in words.T:  # multiply and shift, as splitmix64 does, word by word
            hashes = (hashes ^ column) * _ODD
            hashes ^= hashes >> np.uint64(32)
        hashes.sort()
        if (hashes[1:] != hashes[:-1]).all():
            return False
    return pc.count_distinct(ids).as_py() < len(ids)


_ODD = np.uint64(0x9E3779B97F4A7C15)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection while a million objects are made that all stay: it looks at every one
    of them again and again, and takes most of the time of 10,000 shards."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
