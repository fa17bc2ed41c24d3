"""Later turns of a conversation, asked after the verifier's own answers to the turns before.

A second question means something only after an answer to the first. The verifier alone answers the
earlier turns once, greedily, before anything is measured; its answers and the next question become
one more prompt, which both engines are given like any other. The price: the first turns of these
conversations are generated once more. The gain: with and without a draft exactly the same is asked,
also in bfloat16, where a draft may change an answer. An answer cut off at max_tokens is gone on
from as well, as in FastChat (fastchat/llm_judge/gen_model_answer.py); regenerate stops there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kimi_eagle.bench.workload import Workload
from kimi_eagle.errors import RunError

if TYPE_CHECKING:
    from kimi_eagle.data.template import ChatTemplate

Ids = Sequence[int]


@dataclass
class _Talk:
    """A conversation on its way: its place among the prompts, what was said, what comes."""

    index: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    turns: list[str]
    prompt: Ids
    turn: int = 1


def with_later_turns(
    workload: Workload,
    answer: Callable[[list[Ids]], list[Ids]],
    template: ChatTemplate,
    room: int,
) -> Workload:
    """The workload with each later turn as a prompt `NAME#2`, `NAME#3` at its end.

    answer: prompts to the verifier's answers, in order. room: the engine's max_model_len. RunError
    where a prompt and its answer do not fit it. The digest stays that of what was asked for.
    """
    talks = [
        _Talk(t["prompt"], list(t["messages"]), t["tools"], list(t["turns"]), ids)
        for t in workload.later
        for ids in [workload.prompts[t["prompt"]]]
    ]
    asked: list[tuple[_Talk, int, list[int]]] = []
    while talks := [t for t in talks if t.turns]:
        for talk, ids in zip(talks, answer([t.prompt for t in talks]), strict=True):
            said = {"role": "assistant", "content": template.answer_text(ids)}
            talk.messages += [said, {"role": "user", "content": talk.turns.pop(0)}]
            talk.prompt, talk.turn = template.prompt_ids(talk.messages, talk.tools), talk.turn + 1
            if len(talk.prompt) + workload.max_tokens > room:
                raise RunError(
                    f"turn {talk.turn} has {len(talk.prompt)} tokens and an answer of"
                    f" {workload.max_tokens}: more than max_model_len {room}",
                    where=workload.names[talk.index],
                )
            asked.append((talk, talk.turn, list(talk.prompt)))
    before = [talk.index for talk, _, _ in asked]
    names = [f"{workload.names[talk.index]}#{turn}" for talk, turn, _ in asked]
    return replace(
        workload,
        names=(*workload.names, *names),
        prompts=(*workload.prompts, *(tuple(ids) for _, _, ids in asked)),
        categories=(*workload.categories, *(workload.categories[i] for i in before)),
        sources=(*workload.sources, *(workload.sources[i] for i in before)),
        later=(),
    )
