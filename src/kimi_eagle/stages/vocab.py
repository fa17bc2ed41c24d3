"""vocab: which tokens of the verifier the draft can name, from the counts of supervised tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kimi_eagle import vocab
from kimi_eagle.files import digest
from kimi_eagle.ledger import Unit
from kimi_eagle.stages.context import Context

if TYPE_CHECKING:
    from kimi_eagle.worker import Worker

FORMAT = "vocab/1"


def plan(ctx: Context) -> list[Unit]:
    """One unit over all parts of prepare."""
    (prepared,) = ctx.gate("prepare")
    section = ctx.recipe.vocab
    parts = {
        "format": FORMAT,
        "vocab": section.model_dump(mode="json"),
        "vocab_size": ctx.verifier.vocab_size,
        "tokenizer": ctx.verifier.tokenizer_digest(),
        "samples": digest([p["digest"] for p in prepared.info["parts"]]),
    }
    return [Unit(name="all", parts=parts, tokens=prepared.counts["loss_tokens"], payload=prepared)]


def work(ctx: Context, worker: Worker) -> None:
    """Count, choose, write."""
    units = plan(ctx)
    worker.ledger.write_plan(units)
    for attempt in worker.attempts(units, max_failures=1):
        with attempt, worker.phase("work"):
            prepared, section = attempt.unit.payload, ctx.recipe.vocab
            parts = prepared.info["parts"]
            paths = [prepared.kinds[f"{p['name']}.tokens.parquet"] for p in parts]
            counts = vocab.count_tokens(paths, ctx.verifier.vocab_size)
            forced = set(section.force_tokens)
            if section.force_special:
                forced |= set(vocab.special_ids(ctx.verifier))
            mapping = vocab.build_mapping(counts, section.draft_vocab_size, sorted(forced))
            written = vocab.save(mapping, attempt.path)
            attempt.commit(
                written,
                counts={"loss_tokens": int(counts.sum()), "distinct": int((counts > 0).sum())},
                info={"coverage": mapping.coverage, "digest": mapping.digest},
            )
