"""prepare: conversations become token samples with an exact loss mask, shuffled, cut into parts.

answers of regenerate (or the answers that the sources give, or token rows) -> samples ->
order by hash(seed, sample) -> parts of `unit_tokens`, each of which is one unit of extract.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from kimi_eagle import files
from kimi_eagle.data import samples
from kimi_eagle.data.answers import read_answers
from kimi_eagle.data.rejects import Reject, RejectLog
from kimi_eagle.data.rows import Conversation, TokenRow
from kimi_eagle.data.samples import Sample
from kimi_eagle.errors import RowError, RunError
from kimi_eagle.files import digest
from kimi_eagle.ledger import Unit
from kimi_eagle.stages import regenerate
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
        "rejects": digest([asdict(r) for r in ctx.selection.rejects]),
    }
    return [Unit(name="all", parts=parts, tokens=len(rows), payload=answers)]


def work(ctx: Context, worker: Worker) -> None:
    """Write the parts and the rejects."""
    units, section = plan(ctx), ctx.recipe.prepare
    worker.ledger.write_plan(units)
    for attempt in worker.attempts(units, max_failures=1):
        with attempt, worker.phase("work"):
            rejects = RejectLog(section.max_reject_share)
            rejects.count_rows(sum(c["read"] for c in ctx.selection.counts_by_source.values()))
            rejects.extend(ctx.selection.rejects)
            found, truncated = _samples(ctx, attempt.unit.payload, rejects)
            kept = _shuffle(_fitted(ctx, found, rejects), ctx.recipe.seed)
            rejects.write(attempt.path("rejects.jsonl"))
            rejects.write(ctx.run.rejects)
            rejects.check()
            if not kept:
                raise RunError(
                    f"no sample is left: {truncated} truncated answers, rejects {rejects.by_rule}",
                    where=ctx.run.rejects,
                    fix="raise regenerate.max_tokens or set prepare.keep_truncated_answers",
                )
            paths, parts = [attempt.path("rejects.jsonl")], []
            slices = cut([len(s.input_ids) for s in kept], section.unit_tokens)
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
                "rejected_rows": len(rejects.rejects),
            }
            info = {
                "parts": parts,
                "by_source": dict(sorted(Counter(s.source for s in kept).items())),
                "rejects": rejects.by_rule,
            }
            attempt.commit(paths, counts=counts, info=info)


def publish(ctx: Context) -> None:
    """Make RUN/rejects.jsonl that of the current record."""
    (record,) = ctx.gate("prepare")
    found = record.path("rejects.jsonl").read_bytes()
    if not ctx.run.rejects.is_file() or ctx.run.rejects.read_bytes() != found:
        files.write_atomic(ctx.run.rejects, found)


def _samples(ctx: Context, answers: list, rejects: RejectLog) -> tuple[list[Sample], int]:
    """All samples, and how many answers were cut off at max_tokens."""
    keep, found, truncated = ctx.recipe.prepare.keep_truncated_answers, [], 0
    for record in answers:
        for row in read_answers(record.path("answers.parquet")):
            found += samples.samples_from_turns(row["turns"], keep, row["source"])
            truncated += samples.count_truncated(row["turns"])
    rows = ctx.selection.rows
    if ctx.recipe.regenerate.enabled:
        rejects.extend(regenerate.askable(ctx)[2])
    else:
        given = [r for r in rows if isinstance(r, Conversation)]
        masked = ctx.template.conversations([(c.messages, c.tools) for c in given])
        for row, made in zip(given, masked, strict=True):
            if isinstance(made, RowError):
                rejects.add(Reject.of(made, row.where, row.source))
            else:
                found += [samples.make_sample(ids, mask, row.source) for ids, mask in made]
    tokens = [r for r in rows if isinstance(r, TokenRow)]
    found += [Sample(t.input_ids, t.loss_mask, t.source, t.finish_reason) for t in tokens]
    return found, truncated


def _fitted(ctx: Context, found: list[Sample], rejects: RejectLog) -> list[Sample]:
    """Samples within max_length, each content once."""
    section, kept = ctx.recipe.prepare, {}
    for sample in found:
        try:
            fitted = samples.fit(sample, section.max_length, section.long_samples)
            kept[fitted.sample_id] = fitted
        except RowError as e:
            rejects.add(Reject.of(e, ("", 0), sample.source))
    return list(kept.values())


def _shuffle(found: list[Sample], seed: int) -> list[Sample]:
    """Order by a hash of seed and content: the same whatever order the sources came in."""
    return sorted(found, key=lambda s: digest([seed, s.sample_id]))


def _metadata(ctx: Context) -> dict[str, str]:
    return {"tokenizer": ctx.verifier.tokenizer_digest(), "template": ctx.template.digest()}


def _describe(name: str, part: list[Sample]) -> dict:
    return {
        "name": name,
        "samples": len(part),
        "tokens": sum(len(s.input_ids) for s in part),
        "loss_tokens": int(sum(s.loss_mask.sum() for s in part)),
        "digest": digest([s.sample_id for s in part]),
    }
