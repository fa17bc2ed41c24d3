"""Held-out prompts become token ids, once, with the verifier's real template."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kimi_eagle.bench.workload import ask, load_workload, make_workload
from kimi_eagle.data.template import ChatTemplate
from kimi_eagle.errors import UsageError
from kimi_eagle.recipe import TemplateSection, parse
from kimi_eagle.verifier import open_verifier


@pytest.fixture(scope="module")
def template(verifier_dir: Path) -> ChatTemplate:
    return ChatTemplate(open_verifier(verifier_dir), TemplateSection())


def recipe_for(file: Path, **benchmark):
    return parse(
        {
            "name": "t",
            "verifier": {"path": "."},
            "sources": [{"path": "unused.jsonl"}],
            "engine": {"max_model_len": 256},
            "regenerate": {"enabled": False},
            "prepare": {"max_length": 255},
            "extract": {"layers": [2, 30]},
            "vocab": {"draft_vocab_size": 64},
            "benchmark": ({} if "sources" in benchmark else {"prompts": str(file)})
            | {"max_tokens": 32}
            | benchmark,
        },
        where="t.toml",
        base=file.parent,
    )


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def test_prompt_ids_are_what_serving_renders(tmp_path: Path, template: ChatTemplate) -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "What is 2+2?"},
    ]
    answered = [*turns, {"role": "assistant", "content": "four"}]
    file = write(tmp_path / "held.jsonl", {"prompt": "What is rain?"}, {"messages": answered})
    made = load_workload(recipe_for(file), template)
    assert made.names == ("held:1", "held:2")
    text = template.tokenizer.decode(made.prompts[0])
    assert text.endswith("What is rain?<|im_end|>\n<|im_start|>assistant\n")
    expected = template.tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=False
    )
    assert list(made.prompts[1]) == expected
    assert "four" not in template.tokenizer.decode(made.prompts[1])


def test_pretokenised_rows_are_asked_up_to_the_first_answer_token(
    tmp_path: Path, template: ChatTemplate
) -> None:
    table = pa.table(
        {"input_ids": [[5, 6, 7, 8]], "loss_mask": [[False, False, True, True]]},
        schema=pa.schema({"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.bool_())}),
    )
    pq.write_table(table, tmp_path / "held.parquet")
    made = load_workload(recipe_for(tmp_path / "held.parquet"), template)
    assert made.prompts == ((5, 6),)


def test_limit_takes_the_first_rows(tmp_path: Path, template: ChatTemplate) -> None:
    file = write(tmp_path / "held.jsonl", *({"prompt": f"Say {i}"} for i in range(5)))
    assert load_workload(recipe_for(file, limit=2), template).names == ("held:1", "held:2")


def test_several_workloads_are_told_apart(tmp_path: Path, template: ChatTemplate) -> None:
    own = write(tmp_path / "own.jsonl", *({"prompt": f"Say {i}"} for i in range(3)))
    turns = {"category": "writing", "turns": ["Describe a pier.", "Now in verse."]}
    questions = write(tmp_path / "question.jsonl", turns, turns)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder/part.jsonl", {"question": "One and one?", "answer": "2"})
    sources = [
        {"path": str(own), "limit": 2},
        {"path": str(questions), "name": "mt-bench"},
        {"path": "folder", "category": "maths"},
    ]
    made = load_workload(recipe_for(own, sources=sources, limit=1), template)
    assert made.names == ("own:1", "own:2", "mt-bench:1", "folder/part:1")
    assert made.categories == ("own", "own", "writing", "maths")
    assert made.sources == ("own", "own", "mt-bench", "folder")
    (going_on,) = made.later
    assert going_on["prompt"] == 2 and going_on["turns"] == ["Now in verse."]
    assert made.template == template.digest()
    assert "Describe a pier." in template.tokenizer.decode(made.prompts[2])


def test_all_answers_of_a_conversation_must_fit(tmp_path: Path, template: ChatTemplate) -> None:
    file = write(tmp_path / "q.jsonl", {"category": "x", "turns": ["Hi"] * 8})
    with pytest.raises(UsageError, match="8 answers of 32 exceed max_model_len 256"):
        load_workload(recipe_for(file), template)


def test_a_benchmark_asks_prompts_or_sources(tmp_path: Path) -> None:
    one = {"path": "a.jsonl"}
    file = tmp_path / "a.jsonl"
    for given in ({"sources": []}, {"sources": [one], "prompts": "b.jsonl"}):
        with pytest.raises(UsageError, match="either prompts or"):
            recipe_for(file, **given)
    with pytest.raises(UsageError, match="benchmark.sources: names must differ"):
        recipe_for(file, sources=[one, {"path": "b/a.jsonl"}])


def test_digest_stands_for_ids_length_and_k() -> None:
    base = make_workload(["a"], [[1, 2]], 8, 3)
    assert base.digest == make_workload(["b"], [(1, 2)], 8, 3).digest
    others = [
        make_workload(["a"], [[1, 3]], 8, 3),
        make_workload(["a"], [[1], [2]], 8, 3),
        make_workload(["a"], [[1, 2]], 9, 3),
        make_workload(["a"], [[1, 2]], 8, 4),
    ]
    assert len({base.digest, *(o.digest for o in others)}) == 5


def test_ask_keeps_earlier_answers() -> None:
    roles = ["system", "user", "assistant", "user", "assistant", "assistant"]
    kept = ask([{"role": r, "content": "x"} for r in roles])
    assert [m["role"] for m in kept] == roles[:4]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "empty"),
        ('{"prompt": "a"}\n{"prompt": \n', "row 2"),
        ('{"messages": [{"role": "boss", "content": "x"}]}\n', "row 1"),
        (json.dumps({"prompt": "word " * 400}) + "\n", "max_model_len 256"),
    ],
)
def test_bad_files_are_refused_in_one_line(
    tmp_path: Path, template: ChatTemplate, content: str, said: str
) -> None:
    (tmp_path / "held.jsonl").write_text(content)
    with pytest.raises(UsageError) as e:
        load_workload(recipe_for(tmp_path / "held.jsonl"), template)
    assert said in e.value.line() and "held.jsonl" in e.value.line()
    assert "\n" not in e.value.line()


def test_missing_file_is_refused(tmp_path: Path, template: ChatTemplate) -> None:
    with pytest.raises(UsageError, match="absent.jsonl"):
        load_workload(recipe_for(tmp_path / "absent.jsonl"), template)
