"""What training and benchmark have in common, by runs of words."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from kimi_eagle.bench.overlap import near_duplicates, warning, words
from kimi_eagle.data.rows import Conversation, TokenRow
from kimi_eagle.recipe import parse
from kimi_eagle.stages import benchmark as stage

LONG = "the quick brown fox jumps over one lazy dog while nine grey cats watch from a wall"


def recipe_for(folder: Path, *prompts: str, **row: object):
    rows = [{"prompt": p} for p in prompts] + ([row] if row else [])
    file = folder / "held.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return parse(
        {
            "name": "t",
            "verifier": {"path": "."},
            "sources": [{"path": "unused.jsonl"}],
            "extract": {"layers": [2, 30]},
            "vocab": {"draft_vocab_size": 64},
            "benchmark": {"prompts": str(file)},
        },
        where="t.toml",
        base=folder,
    )


def trained(*texts: str, role: str = "user") -> list[Conversation]:
    return [
        Conversation("chat", [{"role": role, "content": text}], where=("chat.jsonl", i))
        for i, text in enumerate(texts, 1)
    ]


def test_thirteen_words_in_a_row_are_found_whatever_stands_around(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, f"Tell me: {LONG}!", "Say how bread is made.")
    other = (
        "Please go on. THE QUICK, brown fox jumps over one lazy dog -- while nine grey cats sing"
    )
    found = near_duplicates(recipe, trained("nothing", other))
    assert (found["prompts"], found["compared"], found["not_compared"]) == (1, 2, 0)
    (example,) = found["examples"]
    assert example["prompt"] == "held:1" and example["trained"] == "chat: row 2"
    assert example["words"] == " ".join(LONG.split()[:13])
    assert "1 of 2" in warning(found) and "held:1" in warning(found)


def test_all_prompts_that_share_a_run_are_counted(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, f"One: {LONG}", f"Two: {LONG}", "Yes or no?", "Yes or no?", "No")
    found = near_duplicates(recipe, trained(LONG, "yes or no"))
    assert (found["prompts"], found["compared"]) == (4, 5)
    assert [e["prompt"] for e in found["examples"]] == ["held:1", "held:2", "held:3", "held:4"]


def test_twelve_words_of_a_longer_prompt_are_not(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, LONG)
    part = " ".join(LONG.split()[:12])
    found = near_duplicates(recipe, trained(f"{part} and go"))
    assert found["prompts"] == 0 and warning(found) is None


def test_a_prompt_of_eight_words_is_found_in_a_longer_turn(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, "Who built the old bridge in this town?")
    assert near_duplicates(recipe, trained("So who built the old bridge in this town, and why?"))[
        "prompts"
    ]


def test_a_short_prompt_is_found_as_a_whole_turn_only(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, "Who are you?")
    assert not near_duplicates(recipe, trained("Ask it: who are you? Then wait."))["prompts"]
    assert near_duplicates(recipe, trained("who are YOU"))["prompts"] == 1


def test_chinese_signs_are_words(tmp_path: Path) -> None:
    assert words("GPT-4 \u662f\u4ec0\u4e48?") == ["gpt", "4", "\u662f", "\u4ec0", "\u4e48"]
    text = "\u8bf7\u7528\u901a\u4fd7\u7684\u8bdd\u89e3\u91ca\u4e00\u4e0b"
    recipe = recipe_for(tmp_path, text + "?")
    assert near_duplicates(recipe, trained("\u597d\u3002" + text))["prompts"] == 1


def test_later_turns_count_and_answers_do_not(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, turns=["Hello there", LONG], category="x")
    assert near_duplicates(recipe, trained(LONG))["examples"][0]["prompt"] == "held:1"
    assert not near_duplicates(recipe, trained(LONG, role="assistant"))["prompts"]


def test_token_rows_are_counted_as_not_compared(tmp_path: Path) -> None:
    row = TokenRow("t", np.array([1, 2], "i4"), np.array([False, True]))
    assert near_duplicates(recipe_for(tmp_path, LONG), [row])["not_compared"] == 1


def test_a_run_says_it_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The stage, without its engines."""
    given: list[dict] = []

    def measured(*_args: object, results: Path, duplicates: dict, **_more: object) -> None:
        given.append(duplicates)
        shown = ("acceptance_length", "identical_outputs", "tokens_per_second", "k")
        results.write_text(json.dumps(dict.fromkeys(shown, 1)))

    attempt = MagicMock()
    attempt.path = lambda name: tmp_path / name
    attempt.unit.payload = (None, None)
    worker, ctx = MagicMock(), MagicMock()
    worker.attempts.return_value = [attempt]
    ctx.recipe, ctx.selection.rows = recipe_for(tmp_path, LONG), trained(LONG)
    ctx.verifier.vocab_size = 64
    monkeypatch.setattr("kimi_eagle.bench.run_benchmark", measured)
    monkeypatch.setattr(stage, "plan", lambda _: [attempt.unit])
    monkeypatch.setattr(stage, "publish", lambda _: None)
    monkeypatch.setattr(stage.train, "publish", lambda _: None)
    stage.work(ctx, worker)
    assert given[0]["prompts"] == 1
    assert "warning: 1 of 1 benchmark prompts" in capsys.readouterr().err
    assert "1 of 1" in attempt.commit.call_args.kwargs["info"]["warning"]


def test_our_own_held_out_prompts_are_not_what_our_recipes_train_on(root: Path) -> None:
    from kimi_eagle.data.sources import read_rows
    from kimi_eagle.recipe import load

    recipe = load(root / "jobs/smollm2.toml")
    rows = [row for source in recipe.sources for row in read_rows(source)]
    for file in ("heldout.jsonl", "categories.jsonl"):
        asked = recipe.benchmark.model_copy(
            update={"prompts": str(root / "jobs/data" / file), "limit": None}
        )
        found = near_duplicates(recipe.model_copy(update={"benchmark": asked}), rows)
        assert found["compared"] >= 28 and found["examples"] == []
