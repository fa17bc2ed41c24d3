"""The index of a shard: one row a sample, and what proves header and samples.

Plain Parquet without compression, dictionary or statistics: it is small beside its shard, and
opening 10,000 of them is what the start of a training waits for (0.07 ms each against 0.2 ms
compressed). The key-value metadata repeats what the shard's own header says, so that a set of
shards opens from its indexes alone.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle.errors import RunError
from kimi_eagle.shards.layout import digest64

INDEX_FORMAT = "shard-index/2"
PREFIX = "kimi_eagle."
SELF = "index_xxh3"
AGAIN = (
    "convert it again, or take its copy; where it is a run's, run extract again (kimi-eagle retry "
    "RUN opens the unit)"
)

COLUMNS = {"sample_id": "string", "start": "int64", "n_tokens": "int32", "xxh3": "string"}
LOSSLESS_COLUMNS = {"offset": "int64", "n_bytes": "int64", "stored_xxh3": "string"}


@dataclass(frozen=True)
class Index:
    """One shard's index."""

    path: Path | str
    table: Any
    """pyarrow.Table, a row a sample in file order."""
    meta: Mapping[str, str]
    """Key-value metadata without its prefix: format, codec, layers, hidden_size, tokens,
    bytes, header_xxh3, error."""
    digest: str
    """xxh3-128 of the index file, 32 hex digits: what a record holds."""
    known: bool
    """Its bytes were asked for by their digest: its own need not be looked at."""

    @cached_property
    def columns(self) -> dict[str, Any]:
        """Numbers as numpy arrays, texts as arrow arrays; RunError where they contradict."""
        found = _plain({c: self.table.column(c).combine_chunks() for c in _types(self.codec)})
        _judge(self.path, found, self.meta, known=self.known)
        return found

    @cached_property
    def sample_ids(self) -> list[str]:
        return self.columns["sample_id"].to_pylist()

    @cached_property
    def digests(self) -> list[str]:
        return self.columns["xxh3"].to_pylist()

    @cached_property
    def stored_digests(self) -> list[str]:
        return self.columns["stored_xxh3"].to_pylist()

    @property
    def starts(self) -> np.ndarray:
        """int64 [n]: first token of each sample."""
        return self.columns["start"]

    @property
    def lengths(self) -> np.ndarray:
        """int32 [n]: tokens of each sample."""
        return self.columns["n_tokens"]

    @property
    def codec(self) -> str:
        return self.meta["codec"]

    @cached_property
    def layers(self) -> tuple[int, ...]:
        return tuple(json.loads(self.meta["layers"]))

    @cached_property
    def hidden_size(self) -> int:
        return int(self.meta["hidden_size"])

    @cached_property
    def tokens(self) -> int:
        return int(self.meta["tokens"])

    @cached_property
    def bytes(self) -> int:
        """Size of the safetensors file."""
        return int(self.meta["bytes"])


def write(rows: Mapping[str, Sequence[Any]], meta: Mapping[str, str]) -> bytes:
    """The index file. rows: a list a column, those of COLUMNS (and of LOSSLESS_COLUMNS)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = {k: pa.array(rows[k], pa.type_for_alias(t)) for k, t in _types(meta["codec"]).items()}
    meta = {"format": INDEX_FORMAT, **meta}
    meta[SELF] = _self_digest(_plain(arrays), meta)
    table = pa.table(arrays)
    out = io.BytesIO()
    with pq.ParquetWriter(
        out,
        table.schema,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({PREFIX + k: meta[k] for k in sorted(meta)})
    return out.getvalue()


def read(path: Path | str, digest: str | None = None) -> Index:
    """RunError where the index is missing, damaged, of another format, or not that of `digest`."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import xxhash

    try:
        with open(path, "rb", buffering=0) as f:
            data = f.read()
    except OSError as e:
        raise RunError(f"the shard's index cannot be read: {e.strerror}", where=path) from e
    found = xxhash.xxh3_128_hexdigest(data)
    if digest not in (None, found):
        raise _damaged(path, "it is not the one that was recorded")
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        meta = meta_of(file.metadata.metadata)
        if meta.get("format") != INDEX_FORMAT:
            raise RunError(
                f"format {meta.get('format')!r}", where=path, expected=INDEX_FORMAT, fix=AGAIN
            )
        table = file.read(use_threads=False)
        types = {f.name: str(f.type) for f in table.schema}
        if types != _types(meta["codec"]):
            raise ValueError(f"columns {types}, codec {meta['codec']}")
    # A flipped bit may come out as any of these; memory is asked for by sizes in the file.
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError, OverflowError) as e:
        raise _damaged(path, f"{type(e).__name__}: {e}") from e
    index = Index(path, table, meta, found, known=digest is not None)
    if not index.known:
        _ = index.columns
    return index


def meta_of(found: Mapping[bytes, bytes] | None) -> dict[str, str]:
    """Our own pairs of a Parquet file's key-value metadata, without their prefix."""
    texts = {k.decode(): v.decode() for k, v in (found or {}).items()}
    return {k.removeprefix(PREFIX): v for k, v in texts.items() if k.startswith(PREFIX)}


def _types(codec: str) -> dict[str, str]:
    """Columns of an index and their types; KeyError for a codec that is none."""
    return {**COLUMNS, **{"raw": {}, "fp8": {}, "lossless": LOSSLESS_COLUMNS}[codec]}


def _plain(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers as numpy arrays, texts as they are."""
    return {
        name: a if str(a.type) == "string" else a.to_numpy(zero_copy_only=False)
        for name, a in arrays.items()
    }


def _self_digest(columns: Mapping[str, Any], meta: Mapping[str, str]) -> str:
    """Over all that the index says: its own metadata, then the columns in order of names."""
    parts: list[Any] = [json.dumps({k: v for k, v in meta.items() if k != SELF}, sort_keys=True)]
    for name in sorted(columns):
        column = columns[name]
        if isinstance(column, np.ndarray):
            parts.append(column)
        else:
            # Arrow's own buffers: int32 ends of the texts, then the texts end to end.
            _, ends, texts = column.buffers()
            ends = np.frombuffer(ends, np.int32, len(column) + 1) if ends else np.zeros(1, np.int32)
            parts += [ends, memoryview(texts)[: int(ends[-1])] if texts else b""]
    return digest64(p.encode() if isinstance(p, str) else p for p in parts)


def _judge(
    path: Path | str, columns: Mapping[str, Any], meta: Mapping[str, str], known: bool
) -> None:
    """known: the file's own bytes are proven already."""
    if not known and _self_digest(columns, meta) != meta.get(SELF):
        raise _damaged(path, "it does not say what was written")
    ends = np.cumsum(columns["n_tokens"], dtype=np.int64)
    if (columns["start"] != ends - columns["n_tokens"]).any():
        raise _damaged(path, "samples do not lie end to end")


def _damaged(path: Path | str, what: str) -> RunError:
    return RunError(f"the shard's index is damaged: {what}", where=path, fix=AGAIN)
