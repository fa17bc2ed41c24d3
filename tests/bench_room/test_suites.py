"""Rows of public benchmarks in their published columns; the texts are made up."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kimi_eagle.bench.suites import COMPLETE, PLACEHOLDER, Question, read_questions
from kimi_eagle.data.rows import Conversation
from kimi_eagle.errors import UsageError
from kimi_eagle.recipe_benchmark import WorkloadSection

MT = {"question_id": 81, "category": "writing", "turns": ["Describe a pier.", "Now in verse."]}
SPEED = {
    "question_id": "q1",
    "category": "coding",
    "sub_category": "python",
    "turns": ["Sort these.", "Faster.", "Thanks."],
    "source": "s",
    "src_id": "1",
    "difficulty": "easy",
    "multiturn": True,
}
PREPARED = {k: v for k, v in SPEED.items() if k != "turns"} | {
    "messages": [{"role": "user", "content": t} for t in SPEED["turns"]]
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def twice(x):\n",
    "entry_point": "twice",
    "canonical_solution": "    return 2 * x\n",
    "test": "assert twice(1) == 2",
}
GSM8K = {"question": "Two hens lay three eggs each. How many?", "answer": "#### 6"}
MATH = {
    "problem": "Find $x$ with $2x=4$.",
    "solution": "...",
    "answer": "2",
    "subject": "Algebra",
    "level": 1,
    "unique_id": "test/algebra/1.json",
}


def asked(question: Question) -> str:
    assert isinstance(question.row, Conversation)
    (message,) = question.row.messages
    assert message["role"] == "user"
    return message["content"]


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def read(path: Path, **section) -> list[Question]:
    return list(read_questions(WorkloadSection(path=str(path), **section)))


CASES = [
    ("mt-bench", MT, "Describe a pier.", "writing", ("Now in verse.",)),
    ("speed-bench", SPEED, "Sort these.", "coding", ("Faster.", "Thanks.")),
    ("speed-bench", PREPARED, "Sort these.", "coding", ("Faster.", "Thanks.")),
    ("humaneval", HUMANEVAL, COMPLETE.format("def twice(x):"), "held", ()),
    ("gsm8k", GSM8K, GSM8K["question"], "held", ()),
    ("math-500", MATH, MATH["problem"], "held", ()),
]


@pytest.mark.parametrize(("format", "row", "text", "category", "later"), CASES)
def test_a_row_is_known_by_its_columns_and_by_its_name(
    tmp_path: Path, format: str, row: dict, text: str, category: str, later: tuple
) -> None:
    file = write(tmp_path / "held.jsonl", row)
    table = pa.Table.from_pylist([row])
    pq.write_table(table, tmp_path / "held.parquet")
    for section in ({"path": str(file)}, {"path": str(tmp_path / "held.parquet")}):
        for given in ({}, {"format": format}):
            (found,) = read_questions(WorkloadSection(**section, **given))
            assert (asked(found), found.category, found.later) == (text, category, later)


def test_our_own_forms_may_have_columns_of_benchmarks_beside_them(tmp_path: Path) -> None:
    (found,) = read(write(tmp_path / "held.jsonl", {"prompt": "Mine", "turns": 2, **GSM8K, **MATH}))
    assert asked(found) == "Mine"


def test_category_of_the_section_then_of_the_row_then_its_name(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", {"prompt": "Hi", "category": "chat"}, {"prompt": "Ho"})
    assert [q.category for q in read(file)] == ["chat", "mine"]
    assert [q.category for q in read(file, name="own")] == ["chat", "own"]
    assert [q.category for q in read(file, category="all")] == ["all", "all"]


def test_limit_counts_over_the_files_of_a_folder(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", *({"prompt": f"{name}{i}"} for i in range(2)))
    assert [asked(q) for q in read(tmp_path, limit=3)] == ["a0", "a1", "b0"]


def test_our_own_prompts_cover_six_categories(root: Path) -> None:
    found = read(root / "jobs/data/categories.jsonl")
    counts = Counter(q.category for q in found)
    assert counts.keys() == {"chat", "code", "maths", "chinese", "tools", "long"}
    assert min(counts.values()) >= 4
    rows = [(q.category, q.row) for q in found if isinstance(q.row, Conversation)]
    assert all(bool(row.tools) == (category == "tools") for category, row in rows)
    last = {c: [len(r.messages[-1]["content"]) for k, r in rows if k == c] for c in counts}
    assert min(last["long"]) > 6000 > max(last["code"] + last["maths"])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (SPEED | {"turns": [PLACEHOLDER + " USING SPECDEC_BENCH"]}, "placeholder"),
        (MT | {"turns": []}, "no turns"),
        (MT | {"turns": ["Hi", " "]}, "turn 2"),
        (MT | {"turns": "Hi"}, "no turns"),
        (PREPARED | {"messages": ["Hi"]}, "bad-value"),
        ({"question": "no answer beside it"}, "missing-field"),
        (["no object"], "not-an-object"),
    ],
)
def test_a_row_that_cannot_be_asked_stops(tmp_path: Path, row: object, said: str) -> None:
    file = write(tmp_path / "held.jsonl", {"prompt": "Hi"}, row)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as e:
        read(file)
    assert said in e.value.line() and "held.jsonl: row 2" in e.value.line()


@pytest.mark.parametrize("format", ["mt-bench", "math-500"])
def test_a_named_form_wants_its_column(tmp_path: Path, format: str) -> None:
    with pytest.raises(UsageError, match="no (turns|problem)"):
        read(write(tmp_path / "held.jsonl", GSM8K), format=format)
