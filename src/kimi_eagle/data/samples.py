"""Token samples: ids with a loss mask, made of generated or given answers, and the tokens parts.

Writes and reads Parquet parts (zstd) with `SCHEMA`; one part is one unit of extract. The metadata
of each part says the format, the tokenizer's and the template's digest. A sample is known by its
content hash, never by its place: shuffles and libraries that reorder rows cannot mix samples up.

Of generated answers the ids are kept as generated, never re-tokenised text. Where a turn's prompt
does not extend the previous prompt and answer exactly (the template drops earlier thinking, or the
answer's text tokenises differently) the conversation becomes one sample a turn: what the target
really saw, at the price of the shared beginning being computed once a turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kimi_eagle.data.rows import sample_id
from kimi_eagle.errors import RowError, RunError

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "tokens/1"
TRUNCATED = "length"
"""finish_reason of an answer that ended at max_tokens (vLLM's word)."""


@dataclass(frozen=True, eq=False)
class Sample:
    """input_ids int32 [T]; loss_mask bool [T], true where the token belongs to an answer."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    source: str = ""
    finish_reason: str = "given"

    @property
    def sample_id(self) -> str:
        return sample_id(self.input_ids, self.loss_mask)

    @property
    def n_loss(self) -> int:
        return int(self.loss_mask.sum())


def make_sample(
    input_ids: Sequence[int], loss_mask: Sequence[bool], source: str = "", reason: str = "given"
) -> Sample:
    """A sample of any two sequences of equal length."""
    return Sample(np.asarray(input_ids, np.int32), np.asarray(loss_mask, bool), source, reason)


def samples_from_turns(
    turns: Sequence[Mapping[str, Any]], keep_truncated: bool = False, source: str = ""
) -> list[Sample]:
    """Samples of one generated conversation; an empty list when no answer is left.

    turns: prompt_ids, answer_ids, finish_reason of each turn, in order. The answers alone carry
    loss. A truncated answer (finish_reason "length") carries none unless `keep_truncated`, and a
    sample ends with its last answer that carries loss; `count_truncated` counts them.
    """
    turns = [(list(t["prompt_ids"]), list(t["answer_ids"]), str(t["finish_reason"])) for t in turns]
    extends = all(
        after[0][: len(before[0]) + len(before[1])] == before[0] + before[1]
        for before, after in zip(turns, turns[1:], strict=False)
    )
    groups = [turns] if extends else [[turn] for turn in turns]
    samples = [_sample(group, keep_truncated, source) for group in groups if group]
    return [s for s in samples if s is not None]


def _sample(
    turns: list[tuple[list[int], list[int], str]], keep_truncated: bool, source: str
) -> Sample | None:
    used = [t for t in turns if t[1] and (keep_truncated or t[2] != TRUNCATED)]
    if not used:
        return None
    prompt, answer, reason = used[-1]
    mask = np.zeros(len(prompt) + len(answer), bool)
    for before, tokens, _ in used:
        mask[len(before) : len(before) + len(tokens)] = True
    if any(t[2] == TRUNCATED for t in used):
        reason = TRUNCATED
    return make_sample(prompt + answer, mask, source, reason)


def count_truncated(turns: Iterable[Mapping[str, Any]]) -> int:
    """Answers that ended at max_tokens instead of with their end-of-turn token."""
    return sum(t["finish_reason"] == TRUNCATED for t in turns)


def fit(sample: Sample, max_length: int, long_samples: str = "truncate") -> Sample:
    """The sample within max_length tokens, as `[prepare] long_samples` says.

    truncate keeps the first max_length tokens. RowError `too-long`: reject is asked for, or no loss
    token would be left; `no-loss`: there was none to begin with.
    """
    if not sample.loss_mask.any():
        raise RowError("no-loss", "no answer token")
    length = len(sample.input_ids)
    if length <= max_length:
        return sample
    if long_samples == "reject":
        raise RowError("too-long", f"{length} tokens; expected at most {max_length}")
    mask = sample.loss_mask[:max_length]
    if not mask.any():
        raise RowError("too-long", f"the prompt fills all {max_length} of {length} tokens")
    return replace(sample, input_ids=sample.input_ids[:max_length], loss_mask=mask)


def schema(meta: Mapping[str, str] | None = None) -> pa.Schema:
    """Columns of every tokens part; `meta` becomes the key-value metadata."""
    import pyarrow as pa

    return pa.schema(
        [
            ("sample_id", pa.string()),
            ("input_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.bool_())),
            ("n_tokens", pa.int32()),
            ("n_loss", pa.int32()),
            ("source", pa.string()),
            ("finish_reason", pa.string()),
        ],
        metadata=dict(meta) if meta is not None else None,
    )


def write_part(path: Path, samples: Sequence[Sample], meta: Mapping[str, str]) -> None:
    """Write one tokens part atomically.

    meta: at least `tokenizer` and `template` digests; `kimi_eagle.format` is added. ValueError for
    a sample without loss token: nothing could be learnt from it and readers count on it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from kimi_eagle.files import write_atomic

    if any(s.n_loss == 0 for s in samples):
        raise ValueError("a sample without loss token in a tokens part")
    lengths = np.array([len(s.input_ids) for s in samples], np.int32)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    ids = np.concatenate([s.input_ids for s in samples] or [np.zeros(0, np.int32)])
    mask = np.concatenate([s.loss_mask for s in samples] or [np.zeros(0, bool)])
    table = pa.Table.from_arrays(
        [
            pa.array([s.sample_id for s in samples], pa.string()),
            pa.ListArray.from_arrays(offsets, pa.array(ids, pa.int32())),
            pa.ListArray.from_arrays(offsets, pa.array(mask, pa.bool_())),
            pa.array(lengths),
            pa.array([s.n_loss for s in samples], pa.int32()),
            pa.array([s.source for s in samples], pa.string()),
            pa.array([s.finish_reason for s in samples], pa.string()),
        ],
        schema=schema({"kimi_eagle.format": FORMAT, **meta}),
    )
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd")
    write_atomic(path, buffer.getvalue().to_pybytes())


def read_part(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Read a tokens part (or some of its columns); RunError when it is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=columns, partitioning=None)
    except (OSError, pa.ArrowInvalid) as e:
        reason = str(e).splitlines()[0]
        raise RunError(f"tokens part cannot be read: {reason}", where=path) from None
    metadata = table.schema.metadata or {}
    if metadata.get(b"kimi_eagle.format") != FORMAT.encode():
        raise RunError("not a tokens part", where=path, expected=f"format {FORMAT}")
    expected = [f for f in schema() if columns is None or f.name in columns]
    found = {f.name: f.type for f in table.schema}
    wrong = [f.name for f in expected if found.get(f.name) != f.type]
    if wrong:
        raise RunError(f"column {wrong[0]} is missing or of another type", where=path)
    return table


def read_samples(path: Path) -> list[Sample]:
    """The samples of a tokens part, in its order."""
    table = read_part(path)
    found = []
    for batch in table.to_batches():
        ids, mask = batch.column("input_ids"), batch.column("loss_mask")
        ends = ids.offsets.to_numpy() - ids.offsets[0].as_py()
        flat_ids = ids.flatten().to_numpy()
        flat_mask = mask.flatten().to_numpy(zero_copy_only=False)
        sources, reasons = (batch.column(c).to_pylist() for c in ("source", "finish_reason"))
        found += [
            Sample(flat_ids[start:end], flat_mask[start:end], source, reason)
            for start, end, source, reason in zip(ends, ends[1:], sources, reasons, strict=False)
        ]
    return found
