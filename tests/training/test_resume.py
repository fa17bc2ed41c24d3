"""A run that was stopped or killed, however often, is the run that was not: bit for bit.

CPU, float32. Short forms are in `make test` (here and in test_train.py); the campaign stops ten
times at random steps and kills five times at random moments.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

TIMES = {"tokens_per_s", "step_ms", "data_wait"}
"""What differs from run to run."""


def curves_of(workdir: Path) -> list[dict[str, Any]]:
    """All lines of curves.jsonl, without times."""
    from kimi_eagle.training import curves

    lines = curves.read(workdir / "curves.jsonl")
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


@pytest.fixture
def same_end(same_weights):
    """Compares curves, checkpoints and validation of two working folders."""

    def call(one: Path, other: Path) -> None:
        assert curves_of(one) == curves_of(other)
        for epoch in ("0", "1"):
            a, b = one / "checkpoints" / epoch, other / "checkpoints" / epoch
            assert same_weights(a, b)
            for name in ("val_metrics.json", "training_state.json"):
                assert (a / name).read_bytes() == (b / name).read_bytes()

    return call


@pytest.fixture
def noisy(monkeypatch):
    """A draft that draws from python's, numpy's and torch's random numbers in each step."""
    import numpy as np
    import torch

    from kimi_eagle.training import loop

    build = loop.build_model

    drawn: list[float] = []

    def noise(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        scale = 0.01 * (random.random() + np.random.rand())  # noqa: NPY002
        drawn.append(scale)
        return (args[0] + scale * torch.randn_like(args[0]), *args[1:])

    def with_noise(*args: Any, **kwargs: Any):
        model = build(*args, **kwargs)
        model.fc.register_forward_pre_hook(noise)
        return model

    monkeypatch.setattr(loop, "build_model", with_noise)
    return drawn


def test_random_numbers_go_on(noisy, run, recipe_for, same_weights, tmp_path):
    recipe = recipe_for(epochs=2, max_steps=13)  # 11 in the first epoch
    whole = run(recipe, tmp_path / "whole")
    run(recipe, tmp_path / "parts", stop_at=3)
    run(recipe, tmp_path / "parts", stop_at=11)
    last = run(recipe, tmp_path / "parts")
    assert curves_of(tmp_path / "parts") == curves_of(tmp_path / "whole")
    assert same_weights(last.checkpoint, whole.checkpoint)
    assert len(noisy) >= 2 * 13, "each step draws"


@pytest.mark.campaign
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_stopped_ten_times(run, recipe_for, same_end, tmp_path, optimizer):
    recipe = recipe_for(optimizer=optimizer, keep_checkpoints=5)
    whole = run(recipe, tmp_path / "whole")
    stops = sorted(random.Random(optimizer).sample(range(1, whole.steps), 10))
    print("stopped after steps", stops)
    for stop in stops:
        part = run(recipe, tmp_path / "parts", stop_at=stop)
        assert part.interrupted and part.steps == stop
    last = run(recipe, tmp_path / "parts")
    assert (last.steps, last.tokens, last.interrupted) == (whole.steps, whole.tokens, False)
    same_end(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.campaign
def test_killed_five_times(run, recipe_for, same_end, in_a_process, tmp_path):
    """Each time at a random moment; at most the steps since the last checkpoint are done again."""
    recipe = recipe_for(checkpoints_per_epoch=4, keep_checkpoints=5)
    whole = run(recipe, tmp_path / "whole")
    dice, done = random.Random(5), 0
    for _ in range(5):
        # Somewhere in the 1st to 5th step after it came back, or in what follows that step.
        ended = in_a_process(
            recipe, tmp_path / "work", kill_after=dice.randint(1, 5), wait=dice.uniform(0, 0.5)
        )
        steps = [int(x) for x in ended.stderr.split() if x.isdecimal()]
        print(f"came back at step {steps[0]} with {done} done, killed after {steps[-1]}")
        assert done - 3 < steps[0] <= done + 1, "3 steps lie between checkpoints"
        done = max(x["step"] for x in curves_of(tmp_path / "work"))
    assert in_a_process(recipe, tmp_path / "work").returncode == 0
    assert len([x for x in curves_of(tmp_path / "work") if "loss" in x]) == whole.steps
    same_end(tmp_path / "work", tmp_path / "whole")
