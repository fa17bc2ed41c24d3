"""Any source of samples into a folder of shards: proven, and whole after any interruption.

Reads a `Source`, writes OUT/shard-00000.safetensors, ... with indexes, and OUT/shards.json
(`folder.py`). Where a shard ends depends on the source and the arguments alone, so a shard that
was not finished is made again from the same sample on, with the same bytes. After each shard its
bytes are read back and compared: with their own digests, and the digest of each sample with the
one that its source had, where that is of the same kind (raw and lossless hold the same bits).
The price is one reading of what was just written, mostly from memory.

What an earlier process finished is kept only after its bytes were compared with their digests;
what is damaged since is made again. Shards as a source are known by the digests of their samples.
Files of others have none, so the part that is kept is read from them once more, and compared: a
source that was remade under the same names and sizes is refused, never mixed with.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle.conversion.sources import Bad, Sample, Source, Stream, kind_of
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.shards import folder
from kimi_eagle.shards.codecs import encode
from kimi_eagle.shards.layout import CODECS, OWN_KEYS, index_path
from kimi_eagle.shards.reader import Shard
from kimi_eagle.shards.writer import ShardWriter

SHARD_TOKENS = 1_000_000
QUEUE_BYTES = 1 << 28
"""States waiting for the disk, beside those that are being read."""
LEAST_SHARE = {"raw": 1.0, "lossless": 0.6, "fp8": 0.5}
"""What states take at least, for the look at the free space (lossless: some 0.7 is usual)."""


ANOTHER = "give another folder, or remove this one"


@dataclass
class Result:
    """What a conversion found and made. Numbers are of the whole folder, not of this process."""

    out: Path
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    shards: int = 0
    kept: int = 0
    """Shards (or files) that were there already."""
    remade: list[str] = field(default_factory=list)
    """Those that were there and not as they were written."""
    repeated: int = 0
    """Samples that the source has twice; kept once."""
    missing: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {**self.__dict__, "out": str(self.out)}


def need(source: Source, codec: str, share: float = 1.0) -> int:
    """Bytes that a conversion will write at least. share: of the source, as is still to do."""
    tokens = 5 * (source.tokens or 0)
    return int((source.state_bytes * LEAST_SHARE[codec] + tokens) * share)


def check_room(out: Path, size: int) -> None:
    """RunError where the disk clearly has too little space."""
    free = shutil.disk_usage(out).free
    if size > free:
        raise RunError(
            f"at least {size / 1e9:,.2f} GB are to be written, {free / 1e9:,.2f} GB are free",
            where=out,
            fix="free space, give a folder on another disk, or --codec lossless or fp8",
        )


def to_shards(
    source: Source,
    out: Path,
    *,
    codec: str = "raw",
    shard_tokens: int | None = None,
    skip_damaged: bool = False,
    on_progress: Callable[[int], None] = lambda weight: None,
) -> Result:
    """Write all samples of `source` as shards into `out`, or go on with it.

    shard_tokens: cut before a shard holds more [default: as the source is cut, else a million].
    skip_damaged: leave damaged samples out by name instead of stopping. on_progress: told the
    weight (`source.weights`) of what was done, or found to be there.
    UsageError where `out` holds something else, or was made from another source or otherwise;
    RunError where the disk is full, a sample is damaged, or nothing is left.
    """
    if codec not in CODECS:
        raise UsageError(f"unknown codec {codec!r}", expected=f"one of {', '.join(CODECS)}")
    folder.claim_folder(out, source.path, folder.MANIFEST)
    made = _Made(source, out, codec, shard_tokens, skip_damaged)
    folder.sweep(out)
    weights = source.weights
    there = sum(int(weights[e["begin"] : e["end"]].sum()) for e in made.kept.values())
    total = max(1, int(weights.sum()))
    check_room(out, need(source, codec, 1 - there / total))
    made.bind()
    stream: Stream | None = None
    position = 0
    try:
        while position < len(source):
            entry = made.kept.pop((made.next_name, position), None)
            if entry is not None and not made.whole(entry):
                entry = None
            if stream is None or stream.position != position:
                if stream is not None:
                    stream.close()
                stream = Stream(source, position)
            if entry is None:
                made.entries.append(made.shard(stream, on_progress))
                made.save(complete=False)
            else:
                made.take(entry, stream)
                on_progress(int(weights[entry["begin"] : entry["end"]].sum()))
            position = made.entries[-1]["end"]
    finally:
        if stream is not None:
            stream.close()
    if not made.seen:
        raise RunError("no sample could be converted", where=source.path)
    made.kept.clear()
    made.save(complete=True)
    return made.result()


def leave_out(bad: Bad, name: str, skip_damaged: bool, found: Result) -> None:
    """Note a sample that cannot be had; RunError where that stops everything."""
    if bad.kind == "missing":
        found.missing.append(f"{name}: {bad.what}")
    elif bad.kind == "damaged" and skip_damaged:
        found.damaged.append(f"{name}: {bad.what}")
    else:
        skip = "--skip-damaged leaves such samples out"
        again = "these dumps have to be made again"
        raise RunError(bad.what, where=name, fix=skip if bad.kind == "damaged" else again)


def other_source(out: Path, how: str) -> UsageError:
    """What is said where `out` holds something of another source."""
    return UsageError(f"holds a conversion of another source ({how})", where=out, fix=ANOTHER)


def common_meta(
    before: Mapping[str, str] | None, own: Mapping[str, str], name: str
) -> dict[str, str]:
    """What samples say alike of who computed them; RunError where verifiers differ."""
    if before is None:
        return dict(own)
    if (found := own.get("verifier_id")) != (want := before.get("verifier_id")):
        raise RunError(
            f"verifier {found or 'not named'}",
            where=name,
            expected=f"{want or 'none named'}, as before it",
            fix="convert the states of each verifier on their own",
        )
    return {k: v for k, v in before.items() if own.get(k) == v}


def _counts(left: Result) -> dict[str, Any]:
    return {"missing": left.missing, "damaged": left.damaged, "repeated": left.repeated}


class _Made:
    """The shards of `out` as they grow."""

    def __init__(
        self, source: Source, out: Path, codec: str, shard_tokens: int | None, skip_damaged: bool
    ):
        self.source, self.out, self.codec, self.skip = source, out, codec, skip_damaged
        self.by_group = shard_tokens is None and source.grouped
        self.limit = shard_tokens or SHARD_TOKENS
        self.what = {
            "codec": codec,
            "shard_tokens": 0 if self.by_group else self.limit,
            "layers": list(source.layers),
            "hidden_size": source.hidden_size,
            "source": source.identity(),
        }
        self.entries: list[dict[str, Any]] = []
        self.seen: set[str] = set()
        self.meta: dict[str, str] | None = None
        self.taken = 0
        self.remade: list[str] = []
        self.kept = self._kept()

    @property
    def next_name(self) -> str:
        return f"shard-{len(self.entries):05d}"

    def _kept(self) -> dict[tuple[str, int], dict[str, Any]]:
        """(stem, begin) -> entry of each shard that an earlier process finished and that is
        whole still, by size and header."""
        stem = len(".safetensors")
        return {
            (entry["name"][:-stem], entry["begin"]): entry
            for entry in self._listed()
            if self.whole(entry, deep=False)
        }

    def _listed(self) -> list[dict[str, Any]]:
        """What the manifest of `out` lists; UsageError where it is of something else."""
        manifest = folder.read_manifest(self.out)
        if manifest is None:
            return []
        for name, value in self.what.items():
            if manifest[name] != value:
                if name == "source":
                    raise other_source(self.out, manifest["source"]["kind"])
                raise UsageError(
                    f"was made with {name} {manifest[name]}, now it is {value}",
                    where=self.out,
                    fix=ANOTHER,
                )
        return manifest["shards"]

    def bind(self) -> None:
        """Say in `out` what it will be; UsageError where another process says otherwise."""
        if not folder.bind(self.out, self.what):
            self._listed()

    def whole(self, entry: dict[str, Any], *, deep: bool = True) -> bool:
        """Whether a shard that is there is as it was written; notes where it is not."""
        try:
            shard = Shard(self.out / entry["name"], entry["index_xxh3"])
            fault = next((f.what for f in shard.faults(deep)), None)
        except RunError as e:
            fault = str(e)
        if fault is not None:
            self.remade.append(f"{entry['name']}: {fault.partition('; fix: ')[0]}")
        return fault is None

    def take(self, entry: dict[str, Any], stream: Stream) -> None:
        """Keep a shard that is there; UsageError where the source says something else now."""
        shard = Shard(self.out / entry["name"])
        if not self.source.proven:
            self._compare(shard, entry, stream)
        self.seen.update(shard.sample_ids)
        own = {k: v for k, v in shard.meta.items() if k not in OWN_KEYS}
        self.meta = common_meta(self.meta, own, str(shard.path))
        self.entries.append(entry)
        self.taken += 1

    def _compare(self, shard: Shard, entry: dict[str, Any], stream: Stream) -> None:
        """Read the samples of a shard from the source again, which moves the stream behind them."""
        want = iter(zip(shard.sample_ids, shard.index.digests, strict=True))
        left, seen, here = Result(self.out), set(), self.source.name(entry["begin"])
        same = True
        while same and stream.position < entry["end"]:
            here, item = self.source.name(stream.position), stream.peek()
            if isinstance(item, Bad):
                leave_out(item, here, True, left)
            elif item.sample_id in self.seen or item.sample_id in seen:
                left.repeated += 1
            else:
                seen.add(item.sample_id)
                same = (item.sample_id, self._digest(item)) == next(want, None)
            stream.advance()
        counts = [len(left.missing), len(left.damaged), left.repeated]
        had = [len(entry["missing"]), len(entry["damaged"]), entry["repeated"]]
        if not same or counts != had or next(want, None) is not None:
            raise other_source(self.out, f"{here} is not what {shard.path.name} holds of it")

    def _digest(self, item: Sample) -> str:
        """What a sample's digest is in a shard of this codec; lossless ones are those of raw."""
        codec = "fp8" if self.codec == "fp8" else "raw"
        states, mask = np.ascontiguousarray(item.states), item.loss_mask.view(np.uint8)
        return encode(codec, states, item.token_ids, mask).xxh3

    def shard(self, stream: Stream, on_progress: Callable[[int], None]) -> dict[str, Any]:
        """Make the next shard from where the stream is; -> its entry."""
        begin, name = stream.position, self.next_name
        writer: ShardWriter | None = None
        first: Sample | None = None
        group = -1
        proofs: list[tuple[str, str]] = []
        left = Result(self.out)
        try:
            while (item := stream.peek()) is not None:
                position = stream.position
                if isinstance(item, Bad):
                    leave_out(item, self.source.name(position), self.skip, left)
                elif item.sample_id in self.seen:
                    left.repeated += 1
                else:
                    if first is None:
                        first, group = item, self.source.group(position)
                        self.meta = common_meta(self.meta, item.meta, self.source.name(position))
                        writer = self._writer(name, item)
                    elif self._full(writer, item, first, group != self.source.group(position)):
                        break
                    writer.add(item.sample_id, item.states, item.token_ids, item.loss_mask)
                    self.seen.add(item.sample_id)
                    proofs.append((item.xxh3, item.kind))
                stream.advance()
                on_progress(int(self.source.weights[position]))
            end = stream.position
            if writer is None:  # nothing but samples that are left out, to the end
                return {"begin": begin, "end": end, "samples": 0, "tokens": 0, **_counts(left)}
            paths = writer.close()
        except BaseException:
            if writer is not None:
                writer.abort()
            raise
        self._prove(paths[0], proofs)
        return self._entry(writer, len(proofs), begin, end, left)

    def save(self, *, complete: bool) -> None:
        """Write the manifest: what was made, and what is there beyond it."""
        shards = [e for e in (*self.entries, *self.kept.values()) if e["samples"]]
        folder.write_manifest(self.out, {**self.what, "complete": complete, "shards": shards})

    def result(self) -> Result:
        found = Result(self.out, kept=self.taken, remade=self.remade)
        for entry in self.entries:
            found.shards += bool(entry["samples"])
            found.samples += entry["samples"]
            found.tokens += entry["tokens"]
            found.bytes += entry.get("bytes", 0) + entry.get("index_bytes", 0)
            found.repeated += entry["repeated"]
            found.missing += entry["missing"]
            found.damaged += entry["damaged"]
        return found

    # -- inside ----------------------------------------------------------------------------------

    def _writer(self, name: str, sample: Sample) -> ShardWriter:
        source = self.source
        return ShardWriter(
            self.out,
            name,
            source.layers,
            source.hidden_size,
            sample.meta,
            codec=self.codec,
            queue_bytes=QUEUE_BYTES,
        )

    def _full(self, writer: ShardWriter, item: Sample, first: Sample, other_group: bool) -> bool:
        if item.meta != first.meta:
            return True
        if self.by_group:
            return other_group
        return writer.tokens + len(item.token_ids) > self.limit

    def _prove(self, path: Path, proofs: list[tuple[str, str]]) -> None:
        """Read a shard back; RunError names the sample that is not what its source had."""
        shard = Shard(path)
        if fault := next(shard.faults(), None):
            raise RunError(
                f"read back: {fault.what}", where=f"{path}, sample {fault.sample_id or '-'}"
            )
        rows = zip(shard.sample_ids, shard.index.digests, proofs, strict=True)
        for sample_id, found, (want, kind) in rows:
            if want and kind == kind_of(self.codec) and found != want:
                raise RunError(
                    f"content {found} is not that of the source, {want}",
                    where=f"{path}, sample {sample_id}",
                )

    def _entry(
        self, writer: ShardWriter, samples: int, begin: int, end: int, left: Result
    ) -> dict[str, Any]:
        path, index = writer.path, index_path(writer.path)
        return {
            "name": path.name,
            "bytes": path.stat().st_size,
            "header_xxh3": writer.digests[path][0],
            "index": index.name,
            "index_bytes": index.stat().st_size,
            "index_xxh3": writer.digests[index][0],
            "samples": samples,
            "tokens": writer.tokens,
            "begin": begin,
            "end": end,
            **_counts(left),
        }
