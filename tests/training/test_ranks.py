"""Several ranks (gloo): the same run as one rank with accumulation, left and taken up by others.

The single rank runs in this process; the ranks run under torchrun through `launch.run`, as the
train stage starts them. Losses are compared in float32: what differs is the order of sums.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kimi_eagle.shards import ShardSet

TOLERANCE = 2e-3
"""Relative, of each step's loss over a whole run: rounding of sums, which Muon's steps enlarge."""

LONG = {"epochs": 3, "validation_share": 0.2}
"""Enough samples to validate with for four ranks."""

LONGER = {**LONG, "epochs": 8}
"""A stop is seen twice a second: on an idle machine ten steps may have gone by."""


@pytest.fixture
def ranks(verifier, corpus, monkeypatch):
    """`launch.run` under torchrun with `count` ranks."""
    from kimi_eagle.training import launch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def call(recipe: Any, workdir: Path, count: int, *, stop_at: int | None = None):
        progress: list[dict] = []
        return launch.run(
            recipe,
            verifier,
            ShardSet(corpus.shards),
            d2t=corpus.d2t,
            t2d=corpus.t2d,
            workdir=workdir,
            should_stop=lambda: bool(stop_at and progress and progress[-1]["step"] >= stop_at),
            on_progress=progress.append,
            ranks=count,
        )

    return call


def lines_of(workdir: Path, key: str = "loss") -> list[dict]:
    from kimi_eagle.training import curves

    return [line for line in curves.read(workdir / "curves.jsonl") if key in line]


def compare(one: Path, other: Path, tolerance: float = TOLERANCE) -> float:
    """The largest relative difference of losses; learning rates and steps are equal."""
    a, b = lines_of(one), lines_of(other)
    assert [x["step"] for x in a] == [x["step"] for x in b] and len(a) > 3
    assert [x["lr"] for x in a] == pytest.approx([x["lr"] for x in b])
    worst = max(abs(x["loss"] - y["loss"]) / y["loss"] for x, y in zip(a, b, strict=True))
    print(f"largest relative difference of {len(a)} losses: {worst:.2e}")
    assert worst < tolerance
    assert a[0]["loss"] == pytest.approx(b[0]["loss"], rel=1e-5)
    assert a[0]["grad_norm"] == pytest.approx(b[0]["grad_norm"], rel=1e-4)
    return worst


def test_two_ranks_are_one_with_accumulation(ranks, run, recipe_for, tmp_path):
    many = ranks(recipe_for(epochs=1), tmp_path / "ranks", 2)
    one = run(recipe_for(epochs=1, accumulate=2), tmp_path / "one")
    assert (many.steps, many.total_steps, many.tokens) == (one.steps, one.total_steps, one.tokens)
    compare(tmp_path / "ranks", tmp_path / "one")
    state = json.loads((many.checkpoint / "training_state.json").read_text())
    assert state["lanes"] == 2
    assert (many.checkpoint / "random-1.pt").is_file()


@pytest.mark.campaign
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_equal_accumulation(ranks, run, recipe_for, tmp_path, parallel, count):
    many = ranks(recipe_for(**LONG, parallel=parallel), tmp_path / "ranks", count)
    one = run(recipe_for(**LONG, accumulate=count), tmp_path / "one")
    assert (many.steps, many.tokens) == (one.steps, one.tokens)
    compare(tmp_path / "ranks", tmp_path / "one")
    val = [[x["val_loss"] for x in lines_of(tmp_path / d, "val_loss")] for d in ("ranks", "one")]
    assert len(val[0]) == len(val[1]) == 3


@pytest.mark.campaign
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_four_ranks_go_on_with_the_steps_of_two(ranks, run, recipe_for, tmp_path, parallel):
    recipe = recipe_for(**LONGER, accumulate=2, parallel=parallel)
    first = ranks(recipe, tmp_path / "ranks", 2, stop_at=4)
    assert first.interrupted
    second = ranks(recipe, tmp_path / "ranks", 4, stop_at=first.steps + 2)
    assert second.interrupted and second.steps > first.steps
    last = run(recipe, tmp_path / "ranks")
    one = run(recipe_for(**LONGER, accumulate=4), tmp_path / "one")
    assert not last.interrupted and (last.steps, last.tokens) == (one.steps, one.tokens)
    compare(tmp_path / "ranks", tmp_path / "one")


@pytest.mark.campaign
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_four_ranks_go_on_with_steps_of_their_own(ranks, recipe_for, tmp_path, parallel):
    recipe = recipe_for(**LONGER, parallel=parallel)
    first = ranks(recipe, tmp_path, 2, stop_at=4)
    assert first.interrupted
    last = ranks(recipe, tmp_path, 4)
    lines = lines_of(tmp_path)
    assert [x["step"] for x in lines] == list(range(1, last.steps + 1))
    assert last.steps == last.total_steps < 2 * first.total_steps
    rates = [x["lr"] for x in lines]
    # The rate falls on from where it was (a step of four is two of two), and ends with the run.
    assert rates[first.steps :] == sorted(rates[first.steps :], reverse=True)
    assert 0.7 < rates[first.steps] / rates[first.steps - 1] <= 1 and rates[-1] < rates[2] / 5
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
