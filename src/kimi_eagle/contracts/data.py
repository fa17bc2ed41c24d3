"""Samples as prepare wrote them: ids, loss masks and lengths that training can count on.

prepare checks each sample as it makes it; these look at what lies on disk when the next stage
opens, so that parts of another make, or of another program, are found before a GPU reads them.
Parquet's own statistics answer for all samples, the masks are read of the first part alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import NotConcerned, Note, Problem, rule
from kimi_eagle.data.inputs import OPENED, look_at
from kimi_eagle.errors import UsageError
from kimi_eagle.recipe import Recipe

READ = 2048
"""Samples of the first part whose ids and masks are read."""
READERS = ("extract", "vocab", "train")
AGAIN = (
    "kimi-eagle verify RUN --deep marks parts that were changed since, kimi-eagle retry RUN opens "
    "them again; where it marks none, remove RUN/prepare/records; then run again"
)
"""prepare made the samples as they are, or they were changed since: retry knows marked ones."""


@rule(
    "data-sources",
    what="Each source and the file of held-out prompts is there, can be read and holds something; "
    "each draft that the benchmark compares with is one for this verifier.",
    why="Sources are read when the first stage plans its work and the held-out prompts with them: "
    "in a job that has waited for its GPUs, for a path that was mistyped at the desk.",
    how="Paths, kinds of files and sizes, folders as they will be read; of each Parquet file the "
    f"first and last bytes and of the first one the columns; at most {OPENED} files of a source "
    "are opened, and no row is read: what is wrong with rows, stages say. Of drafts config.json "
    "and the names of weight files (bench/draftdir.py).",
    fix="correct the path in [[sources]] or [benchmark], or put the file there",
    stages=("regenerate", "prepare", "benchmark"),
)
def sources(facts: Facts) -> Iterator[Problem | Note]:
    recipe, faults = facts.recipe, {}
    prompts = recipe.benchmark.prompts and "benchmark.prompts"
    # One file in two places is one fault.
    read = {
        w.path: (prompts or f"benchmark source {w.name}", "any") for w in recipe.benchmark.workloads
    }
    read |= {s.path: (f"source {s.name}", s.format) for s in recipe.sources[::-1]}
    for path, (who, format) in reversed(read.items()):
        try:
            files = look_at(Path(path), format)
        except UsageError as e:
            faults.setdefault(e.what, []).append((who, e))
            continue
        if format == "tokens" and files[0].suffix not in (".parquet", ".arrow"):
            yield Note(f"{who}: pre-tokenised rows in {files[0].suffix}, meant is Parquet")
    for what, ((who, e), *more) in faults.items():
        others = f" (and of {', '.join(name for name, _ in more)})" if more else ""
        yield Problem(f"{who}: {what}{others}", e.where, e.expected, e.fix)
    yield from _other_drafts(recipe)


def _other_drafts(recipe: Recipe) -> Iterator[Problem]:
    from kimi_eagle.bench.draftdir import open_draft

    verifier = Path(recipe.verifier.path)  # what is wrong with it other rules say
    for other in recipe.benchmark.against:
        try:
            open_draft(other.path, verifier if (verifier / "config.json").is_file() else None)
        except UsageError as e:
            yield Problem(f"benchmark.against {other.name}: {e.what}", e.where, e.expected, e.fix)


@rule(
    "data-format",
    what="Every part of the samples is a tokens part of this program's format.",
    why="A part of another schema is taken apart wrongly or refused by the stage that reads it, "
    "which for extract is after the load of the verifier.",
    how="Metadata and column types of each part (data/samples.py, tokens/1).",
    fix=AGAIN,
    needs=("samples",),
    stages=READERS,
)
def samples_format(facts: Facts) -> Iterator[Problem]:
    facts.parts  # noqa: B018  it raises
    yield from ()


@rule(
    "data-token-ids",
    what="Token ids of all samples lie in the verifier's vocabulary.",
    why="Pre-tokenised sources of another tokenizer load like any other. An id past the last row "
    "of the embedding is a device-side assert in vLLM 0.31.0; one below it is another word.",
    how="Least and greatest id of each part by Parquet's statistics.",
    fix="take pre-tokenised sources that this verifier's tokenizer made, or give text",
    needs=("samples",),
    stages=READERS,
    after=("data-format", "verifier-config"),
)
def token_ids(facts: Facts) -> Iterator[Problem]:
    size = facts.verifier.vocab_size
    for part in facts.parts:
        if part.ids and not 0 <= part.ids[0] <= part.ids[1] < size:
            bad = part.ids[0] if part.ids[0] < 0 else part.ids[1]
            expected = f"ids from 0 to {size - 1}"
            yield Problem(f"token id {bad} in the samples", str(part.path), expected)
            return


@rule(
    "data-loss",
    what="Every sample has a token that carries loss.",
    why="A sample without one costs a pass of the verifier and teaches nothing: speculators 0.9.0 "
    "divides by the count plus a small number (losses/utils.py, loss_function), so that a step of "
    "such samples logs a loss of 0 and looks like a good one.",
    how="Least n_loss of each part; of the first part n_loss against the masks themselves.",
    fix=AGAIN,
    needs=("samples",),
    stages=READERS,
    after=("data-format",),
)
def loss(facts: Facts) -> Iterator[Problem]:
    for part in facts.parts:
        if part.least_loss is not None and part.least_loss < 1:
            yield Problem("a sample without loss token", str(part.path), "n_loss of at least 1")
            return
    for part in facts.parts[:1]:
        table = _head(part.path, ["n_loss", "loss_mask"])
        counted = [sum(mask) for mask in table.column("loss_mask").to_pylist()]
        if counted != table.column("n_loss").to_pylist():
            yield Problem("n_loss is not the number of tokens in the loss mask", str(part.path))


def _head(part: Path, columns: list[str]) -> Any:
    """The first READ samples of a part."""
    import pyarrow.parquet as pq

    return pq.read_table(part, columns=columns, partitioning=None).slice(0, READ)


@rule(
    "data-mask",
    what="The loss mask lies on the answers: it begins after the prompt, ends with the turn's end.",
    why="A mask one token off trains nothing wrong enough to fail: either the pair of the last "
    "prompt state and the first answer token is left out, the pair that decides how a draft "
    "begins, or the end of turn is, and drafts run on. Seen with masks made of text offsets and "
    "with libraries that shift once more.",
    how="Of the first 2,048 samples: the first token carries no loss (no state comes before it), "
    "and the end-of-turn token is the last of its run of loss tokens, not the one after or before. "
    "Runs without such a token (answers cut at max_tokens) are passed over; more than half of the "
    "others must be off before it is called a fault.",
    fix=f"correct loss_mask in the pre-tokenised source, else {AGAIN}",
    needs=("samples",),
    stages=READERS,
    after=("data-loss", "data-token-ids", "tokenizer-eos"),
)
def mask(facts: Facts) -> Iterator[Problem]:
    ends = set(facts.verifier.eos_ids)
    runs, early, late = 0, 0, 0
    for part in facts.parts[:1]:
        table = _head(part.path, ["input_ids", "loss_mask"])
        pairs = zip(table.column("input_ids"), table.column("loss_mask"), strict=True)
        for row, (ids, on) in enumerate(pairs):
            ids, on = ids.values.to_numpy(), on.values.to_numpy(zero_copy_only=False)
            if on[0]:
                yield Problem(
                    f"sample {row + 1} carries loss at its first token",
                    where=str(part.path),
                    expected="a prompt before every answer: no state comes before the first token",
                )
                return
            for start, end in _runs(on):
                if ids[end - 1] in ends:
                    runs += 1
                elif end < len(ids) and ids[end] in ends:
                    runs, early = runs + 1, early + 1
                elif end - start > 1 and ids[end - 2] in ends:
                    runs, late = runs + 1, late + 1
    for count, words in ((early, "before"), (late, "after")):
        if count > runs / 2:
            yield Problem(
                f"{count} of {runs} runs of loss tokens stop one token {words} the end of turn",
                where=str(facts.parts[0].path),
                expected="the end-of-turn token as the last that carries loss",
            )


def _runs(on: np.ndarray) -> Iterator[tuple[int, int]]:
    """(start, end) of each unbroken run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], on.astype(np.int8), [0]])))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


@rule(
    "data-lengths",
    what="Every sample fits into the engine and into a training step.",
    why="vLLM 0.31.0 refuses a prompt of max_model_len tokens or more: the sample ends in the "
    "rejects. One longer than [train] seq_len is cut by speculators 0.9.0's packing "
    "(train/data.py): its last answers were paid for and are never trained on.",
    how="Greatest n_tokens of the parts against max_model_len of [extract.engine]; above seq_len "
    "it is told.",
    fix="raise max_model_len, or lower [prepare] max_length and let prepare run again",
    needs=("samples",),
    stages=("extract",),
    after=("data-format",),
)
def lengths(facts: Facts) -> Iterator[Problem | Note]:
    limit = facts.recipe.engine_for("extract").max_model_len
    longest = max((part.longest for part in facts.parts), default=0)
    if longest >= limit:
        yield Problem(
            f"a sample has {longest:,} tokens",
            where=str(facts.parts[0].path.parent),
            expected=f"fewer than max_model_len {limit:,}",
        )
    elif longest > facts.recipe.train.seq_len:
        yield Note(f"the longest sample has {longest:,} tokens, [train] seq_len takes fewer")


@rule(
    "data-truncated",
    what="Answers that ended at max_tokens are left out, unless the recipe keeps them.",
    why="A truncated answer teaches the draft that text may stop anywhere; kept by chance they are "
    "found by no figure but the acceptance at the end of answers.",
    how="finish_reason of the samples against [prepare] keep_truncated_answers; how many prepare "
    "counted is told.",
    fix=f"set [prepare] keep_truncated_answers = true, else {AGAIN}",
    needs=("samples",),
    stages=READERS,
    after=("data-format",),
)
def truncated(facts: Facts) -> Iterator[Problem | Note]:
    kept = sum(part.truncated for part in facts.parts)
    total = sum(part.samples for part in facts.parts)
    if kept and not facts.recipe.prepare.keep_truncated_answers:
        yield Problem(
            f"{kept:,} of {total:,} samples end in a truncated answer",
            where=str(facts.parts[0].path.parent),
            expected="none, for keep_truncated_answers is false",
        )
    counted = sum(r.counts.get("truncated", 0) for r in facts.records("prepare"))
    if counted:
        yield Note(f"{counted:,} answers ended at max_tokens beside {total:,} samples")


@rule(
    "data-shift",
    what="Training pairs the state before a token with that token and its place in the mask.",
    why="speculators 0.9.0 (models/eagle3/data.py, shift_batch) drops the first id and mask and "
    "the last state. A version that shifts the mask once more, or not at all, leaves the first "
    "answer token out or trains on the last prompt token; the loss looks the same.",
    how="The installed shift_batch on a sample of six tokens whose states say where they are from.",
    fix="use the pinned speculators",
    needs=("torch", "speculators"),
    stages=("train",),
)
def shift(facts: Facts) -> Iterator[Problem]:
    import torch

    shift_batch = facts.look_up("speculators.models.eagle3.data:shift_batch")
    if shift_batch is None:
        raise NotConcerned("this speculators has no shift_batch")
    places = torch.arange(6)
    states = places[:, None].float()
    batch = {
        "input_ids": 10 + places,
        "hidden_states": states,
        "verifier_last_hidden_states": states,
        "loss_mask": (places >= 3).long(),
        "lengths": torch.tensor([6]),
        "position_ids": places,
    }
    made = shift_batch(batch)
    on = made["loss_mask"].bool()
    found = {
        "ids": made["input_ids"][on].tolist(),
        "states": made["hidden_states"][on].flatten().int().tolist(),
        "targets": made["verifier_last_hidden_states"][on].flatten().int().tolist(),
    }
    expected = {"ids": [13, 14, 15], "states": [2, 3, 4], "targets": [3, 4, 5]}
    if found != expected:
        yield Problem(
            f"an answer in places 3 to 5 is trained as {found}",
            where="speculators.models.eagle3.data.shift_batch",
            expected=str(expected),
        )
