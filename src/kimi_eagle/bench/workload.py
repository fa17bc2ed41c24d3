"""The benchmark's workload: held-out prompts as token ids.

Reads `recipe.benchmark.prompts` through the data room and the verifier's chat template, writes
nothing. Prompts become token ids here, once: both engines, with and without the draft, are given
the same ids, and the digest over them says whether two results may be compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle.errors import RowError, UsageError
from kimi_eagle.recipe import Recipe, SourceSection

if TYPE_CHECKING:
    from kimi_eagle.data.template import ChatTemplate


@dataclass(frozen=True)
class Workload:
    """Prompts to be answered greedily.

    names: one a prompt (file stem and row), unique. prompts: token ids. max_tokens: answer
    length at most. k: draft tokens a step. digest: sha256 hex over ids, max_tokens and k.
    """

    names: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    k: int
    digest: str


def make_workload(
    names: Iterable[str], prompts: Iterable[Iterable[int]], max_tokens: int, k: int
) -> Workload:
    """Freeze prompts and compute their digest; names do not enter it."""
    fixed = tuple(tuple(int(i) for i in ids) for ids in prompts)
    text = json.dumps({"prompts": fixed, "max_tokens": max_tokens, "k": k}, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Workload(tuple(names), fixed, max_tokens, k, digest)


def load_workload(recipe: Recipe, template: ChatTemplate) -> Workload:
    """Held-out prompts of the recipe, the first `benchmark.limit` rows of the file in its order.

    A row's last open turn is asked: given answers after it are dropped. Raises UsageError for a
    missing or empty file, any bad row (a benchmark must not shrink silently) and a prompt that,
    with its answer, does not fit the benchmark engine's max_model_len.
    """
    section = recipe.benchmark
    room = recipe.engine_for("benchmark").max_model_len
    names: list[str] = []
    prompts: list[list[int]] = []
    for name, ids in _rows(recipe, template):
        if len(ids) + section.max_tokens > room:
            raise UsageError(
                f"prompt of {len(ids)} tokens and an answer of {section.max_tokens}"
                f" exceed max_model_len {room}",
                where=f"{section.prompts}: {name}",
                fix="raise benchmark.engine.max_model_len or lower benchmark.max_tokens",
            )
        names.append(name)
        prompts.append(ids)
        if section.limit is not None and len(prompts) == section.limit:
            break
    if not prompts:
        raise UsageError("no prompts", where=section.prompts, expected="at least one row")
    return make_workload(names, prompts, section.max_tokens, section.k)


def _rows(recipe: Recipe, template: ChatTemplate) -> Iterable[tuple[str, list[int]]]:
    """(name, prompt ids) of each row, in the file's order."""
    from kimi_eagle.data.rejects import Reject
    from kimi_eagle.data.rows import Conversation
    from kimi_eagle.data.sources import read_rows

    section = SourceSection(path=recipe.benchmark.prompts)
    for row in read_rows(section, vocab_size=template.verifier.vocab_size):
        if isinstance(row, Reject):
            raise _bad_row(row.rule, row.detail, row.file, row.row)
        if isinstance(row, Conversation):
            try:
                yield _name(row.where), template.prompt_ids(ask(row.messages), row.tools)
            except RowError as e:
                raise _bad_row(e.rule, e.detail, *row.where) from None
        else:
            asked = int(row.loss_mask.argmax())
            if not asked:
                raise _bad_row("no-prompt", "the answer begins at the first token", *row.where)
            yield _name(row.where), row.input_ids[:asked].tolist()


def _bad_row(rule: str, detail: str, file: str, row: int) -> UsageError:
    return UsageError(
        f"{rule}: {detail}", where=f"{file}: row {row}", fix="correct or remove the row"
    )


def ask(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without the answers after the last question (earlier answers stay)."""
    end = len(messages)
    while end and messages[end - 1].get("role") == "assistant":
        end -= 1
    return messages[:end]


def _name(where: tuple[str, int]) -> str:
    return f"{Path(where[0]).stem}:{where[1]}"
