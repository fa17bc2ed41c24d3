"""prepare: conversations become token samples with an exact loss mask, shuffled, cut into parts.

answers of regenerate (or the answers that the sources give, or token rows) -> samples ->
order by hash(seed, sample) -> parts of `unit_tokens`, each of which is one unit of extract.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kimi_eagle.data import samples
from kimi_eagle.data.rejects import RejectLog
from kimi_eagle.data.sources import Conversation, TokenRow
from kimi_eagle.errors import RunError
from kimi_eagle.files import digest
from kimi_eagle.ledger import Unit
from kimi_eagle.stages.context import Context, cut

if TYPE_CHECKING:
    from kimi_eagle.worker import Worker

FORMAT = "tokens/1"


def plan(ctx: Context) -> list[Unit]:
    """One unit: the shuffle needs to see every sample."""
    answers = ctx.gate("regenerate")
    rows = ctx.selection.rows
    regenerated = ctx.recipe.regenerate.enabled
    given = [r.id for r in rows if isinstance(r, TokenRow) or not regenerated]
    parts = {
        "format": FORMAT,
        "tokenizer": ctx.verifier.tokenizer_digest(),
        "template": ctx.template.digest(),
        "prepare": ctx.recipe.prepare.model_dump(mode="json"),
        "seed": ctx.recipe.seed,
        "answers": digest([r.data["files"][0]["xxh3"] for r in answers]),
        "given": digest(given),
    }
    return [Unit(name="all", parts=parts, tokens=len(rows), payload=answers)]


def work(ctx: Context, worker: Worker) -> None:
    """Write the parts and the rejects."""
    units = plan(ctx)
    worker.ledger.write_plan(units)
    for attempt in worker.attempts(units, max_failures=1):
        with attempt, worker.phase("work"):
            rejects = RejectLog(ctx.selection.rejects)
            kept, truncated = _samples(ctx, attempt.unit.payload, rejects)
            rejects.write(ctx.run.rejects)
            rejects.check(ctx.recipe.prepare.max_reject_share, rows=len(ctx.selection.rows))
            if not kept:
                raise RunError(
                    f"no sample is left: {rejects.summary()}, {truncated} truncated answers",
                    where=ctx.run.rejects,
                    fix="raise regenerate.max_tokens or set prepare.keep_truncated_answers",
                )
            kept = _shuffle(kept, ctx.recipe.seed)
            paths, parts = [], []
            slices = cut([len(s.input_ids) for s in kept], ctx.recipe.prepare.unit_tokens)
            for number, part in enumerate(slices):
                path = attempt.path(f"{number:05d}.tokens.parquet")
                samples.write_part(path, kept[part], _metadata(ctx))
                paths.append(path)
                parts.append(_describe(f"{number:05d}", kept[part]))
            counts = {
                "samples": len(kept),
                "tokens": sum(p["tokens"] for p in parts),
                "loss_tokens": sum(p["loss_tokens"] for p in parts),
                "truncated": truncated,
                "rejected_rows": rejects.total,
            }
            sources = dict(sorted(Counter(s.source for s in kept).items()))
            attempt.commit(paths, counts=counts, info={"parts": parts, "by_source": sources})


def _samples(ctx: Context, answers: list, rejects: RejectLog) -> tuple[list[samples.Sample], int]:
    """All samples, and how many answers were left out because they were cut off."""
    section, found, truncated = ctx.recipe.prepare, [], 0
    for record in answers:
        for answered in samples.read_answers(record.path("answers.parquet")):
            made = samples.samples_from_turns(answered)
            keep = [s for s in made if section.keep_truncated_answers or not s.truncated]
            truncated += len(made) - len(keep)
            found += keep
    rows = ctx.selection.rows
    if not ctx.recipe.regenerate.enabled:
        given = [r for r in rows if isinstance(r, Conversation)]
        found += samples.samples_from_given(ctx.template, given, rejects)
    tokens = [r for r in rows if isinstance(r, TokenRow)]
    found += samples.samples_from_tokens(tokens, ctx.verifier.vocab_size, rejects)
    fitted = samples.fit(found, section.max_length, section.long_samples, rejects)
    return list({s.sample_id: s for s in fitted}.values()), truncated


def _shuffle(found: list[samples.Sample], seed: int) -> list[samples.Sample]:
    """Order by a hash of seed and content: the same whatever order the sources came in."""
    return sorted(found, key=lambda s: digest([seed, s.sample_id]))


def _metadata(ctx: Context) -> dict[str, str]:
    return {"tokenizer": ctx.verifier.tokenizer_digest(), "template": ctx.template.digest()}


def _describe(name: str, part: list[samples.Sample]) -> dict:
    return {
        "name": name,
        "samples": len(part),
        "tokens": sum(len(s.input_ids) for s in part),
        "loss_tokens": int(sum(s.loss_mask.sum() for s in part)),
        "digest": digest([s.sample_id for s in part]),
    }
