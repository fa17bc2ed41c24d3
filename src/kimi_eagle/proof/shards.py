"""One unit of extract against all that is known of it: its record, the run, the tokens it is of.

The chain of proof (shards/FORMAT.md): the record holds the digest of the index file, the index
those of the header and of every sample. So a shard's bytes are read once, and a fault has a name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kimi_eagle import files
from kimi_eagle.data.rows import sample_id
from kimi_eagle.errors import RunError
from kimi_eagle.ledger import Record
from kimi_eagle.proof.files import BLOCK, Fault
from kimi_eagle.record import CONTENT, unreadable
from kimi_eagle.shards import Shard
from kimi_eagle.shards.index import INDEX_FORMAT, meta_of
from kimi_eagle.shards.layout import MAX_HEADER, PAGE, index_path
from kimi_eagle.shards.writer import content_of

if TYPE_CHECKING:
    from kimi_eagle.stages.context import Context

EXACT = ("raw", "lossless")
"""Codecs with one key: a run that asks for one of them may hold units of the other."""


@dataclass(frozen=True)
class Wanted:
    """What every shard of a run must say of itself."""

    layers: tuple[int, ...]
    hidden_size: int
    verifier_id: str
    codecs: tuple[str, ...]
    agreement: float
    """Least share of positions at which the probe agreed."""

    @classmethod
    def of(cls, ctx: Context) -> Wanted:
        section = ctx.recipe.extract
        codecs = EXACT if section.codec in EXACT else (section.codec,)
        return cls(
            tuple(section.layers),
            ctx.verifier.hidden_size,
            ctx.verifier.id(),
            codecs,
            section.probe_min_agreement,
        )


class WatchedShard(Shard):
    """A shard that tells how far `faults` is, and outlives a disk that cannot read a block."""

    def watch(self, on_bytes: Callable[[int], None]) -> None:
        """Before `faults`. on_bytes: told of each sample, by its share of both files."""
        total = self.index.bytes + index_path(self.path).stat().st_size
        sizes = [int(n * total // max(1, self.tokens)) for n in self.lengths.tolist()]
        on_bytes(total - sum(sizes))
        self._seen = lambda row: on_bytes(sizes[row])

    def check(self, row: int) -> str | None:
        try:
            return self._unreadable(row) or super().check(row)
        finally:
            self._seen(row)

    def _unreadable(self, row: int) -> str | None:
        """Read a sample by read(2) first: where a block is bad this says so, when the same block
        under a map would end the process (SIGBUS). Brings the pages in, too."""
        mapped, buffer, opened = self._mapped, bytearray(BLOCK), False
        try:
            with open(self.path, "rb", buffering=0) as f:
                opened = True
                for part in (*self._stored(row), *self.tokens_at(row)):
                    at = part.__array_interface__["data"][0] - mapped.base
                    end = at + part.nbytes
                    while at < end:
                        view = memoryview(buffer)[: min(BLOCK, end - at)]
                        if not (count := os.preadv(f.fileno(), [view], at)):
                            return "the file ends before it"
                        at += count
        except OSError as e:
            return unreadable(e, self.path, opened=opened)
        return None


class _Proven(WatchedShard):
    """A shard whose samples are compared with the unit's tokens too, whenever one is checked."""

    tokens_of: dict[str, tuple[np.ndarray, np.ndarray]] | None = None
    """sample id -> ids and mask as prepare wrote them; None where these are not to be had."""

    def check(self, row: int) -> str | None:
        return super().check(row) or self._tokens_fault(row)

    def _tokens_fault(self, row: int) -> str | None:
        name, (ids, mask) = self.sample_ids[row], self.tokens_at(row)
        if self.tokens_of is None:  # an id is a hash of ids and mask
            return None if sample_id(ids, mask) == name else "its id is not that of its tokens"
        if name not in self.tokens_of:
            return "no sample of this unit's tokens part"
        want_ids, want_mask = self.tokens_of[name]
        if not np.array_equal(ids, want_ids):
            return "its token ids are not those of the tokens part"
        if not np.array_equal(mask, want_mask):
            return "its loss mask is not that of the tokens part"
        return None


class ShardProof:
    """The files of one finished unit of extract. Nothing is opened before it is asked for."""

    def __init__(self, record: Record, wanted: Wanted):
        self.record, self.wanted = record, wanted
        (self.entry,) = [e for e in record.data["files"] if e["name"].endswith(".safetensors")]
        (self.index_entry,) = [e for e in record.data["files"] if e["name"].endswith(".parquet")]
        self.opens = False
        """Whether `quick` found that the samples can be read and have something to be held against.
        """

    def quick(self) -> Iterator[Fault]:
        """Record, index and header agree with each other and with the run. Reads no sample."""
        own = self.index_entry["name"]
        try:
            with open(f"{self._folder}/{own}", "rb", buffering=0) as f:
                data = f.read()
        except OSError as e:
            yield Fault(unreadable(e, f"{self._folder}/{own}"), own)
            return
        if files.bytes_digest(data) != self.index_entry["xxh3"]:
            yield Fault("its bytes are not those recorded", own)
            return
        counts, wanted = self.record.counts, self.wanted
        rows, meta = _footer(data)
        for what, found, expected in (
            ("format", meta.get("format"), INDEX_FORMAT),
            ("samples", rows, counts.get("samples")),
            ("tokens", meta.get("tokens"), str(counts.get("tokens"))),
            ("bytes of the shard", meta.get("bytes"), str(self.entry["bytes"])),
            ("layers", meta.get("layers"), json.dumps(wanted.layers)),
            ("hidden size", meta.get("hidden_size"), str(wanted.hidden_size)),
            ("header digest", meta.get("header_xxh3"), self.entry["xxh3"]),
        ):
            if found != expected:
                yield Fault(f"{what} {found}, expected {expected}", own)
        if meta.get("codec") not in wanted.codecs:
            yield Fault(f"codec {meta.get('codec')}, the run's: {' or '.join(wanted.codecs)}", own)
        agreed = self.record.info.get("probe", {}).get("agreement")
        if not isinstance(agreed, int | float) or agreed < wanted.agreement:
            yield Fault(f"the probe agreed at {agreed}, expected {wanted.agreement}", own)
        yield from self._header_faults()

    def _header_faults(self) -> Iterator[Fault]:
        try:
            with open(f"{self._folder}/{self._file}", "rb", buffering=0) as f:
                head = f.read(PAGE)
                length = 8 + int.from_bytes(head[:8], "little")
                if length <= MAX_HEADER:
                    head = head[:length] + f.read(max(0, length - len(head)))
        except OSError as e:
            yield Fault(unreadable(e, f"{self._folder}/{self._file}"), self._file)
            return
        if files.bytes_digest(head) != self.entry["xxh3"]:
            yield Fault("its header is not the one recorded", self._file)
            return
        self.opens = True
        found = json.loads(head[8:])["__metadata__"].get("verifier_id")
        if found != self.wanted.verifier_id:
            yield Fault(f"states of another verifier: {found}", self._file)

    def deep(self, part: Path | None, on_bytes: Callable[[int], None]) -> Iterator[Fault]:
        """Where `quick` said that it opens: every byte, every state finite, the tokens' own.

        part: the tokens part of prepare, None where that is damaged itself. on_bytes: bytes read,
        now and then.
        """
        try:
            shard = _Proven(self._folder / self._file)
        except RunError as e:
            yield Fault(e.what, self.index_entry["name"])
            return
        shard.watch(on_bytes)
        if part is not None:
            try:
                shard.tokens_of = _tokens(part)
            except RunError as e:
                yield Fault(f"the tokens part cannot be read: {e.line()}")
        rejected = {r.get("sample_id") for r in self.record.info.get("rejected", ())}
        if shard.tokens_of is not None:
            for name in sorted(shard.tokens_of.keys() - set(shard.sample_ids) - rejected):
                yield Fault("in the tokens part, not in the shard", self._file, name)
        content = self.record.info.get("content")  # others mean something else
        known = isinstance(content, str) and content.startswith(CONTENT)
        if known and content != _content(shard):
            yield Fault("info.content is not what the index says")
        for fault in shard.faults(deep=True):
            yield Fault(fault.what, self._file, fault.sample_id)
        shard.close()

    @property
    def _file(self) -> str:
        return self.entry["name"]

    @property
    def _folder(self) -> Path:
        return self.record.stage_dir.files


def _content(shard: Shard) -> str:
    """As ShardWriter.content."""
    return content_of(shard.sample_ids, shard.lengths.tolist(), shard.index.digests)


def _footer(data: bytes) -> tuple[int, dict[str, str]]:
    """Rows and metadata of an index, its columns left alone: 0.04 ms instead of 0.2."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = pq.ParquetFile(pa.BufferReader(data)).metadata
    return found.num_rows, meta_of(found.metadata)


def _tokens(part: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    from kimi_eagle.data.samples import read_samples

    return {s.sample_id: (s.input_ids, s.loss_mask) for s in read_samples(part)}
