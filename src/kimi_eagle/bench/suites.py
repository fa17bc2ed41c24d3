"""Rows of public benchmarks, and our own, as what the benchmark asks.

Reads local files that the user brought; nothing is fetched. Known by their columns, as published:

mt-bench     `turns` (list of texts), `category`: FastChat, fastchat/llm_judge/data/mt_bench/
             question.jsonl; 80 questions of two turns.
speed-bench  `turns`, `category`, `sub_category`: nvidia/SPEED-Bench (Hugging Face, revision
             487aa71), or `messages` with one user message a turn, as NeMo-Skills' prepare.py
             (nemo_skills/dataset/speed-bench, commit aeda1da) writes it. Published rows may hold a
             placeholder until that program has run: refused.
humaneval    `prompt`, `entry_point`: openai/human-eval, HumanEval.jsonl (unpacked).
gsm8k        `question`, `answer`: openai/grade-school-math, data/test.jsonl; also openai/gsm8k.
math-500     `problem`, `answer`: HuggingFaceH4/MATH-500 test.jsonl; openai/prm800k, math_splits.

Problems are asked as they stand, without examples or a call for a format; only HumanEval's code
gets a sentence, for a chat model does not know that it is to go on. Harnesses differ in this: an
acceptance length compares with another of the same words alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_eagle.data.formats import detect_format, parse_row
from kimi_eagle.data.rows import Conversation, TokenRow
from kimi_eagle.data.sources import ROW_FAULTS, find_files, raw_rows
from kimi_eagle.errors import RowError, UsageError
from kimi_eagle.recipe_benchmark import WorkloadSection

SUITES = {
    "speed-bench": (("turns", "sub_category"), ("messages", "sub_category")),
    "mt-bench": (("turns",),),
    "humaneval": (("prompt", "entry_point"),),
    "gsm8k": (("question", "answer"),),
    "math-500": (("problem", "answer"),),
}
"""Format -> the columns by which `auto` knows it."""
OVER_OWN = ("speed-bench", "humaneval")
"""Known although the columns of a form of data/formats.py are there too; others only without."""

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
COMPLETE = "Complete this Python function.\n\n```python\n{}\n```"


@dataclass(frozen=True)
class Question:
    """One row: the conversation up to the first answer that is asked, and what the user says later.

    category: the section's, else the row's own, else the section's name. later: turns after that.
    """

    row: Conversation | TokenRow
    category: str
    later: tuple[str, ...] = ()


def read_questions(section: WorkloadSection, vocab_size: int | None = None) -> Iterator[Question]:
    """The questions of one workload in file order, at most `limit`.

    Raises UsageError for a missing or empty file and for any bad row: a benchmark must not shrink
    silently.
    """
    name, count = section.name or Path(section.path).stem, 0
    for file in find_files(Path(section.path)):
        for number, row in raw_rows(file, "any"):
            if section.limit is not None and count == section.limit:
                return
            where = (str(file), number)
            try:
                if isinstance(row, RowError):
                    raise row
                found, own, later = _parse(row, section.format, name, where, vocab_size)
            except RowError as e:
                raise bad_row(e, where) from None
            except ROW_FAULTS as e:
                raise bad_row(RowError("bad-value", f"{type(e).__name__}: {e}"[:200]), where) from e
            count += 1
            yield Question(found, section.category or own or name, later)


def bad_row(fault: RowError, where: tuple[str, int]) -> UsageError:
    """What is said of a row that cannot be asked."""
    return UsageError(
        f"{fault.rule}: {fault.detail}",
        where=f"{where[0]}: row {where[1]}",
        fix="correct or remove the row",
    )


def _parse(
    row: Any, format: str, source: str, where: tuple[str, int], vocab_size: int | None
) -> tuple[Conversation | TokenRow, str | None, tuple[str, ...]]:
    """(row, its category, later turns); RowError where it is bad."""
    fields = row if isinstance(row, dict) else {}
    category = fields.get("category")
    own = category if isinstance(category, str) and category.strip() else None
    suite = _suite(fields) if format == "auto" else format
    if suite not in SUITES:
        found = parse_row(row, format, source=source, where=where, vocab_size=vocab_size)
        return found, own, ()
    first, *later = _turns(fields, suite)
    given = {"messages": [{"role": "user", "content": first}]}
    return parse_row(given, "messages", source=source, where=where), own, tuple(later)


def _suite(row: dict[str, Any]) -> str | None:
    there = [k for k, v in row.items() if v is not None]
    likely = OVER_OWN if detect_format(there) else SUITES
    return next((s for s in likely if any(set(there) >= set(w) for w in SUITES[s])), None)


def _turns(row: dict[str, Any], suite: str) -> list[str]:
    """What the user says, turn by turn."""
    if suite == "speed-bench" and row.get("turns") is None:
        asked = [m.get("content") for m in row.get("messages") or ()]
    elif suite in ("mt-bench", "speed-bench"):
        asked = row.get("turns")
    else:
        asked = [text] if (text := row.get(SUITES[suite][0][0])) is not None else []
    if not isinstance(asked, list) or not asked:
        raise RowError("missing-field", f"no {' or '.join(w[0] for w in SUITES[suite])}")
    for number, text in enumerate(asked, 1):
        if not isinstance(text, str) or not text.strip():
            raise RowError("empty-user", f"turn {number}: no text")
        if text.startswith(PLACEHOLDER):
            raise RowError("placeholder", "the text is to be fetched by SPEED-Bench's prepare.py")
    return [COMPLETE.format(asked[0].rstrip())] if suite == "humaneval" else asked
