"""The benchmark's workload: held-out prompts as token ids.

Reads `[benchmark]`'s prompts through `suites.py` and the verifier's chat template, writes nothing.
Prompts become token ids here, once: both engines, with and without the draft, are given the same
ids, and the digest over them says whether two results may be compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle.bench.suites import Question, bad_row, read_questions
from kimi_eagle.data.rows import Conversation
from kimi_eagle.errors import RowError, UsageError
from kimi_eagle.recipe import Recipe
from kimi_eagle.recipe_benchmark import WorkloadSection

if TYPE_CHECKING:
    from kimi_eagle.data.template import ChatTemplate


@dataclass(frozen=True)
class Workload:
    """Prompts to be answered greedily.

    names: one a prompt (source and row), unique. prompts: token ids. max_tokens: answer length at
    most. k: draft tokens a step. digest: sha256 hex over ids, max_tokens, k and later turns.
    categories, sources: one a prompt, or none. later: conversations that go on after the
    verifier's answer (later.py): {"prompt": index, "messages", "tools", "turns": texts}; template:
    the digest of what will render them, "" without any.
    """

    names: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    k: int
    digest: str
    categories: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    later: tuple[dict[str, Any], ...] = ()
    template: str = ""


def make_workload(
    names: Iterable[str],
    prompts: Iterable[Iterable[int]],
    max_tokens: int,
    k: int,
    *,
    categories: Iterable[str] = (),
    sources: Iterable[str] = (),
    later: Iterable[dict[str, Any]] = (),
    template: str = "",
) -> Workload:
    """Freeze prompts and compute their digest; what they are called does not enter it."""
    fixed = tuple(tuple(int(i) for i in ids) for ids in prompts)
    parts: dict[str, Any] = {"prompts": fixed, "max_tokens": max_tokens, "k": k}
    if later := tuple(later):
        parts |= {"later": later, "template": template}
    text = json.dumps(parts, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    told = (tuple(categories), tuple(sources), later, template if later else "")
    return Workload(tuple(names), fixed, max_tokens, k, digest, *told)


def questions(
    recipe: Recipe, vocab_size: int | None = None
) -> Iterator[tuple[WorkloadSection, Question]]:
    """All that is asked, in the order of the recipe and its files; errors as read_questions."""
    for section in recipe.benchmark.workloads:
        for question in read_questions(section, vocab_size):
            yield section, question


def load_workload(recipe: Recipe, template: ChatTemplate) -> Workload:
    """Held-out prompts of the recipe.

    A row's last open turn is asked: given answers after it are dropped; of a benchmark's row with
    several turns the first, and the others later. Raises UsageError for a missing or empty file,
    any bad row and a prompt that, with all its answers, does not fit the benchmark engine's
    max_model_len.
    """
    section = recipe.benchmark
    room = recipe.engine_for("benchmark").max_model_len
    found = list(questions(recipe, template.verifier.vocab_size))
    names, prompts, later = [], [], []
    for source, question in found:
        where = question.row.where
        ids = _ids(question, template)
        if question.later:
            later.append(_going_on(question, len(prompts)))
        said = len(_ids(question, template, whole=True) if question.later else ids)
        turns = 1 + len(question.later)
        if said + turns * section.max_tokens > room:
            answers = f"{turns} answers" if question.later else "an answer"
            raise UsageError(
                f"prompt of {said} tokens and {answers} of {section.max_tokens}"
                f" exceed max_model_len {room}",
                where=f"{where[0]}: row {where[1]}",
                fix="raise benchmark.engine.max_model_len or lower benchmark.max_tokens",
            )
        names.append(name_of(source, question))
        prompts.append(ids)
    return make_workload(
        names,
        prompts,
        section.max_tokens,
        section.k,
        categories=[q.category for _, q in found],
        sources=[str(source.name) for source, _ in found],
        later=later,
        template=template.digest() if later else "",
    )


def _going_on(question: Question, index: int) -> dict[str, Any]:
    row = question.row
    messages, tools = (row.messages, row.tools) if isinstance(row, Conversation) else ([], None)
    return {"prompt": index, "messages": messages, "tools": tools, "turns": list(question.later)}


def _ids(question: Question, template: ChatTemplate, whole: bool = False) -> list[int]:
    """Token ids of what is asked; whole: with the later turns, after answers of a word."""
    row = question.row
    try:
        if isinstance(row, Conversation):
            messages = ask(row.messages)
            for text in question.later if whole else ():
                messages.append({"role": "assistant", "content": "a"})
                messages.append({"role": "user", "content": text})
            return template.prompt_ids(messages, row.tools)
        asked = int(row.loss_mask.argmax())
        if not asked:
            raise RowError("no-prompt", "the answer begins at the first token")
    except RowError as e:
        raise bad_row(e, row.where) from None
    return row.input_ids[:asked].tolist()


def ask(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without the answers after the last question (earlier answers stay)."""
    end = len(messages)
    while end and messages[end - 1].get("role") == "assistant":
        end -= 1
    return list(messages[:end])


def name_of(source: WorkloadSection, question: Question) -> str:
    """`source:row`, or `source/file:row` where the source is a folder."""
    file, row = question.row.where
    within = "" if file == source.path else f"/{Path(file).stem}"
    return f"{source.name}{within}:{row}"
