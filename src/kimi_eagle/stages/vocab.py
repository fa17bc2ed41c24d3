"""vocab: which tokens of the verifier the draft can name, from the counts of supervised tokens.

A mapping that the recipe brings along (`[vocab] mapping`, or the own one of a draft that training
goes on from) is taken as it is; the counts then only say how much of the run it covers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kimi_eagle import vocab
from kimi_eagle.files import digest
from kimi_eagle.ledger import Unit
from kimi_eagle.stages.context import Context
from kimi_eagle.vocab import VocabMapping

if TYPE_CHECKING:
    import numpy as np

    from kimi_eagle.recipe import Recipe
    from kimi_eagle.worker import Worker

FORMAT = "vocab/1"


def plan(ctx: Context) -> list[Unit]:
    """One unit over all parts of prepare."""
    (prepared,) = ctx.gate("prepare")
    section = ctx.recipe.vocab
    parts = {
        "format": FORMAT,
        "vocab": section.model_dump(mode="json", exclude={"mapping"}),
        "vocab_size": ctx.verifier.vocab_size,
        "tokenizer": ctx.verifier.tokenizer_digest(),
        "samples": digest([p["digest"] for p in prepared.info["parts"]]),
    }
    if (brought := brought_along(ctx.recipe, ctx.verifier.vocab_size)) is not None:
        parts["mapping"] = brought.digest
    return [Unit(name="all", parts=parts, tokens=prepared.counts["loss_tokens"], payload=prepared)]


def work(ctx: Context, worker: Worker) -> None:
    """Count, choose, write."""
    units = plan(ctx)
    worker.ledger.write_plan(units)
    for attempt in worker.attempts(units, max_failures=1):
        with attempt, worker.phase("work"):
            prepared = attempt.unit.payload
            parts = prepared.info["parts"]
            paths = [prepared.kinds[f"{p['name']}.tokens.parquet"] for p in parts]
            counts = vocab.count_tokens(paths, ctx.verifier.vocab_size)
            mapping = _mapping(ctx, counts)
            written = vocab.save(mapping, attempt.path)
            attempt.commit(
                written,
                counts={"loss_tokens": int(counts.sum()), "distinct": int((counts > 0).sum())},
                info={"coverage": mapping.coverage, "digest": mapping.digest},
            )


def brought_along(recipe: Recipe, vocab_size: int) -> VocabMapping | None:
    """The mapping that the recipe names, else that of the draft in `train.from`; None without.

    RunError or UsageError where it cannot be read.
    """
    if folder := recipe.vocab.mapping:
        return vocab.load(Path(folder) / "d2t.npy", Path(folder) / "t2d.npy")
    if start := recipe.train.from_:
        from kimi_eagle.training.draftfiles import DraftFiles

        return DraftFiles(start).mapping(vocab_size)
    return None


def _mapping(ctx: Context, counts: np.ndarray) -> VocabMapping:
    """The run's mapping. counts: of its own tokens, int64 [V]."""
    from kimi_eagle.vocab_import import with_counts

    section, verifier = ctx.recipe.vocab, ctx.verifier
    if (brought := brought_along(ctx.recipe, verifier.vocab_size)) is not None:
        return with_counts(brought, counts)
    forced = set(section.force_tokens)
    if section.force_special:
        forced |= set(vocab.special_ids(verifier))
    return vocab.build_mapping(counts, section.draft_vocab_size, sorted(forced))
