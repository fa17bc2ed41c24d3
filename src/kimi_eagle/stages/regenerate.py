"""regenerate: the target answers every prompt, so that the draft learns the target's own words.

sources -> conversations without their answers -> units (closed batches) -> answers, token ids as
generated. A turn is asked when all earlier ones of the unit are answered, as a server would see it.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from kimi_eagle.data.answers import FORMAT, Answered, write_answers
from kimi_eagle.data.rejects import Reject
from kimi_eagle.data.rows import Conversation, open_turns
from kimi_eagle.errors import RowError
from kimi_eagle.files import digest
from kimi_eagle.ledger import Unit
from kimi_eagle.stages.context import Context, cut

if TYPE_CHECKING:
    from kimi_eagle.capture.engine import GenerationEngine
    from kimi_eagle.worker import Worker


def plan(ctx: Context) -> list[Unit]:
    """Units of conversations, cut by prompt tokens + max_tokens a turn."""
    section = ctx.recipe.regenerate
    if not section.enabled:
        return []
    conversations, sizes, _ = askable(ctx)
    common = {
        "format": FORMAT,
        "verifier": ctx.verifier.id(),
        "template": ctx.template.digest(),
        "engine": ctx.engine_parts("regenerate"),
        "sampling": section.model_dump(include={"max_tokens", "temperature", "top_p"})
        | {"seed": ctx.recipe.seed if section.temperature > 0 else None},
    }
    return [
        Unit(
            name=f"{number:05d}",
            parts={**common, "conversations": digest([c.id for c in conversations[part]])},
            tokens=sum(sizes[part]),
            samples=len(conversations[part]),
            payload=conversations[part],
        )
        for number, part in enumerate(cut(sizes, section.unit_tokens))
    ]


def askable(ctx: Context) -> tuple[list[Conversation], list[int], list[Reject]]:
    """Conversations whose first turn fits the engine, their sizes in tokens, and the others.

    Size: what is asked in all turns, and max_tokens for each.
    """
    max_tokens = ctx.recipe.regenerate.max_tokens
    room = ctx.engine("regenerate").max_model_len - max_tokens
    rows = [r for r in ctx.selection.rows if isinstance(r, Conversation)]
    turns = [open_turns(c) for c in rows]
    first = ctx.template.prompts([(t[0], c.tools) for c, t in zip(rows, turns, strict=True)], room)
    asked = [([m for turn in t for m in turn], c.tools) for c, t in zip(rows, turns, strict=True)]
    whole = ctx.template.prompts(asked)
    kept, sizes, rejects = [], [], []
    for row, said, one, every in zip(rows, turns, first, whole, strict=True):
        fault = next((ids for ids in (one, every) if isinstance(ids, RowError)), None)
        if fault:
            rejects.append(Reject.of(fault, row.where, row.source))
        else:
            kept.append(row)
            sizes.append(len(every) + len(said) * max_tokens)
    return kept, sizes, rejects


def work(ctx: Context, worker: Worker) -> None:
    """Answer the open units."""
    units = plan(ctx)
    worker.ledger.write_plan(units)
    if not worker.ledger.open_units(units):
        return
    from kimi_eagle.capture.engine import GenerationEngine

    with ExitStack() as stack:
        with worker.phase("load"):
            engine = stack.enter_context(
                GenerationEngine(
                    ctx.verifier.path,
                    ctx.engine("regenerate"),
                    seed=ctx.recipe.seed,
                    trust_remote_code=ctx.recipe.verifier.trust_remote_code,
                )
            )
        for attempt in worker.attempts(units):
            with attempt, worker.phase("work"):
                answered = _answer(ctx, engine, attempt.unit, worker)
                path = attempt.path("answers.parquet")
                done = [a for a in answered if a.turns]
                write_answers(path, done)
                reasons = [t["finish_reason"] for a in done for t in a.turns]
                counts = {
                    "samples": len(done),
                    "rejected": len(answered) - len(done),
                    "tokens": sum(len(t["answer_ids"]) for a in done for t in a.turns),
                    "truncated": reasons.count("length"),
                }
                attempt.commit([path], counts=counts)


def _answer(ctx: Context, engine: GenerationEngine, unit: Unit, worker: Worker) -> list[Answered]:
    """Answer a unit's conversations turn by turn; each turn is one closed batch."""
    section, before = ctx.recipe.regenerate, worker.tokens
    answered = [Answered.begin(c) for c in unit.payload]
    most = sum(len(a.asked) for a in answered) * section.max_tokens

    def on_tokens(so_far: int) -> None:
        worker.tokens = start + so_far
        worker.progress(min(1.0, (worker.tokens - before) / most), worker.tokens)

    while batch := _next_turn(ctx, answered):
        start = worker.tokens
        replies = engine.generate(
            [prompt for _, prompt in batch],
            max_tokens=section.max_tokens,
            temperature=section.temperature,
            top_p=section.top_p,
            seeds=[_seed(ctx.recipe.seed, a) for a, _ in batch],
            on_tokens=on_tokens,
        )
        for (one, prompt), reply in zip(batch, replies, strict=True):
            text = ctx.template.answer_text(reply.token_ids)
            one.answer(prompt, reply.token_ids, reply.finish_reason, text)
    return answered


def _next_turn(ctx: Context, answered: list[Answered]) -> list[tuple[Answered, list[int]]]:
    """Who has a turn to answer, with its prompt; one that does not fit the engine is closed."""
    room = ctx.engine("regenerate").max_model_len - ctx.recipe.regenerate.max_tokens
    batch = []
    for one in answered:
        if one.waiting:
            prompt = ctx.template.prompt_ids(one.ask(), one.tools)
            if len(prompt) > room:
                one.closed = True
            else:
                batch.append((one, prompt))
    return batch


def _seed(seed: int, answered: Answered) -> int:
    """A sampling seed for each request that depends on nothing but recipe and conversation."""
    return int(digest([seed, answered.id, len(answered.turns)])[:8], 16)
