"""regenerate: the target answers every prompt, so that the draft learns the target's own words.

sources -> conversations without their answers -> units (closed batches) -> answers, token ids as
generated. A turn is asked when all earlier ones of the unit are answered, as a server would see it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kimi_eagle.data import samples
from kimi_eagle.data.sources import Conversation, open_turns
from kimi_eagle.files import digest
from kimi_eagle.ledger import Unit
from kimi_eagle.stages.context import Context, cut

if TYPE_CHECKING:
    from kimi_eagle.capture.engine import GenerationEngine
    from kimi_eagle.worker import Worker

FORMAT = "answers/1"


def plan(ctx: Context) -> list[Unit]:
    """Units of conversations, cut by prompt tokens + max_tokens a turn."""
    section = ctx.recipe.regenerate
    if not section.enabled:
        return []
    conversations = [r for r in ctx.selection.rows if isinstance(r, Conversation)]
    sizes = [_size(ctx, c) for c in conversations]
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
            payload=conversations[part],
        )
        for number, part in enumerate(cut(sizes, section.unit_tokens))
    ]


def _size(ctx: Context, conversation: Conversation) -> int:
    """Tokens that the conversation may come to: its prompts and max_tokens for each turn."""
    turns = open_turns(conversation)
    prompt = ctx.template.prompt_ids(turns[-1], conversation.tools)
    return len(prompt) + len(turns) * ctx.recipe.regenerate.max_tokens


def work(ctx: Context, worker: Worker) -> None:
    """Answer the open units."""
    units = plan(ctx)
    worker.ledger.write_plan(units)
    if not worker.ledger.open_units(units):
        return
    from kimi_eagle.capture.engine import GenerationEngine

    with worker.phase("load"):
        engine = GenerationEngine(
            ctx.verifier.path,
            ctx.engine("regenerate"),
            seed=ctx.recipe.seed,
            trust_remote_code=ctx.recipe.verifier.trust_remote_code,
        ).__enter__()
    try:
        for attempt in worker.attempts(units):
            with attempt, worker.phase("work"):
                answers, counts = _answer(ctx, engine, attempt.unit.payload, worker)
                path = attempt.path("answers.parquet")
                samples.write_answers(path, answers)
                attempt.commit([path], counts=counts)
    finally:
        engine.__exit__(None, None, None)


def _answer(
    ctx: Context, engine: GenerationEngine, unit: list[Conversation], worker: Worker
) -> tuple[list[samples.Answered], dict[str, int]]:
    """Answer all turns of a unit's conversations, turn by turn, each turn one closed batch."""
    section, limit = ctx.recipe.regenerate, ctx.engine("regenerate").max_model_len
    answered = [samples.Answered.begin(c) for c in unit]
    turns = [open_turns(c) for c in unit]
    total = sum(len(t) for t in turns) * section.max_tokens
    made = {"tokens": 0}

    def on_tokens(new: int) -> None:
        made["tokens"] += new
        worker.progress(min(1.0, made["tokens"] / total), worker_tokens + made["tokens"])

    worker_tokens = worker.tokens
    for number in range(max(map(len, turns))):
        asked = []
        for i, (state, prefixes) in enumerate(zip(answered, turns, strict=True)):
            if number < len(prefixes) and not state.closed:
                prompt = ctx.template.prompt_ids(state.messages(prefixes[number]), state.tools)
                if len(prompt) + section.max_tokens > limit:
                    state.closed = True  # the rest of this conversation does not fit the engine
                else:
                    asked.append((i, prompt))
        if not asked:
            break
        replies = engine.generate(
            [prompt for _, prompt in asked],
            max_tokens=section.max_tokens,
            temperature=section.temperature,
            top_p=section.top_p,
            seeds=[_seed(ctx.recipe.seed, answered[i].id, number) for i, _ in asked],
            on_tokens=on_tokens,
        )
        for (i, prompt), reply in zip(asked, replies, strict=True):
            text = ctx.template.decode(reply.token_ids)
            answered[i].add(turns[i][number], prompt, reply.token_ids, reply.finish_reason, text)
    worker.tokens = worker_tokens + made["tokens"]
    done = [a for a in answered if a.turns]
    counts = {
        "samples": len(done),
        "rejected": len(answered) - len(done),
        "tokens": made["tokens"],
        "truncated": sum(t.finish_reason == "length" for a in done for t in a.turns),
    }
    return done, counts


def _seed(seed: int, conversation_id: str, turn: int) -> int:
    """A sampling seed for each request that depends on nothing but recipe and conversation."""
    return int(digest([seed, conversation_id, turn])[:8], 16)
