"""What `convert` reads: samples by number, wherever they come from.

Every source answers the same few questions, so that the two writers (`to_shards.py` and
`to_speculators.py`) know of no format. A sample that cannot be had is an answer too (`Bad`), not an
exception: whether it stops everything is for the caller to say. Here is the source that needs
nothing but our own shards; `speculators_files.py` and `dumps.py` hold the others.
"""

from __future__ import annotations

import errno
import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle import files
from kimi_eagle.errors import KimiEagleError, RunError
from kimi_eagle.shards.layout import OWN_KEYS, digest64
from kimi_eagle.shards.reader import Shard
from kimi_eagle.shards.store import ShardSet

COPIED = 1 << 20
"""States below so many bytes are copied out of their map. A view keeps its whole shard open, and
whoever waits for the disk with a thousand samples of small shards had no file descriptor left."""
MACHINE_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""OSErrors that say nothing about the file being read."""


@dataclass(frozen=True)
class Sample:
    """states uint16 [T, L, H] (bf16 bits), token_ids int32 [T], loss_mask bool [T].

    xxh3: digest of the sample as its source has it, "" where it has none; kind: what that digest
    is of, "bf16" or "fp8" (FORMAT.md). meta: further metadata of what it came from.
    """

    sample_id: str
    states: np.ndarray
    token_ids: np.ndarray
    loss_mask: np.ndarray
    xxh3: str = ""
    kind: str = "bf16"
    meta: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Bad:
    """A sample that cannot be had. missing: it never was there, or is of another text; damaged: it
    was; doubtful: so that others cannot be trusted either."""

    kind: str
    what: str


class Source(ABC):
    """Samples 0..n-1; usable from several threads."""

    kind: str
    path: Path
    layers: tuple[int, ...]
    hidden_size: int
    notes: Sequence[str] = ()
    """Lines for the user: what was taken for granted."""
    weights: np.ndarray
    """int64 [n]: what each sample costs to convert (tokens, or bytes), for the progress."""
    tokens: int | None = None
    """Tokens of all samples, where they are known."""
    bytes: int = 0
    """To be read."""
    grouped: bool = False
    """Whether `group` says where to cut."""
    proven: bool = False
    """Whether `identity` stands for the states themselves, so that nothing has to be read again to
    know that what an earlier process made is of this source."""

    def __len__(self) -> int:
        return len(self.weights)

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """All states as bfloat16 (about, where lengths are not known)."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What tells this source from another one; JSON."""

    @abstractmethod
    def name(self, number: int) -> str:
        """File and sample, for messages."""

    @abstractmethod
    def load(self, number: int) -> Sample | Bad:
        """One sample, proven as far as its source allows."""

    @abstractmethod
    def tokens_of(self, number: int) -> tuple[str, np.ndarray, np.ndarray] | Bad:
        """(sample_id, token_ids int32 [T], loss_mask bool [T]) without reading states."""

    @abstractmethod
    def meta(self, number: int) -> Mapping[str, str]:
        """What is known of who computed a sample: verifier_id, engine, ..."""

    def group(self, number: int) -> int:
        """The unit that a sample came from."""
        return 0


class StoreSource(Source):
    """Shards: those of a run, of a folder, or one."""

    grouped = True
    proven = True

    def __init__(self, path: Path, shards: Sequence[tuple[Path, str | None]], kind: str = "shards"):
        """shards: files and the digests that their indexes must have, where they are known."""
        self.path, self.kind = path, kind
        if not shards:
            raise RunError("no shards", where=path)
        self.set = ShardSet([s for s, _ in shards], [d for _, d in shards])
        self.layers, self.hidden_size = self.set.layers, self.set.hidden_size
        self._metas: dict[int, dict[str, str]] = {}
        self.weights = self.set.lengths.astype(np.int64)
        self.tokens = int(self.weights.sum())
        self.bytes = sum(s.index.bytes for s in self.set.shards)

    @property
    def state_bytes(self) -> int:
        return self.tokens * len(self.layers) * self.hidden_size * 2

    @property
    def codecs(self) -> set[str]:
        return {s.codec for s in self.set.shards}

    def identity(self) -> dict[str, Any]:
        # By content: a unit that was made again has another file name.
        return {"kind": self.kind, "digest": files.digest([_content(s) for s in self.set.shards])}

    def name(self, number: int) -> str:
        return self.set.name(number)

    def group(self, number: int) -> int:
        return int(self.set.shard_of[number])

    def meta(self, number: int) -> Mapping[str, str]:
        group = self.group(number)
        if group not in self._metas:
            self.set.check(number)  # maps the shard by way of the set, which closes old ones
            found = self.set.shards[group].meta
            self._metas[group] = {k: v for k, v in found.items() if k not in OWN_KEYS}
        return self._metas[group]

    def tokens_of(self, number: int) -> tuple[str, np.ndarray, np.ndarray] | Bad:
        try:
            return self.set.ids[number], *(a.copy() for a in self.set.tokens_at(number))
        except RunError as e:
            return Bad("damaged", e.line())

    def load(self, number: int) -> Sample | Bad:
        shard, row = self.set.shards[self.group(number)], int(self.set.row_of[number])
        try:
            if fault := self.set.check(number):
                return Bad("damaged", fault)
            found, meta = self.set.at(number), self.meta(number)
        except RunError as e:
            return Bad("damaged", e.line())
        states = found["hidden_states"]
        return Sample(
            self.set.ids[number],
            states.copy() if states.nbytes < COPIED else states,
            found["token_ids"].copy(),
            found["loss_mask"].copy(),
            shard.index.digests[row],
            kind_of(shard.codec),
            meta,
        )


def kind_of(codec: str) -> str:
    """What the digests of a codec's samples are of."""
    return "fp8" if codec == "fp8" else "bf16"


def _content(shard: Shard) -> list[str]:
    index = shard.index
    ids, digests = "\n".join(index.sample_ids), "\n".join(index.digests)
    return [kind_of(shard.codec), digest64([ids.encode(), digests.encode()])]


def fault_of(error: Exception, where: object) -> str:
    """What an exception says of the foreign file that it was met in; RunError where it says
    something of the machine instead."""
    if isinstance(error, OSError) and error.errno in MACHINE_FAULTS:
        raise RunError(f"cannot be read: {error.strerror}", where=where) from error
    said = str(error).strip().splitlines()
    return f"cannot be read: {said[0] if said else ''} ({type(error).__name__})"


def guarded(read: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """A method of a source of foreign files: what goes wrong with a sample is that one's `Bad`."""

    @functools.wraps(read)
    def guard(source: Source, number: int) -> Any:
        try:
            return read(source, number)
        except KimiEagleError:
            raise
        except Exception as e:  # foreign bytes: zlib, pickle, torch, arrow, unicode, ...
            return Bad("damaged", fault_of(e, source.name(number)))

    return guard


class Stream:
    """Samples of a source from a number on, in order, loaded ahead by threads."""

    def __init__(
        self,
        source: Source,
        start: int,
        *,
        ahead: int = 3,
        threads: int = 2,
        load: Callable[[int], Sample | Bad] | None = None,
    ):
        """ahead: samples in memory beside the one at hand. load: instead of the source's own."""
        self._source, self._next, self._ahead = source, start, ahead
        self._load = load or source.load
        self._pool = ThreadPoolExecutor(threads, "shard-convert")
        self._waiting: deque[tuple[int, Future]] = deque()

    @property
    def position(self) -> int:
        """Number of the sample that `peek` gives."""
        return self._waiting[0][0] if self._waiting else self._next

    def peek(self) -> Sample | Bad | None:
        """The sample at `position`, None after the last."""
        while len(self._waiting) <= self._ahead and self._next < len(self._source):
            self._waiting.append((self._next, self._pool.submit(self._load, self._next)))
            self._next += 1
        return self._waiting[0][1].result() if self._waiting else None

    def advance(self) -> None:
        """Go on to the next one."""
        self._waiting.popleft()

    def close(self) -> None:
        for _, future in self._waiting:
            future.cancel()
        self._pool.shutdown()
