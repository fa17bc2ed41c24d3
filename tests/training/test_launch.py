"""Training under torchrun: the same run as in one process, stopped and failing in good order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kimi_eagle.errors import RunError
from kimi_eagle.shards import ShardSet


@pytest.fixture
def ranks(verifier, corpus):
    """`launch.run` with one torchrun rank."""
    from kimi_eagle.training import launch

    def call(recipe, workdir: Path, progress: list, stop_at: int | None = None, shards=None):
        return launch.run(
            recipe,
            verifier,
            ShardSet(shards or corpus.shards),
            d2t=corpus.d2t,
            t2d=corpus.t2d,
            workdir=workdir,
            should_stop=lambda: bool(stop_at and progress and progress[-1]["step"] >= stop_at),
            on_progress=progress.append,
            ranks=1,
        )

    return call


def losses(workdir: Path) -> list[float]:
    lines = [json.loads(x) for x in (workdir / "curves.jsonl").read_text().splitlines()]
    return [x["loss"] for x in lines if "loss" in x]


def test_ranks_are_those_of_the_recipe_where_there_is_no_gpu(recipe_for, monkeypatch) -> None:
    import torch

    from kimi_eagle.training.launch import ranks_here

    assert ranks_here(recipe_for()) == 1
    assert ranks_here(recipe_for(ranks=3)) == 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert ranks_here(recipe_for(ranks=3)) == 3, "train.device is cpu"
    assert ranks_here(recipe_for(device="auto", ranks=3)) == 8


@pytest.mark.campaign
def test_stopped_under_torchrun_and_finished_in_process(ranks, run, recipe_for, tmp_path) -> None:
    progress: list[dict] = []
    recipe = recipe_for(epochs=3)
    first = ranks(recipe, tmp_path / "ranks", progress, stop_at=2)
    assert first.interrupted and first.steps < first.total_steps
    again = ranks(recipe, tmp_path / "ranks", progress)
    assert not again.interrupted and again.steps == again.total_steps
    assert again.checkpoint.is_dir() and progress[-1]["step"] == again.steps
    whole = run(recipe, tmp_path / "one")
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "one"), rel=0.02)
    assert (again.steps, again.tokens) == (whole.steps, whole.tokens)


@pytest.mark.campaign
def test_a_rank_that_meets_damage_names_the_sample(ranks, recipe_for, corpus, tmp_path) -> None:
    from kimi_eagle.training import damage

    (tmp_path / "shards").mkdir()
    shards = corpus.write(tmp_path / "shards")
    with open(shards[1], "r+b") as f:
        f.seek(5000)
        f.write(bytes(8))
    with pytest.raises(RunError, match="damaged hidden states"):
        ranks(recipe_for(), tmp_path / "work", [], shards=shards)
    (met,) = damage.read(tmp_path / "work" / damage.NAME)
    assert met.shard == shards[1].name and not met.skipped


def test_a_rank_that_fails_is_named_with_its_error(ranks, recipe_for, corpus, tmp_path) -> None:
    recipe = recipe_for(loss="no_such_loss")
    with pytest.raises(RunError, match="no_such_loss"):
        ranks(recipe, tmp_path, [])
