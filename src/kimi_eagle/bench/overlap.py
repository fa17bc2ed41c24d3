"""Near-duplicates between what a run trained on and what its benchmark asks.

The measure is that of GPT-3 (Brown et al. 2020, arXiv:2005.14165, appendix C), also taken by
lm-evaluation-harness (docs/decontamination.md): a held-out text that shares 13 words in a row with
the training data. Words are letters and digits without case; of Chinese, Japanese and Korean each
sign is a word. A prompt of 8 to 12 words has to occur whole, in a row; a shorter one is a duplicate
of a whole user turn alone, for its words occur everywhere. No MinHash: prompts are few, so that
their runs of words fit in a table and the training data are read once beside it.

Of the training data the users' turns count: the answers are the verifier's own. What the verifier
has seen in its own training cannot be known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kimi_eagle.bench.workload import ask, name_of, questions
from kimi_eagle.data.rows import Conversation, TokenRow
from kimi_eagle.recipe import Recipe

RUN_WORDS, LEAST_WORDS = 13, 8
EXAMPLES = 10
_SIGNS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(f"[{_SIGNS}]|[^\\W_{_SIGNS}]+")


def near_duplicates(
    recipe: Recipe, trained: Iterable[Conversation | TokenRow], vocab_size: int | None = None
) -> dict[str, Any]:
    """What results.json says of them; reads the workload's files again for their text.

    prompts: those that were found, of `compared`. examples: for the first of them the prompt's
    name, the run of words, and source and row of the training data. not_compared: rows that are
    token ids only, on either side.
    """
    asked: dict[str, list[str]] = {}
    tokens = 0
    for section, question in questions(recipe, vocab_size):
        if isinstance(question.row, TokenRow):
            tokens += 1
        else:
            said = ask(question.row.messages)
            texts = [str(m["content"]) for m in said if m["role"] == "user"]
            asked[name_of(section, question)] = [*texts[-1:], *question.later]
    table = _table(asked)
    lengths = sorted({len(key) for key in table})
    starts = {key[:LEAST_WORDS] for key in table if len(key) >= LEAST_WORDS}
    found: dict[str, dict[str, Any]] = {}
    for row in trained:
        if isinstance(row, TokenRow):
            tokens += 1
            continue
        for message in row.messages:
            if message["role"] == "user":
                for name, run in _met(words(str(message["content"])), table, lengths, starts):
                    place = f"{row.source}: row {row.where[1]}"
                    found.setdefault(name, {"prompt": name, "words": run, "trained": place})
    return {
        "prompts": len(found),
        "compared": len(asked),
        "not_compared": tokens,
        "examples": [found[name] for name in asked if name in found][:EXAMPLES],
    }


def warning(found: dict[str, Any]) -> str | None:
    """One line for a person, None where nothing was found."""
    if not found["prompts"]:
        return None
    first = found["examples"][0]
    return (
        f"{found['prompts']} of {found['compared']} benchmark prompts share a run of words with the"
        f' training data, as {first["prompt"]} with {first["trained"]}: "{first["words"]}"'
    )


def words(text: str) -> list[str]:
    """The normalised words of a text."""
    return _WORD.findall(text.casefold())


def _table(asked: dict[str, list[str]]) -> dict[tuple[str, ...], list[str]]:
    """Run of words -> the prompts that have it."""
    table: dict[tuple[str, ...], list[str]] = {}
    for name, texts in asked.items():
        for text in texts:
            said = words(text)
            size = min(RUN_WORDS, len(said))
            for i in range(len(said) - size + 1 if said else 0):
                table.setdefault(tuple(said[i : i + size]), []).append(name)
    return table


def _met(
    said: Sequence[str],
    table: dict[tuple[str, ...], list[str]],
    lengths: Sequence[int],
    starts: set[tuple[str, ...]],
) -> Iterator[tuple[str, str]]:
    """(prompt, run of words) of all that this turn shares."""
    whole = tuple(said)
    if len(whole) < LEAST_WORDS and whole in table:
        yield from ((name, " ".join(whole)) for name in table[whole])
    for i in range(len(said) - LEAST_WORDS + 1):
        if whole[i : i + LEAST_WORDS] not in starts:
            continue
        for size in lengths:
            run = whole[i : i + size]
            if size >= LEAST_WORDS and len(run) == size and run in table:
                yield from ((name, " ".join(run)) for name in table[run])
