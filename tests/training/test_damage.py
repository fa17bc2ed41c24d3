"""Damaged samples in training: named and skipped, or the job stops; the unit gets its mark."""

from __future__ import annotations

import json
import math
from multiprocessing import Process
from pathlib import Path

import numpy as np
import pytest

from kimi_eagle.errors import RunError
from kimi_eagle.shards import ShardSet
from kimi_eagle.training import damage


def flip(shards: list[Path], *sample_ids: str) -> None:
    """Flip one bit in the states of each of these samples (raw shards)."""
    store = ShardSet(shards)
    for sample_id in sample_ids:
        number = store.number(sample_id)
        states = store.at(number)["hidden_states"].tobytes()
        path = store.shards[store.shard_of[number]].path
        at = path.read_bytes().index(states) + len(states) // 2
        with open(path, "r+b") as f:
            f.seek(at)
            byte = f.read(1)[0]
            f.seek(at)
            f.write(bytes([byte ^ 0x10]))


@pytest.fixture
def copies(corpus, tmp_path) -> list[Path]:
    """The corpus' shards, to be damaged."""
    (tmp_path / "shards").mkdir()
    return corpus.write(tmp_path / "shards")


SKIP = {"on_damage": "skip", "max_damaged_share": 0.5}


def test_training_stops_and_names_the_sample(run, recipe_for, corpus, copies, tmp_path):
    bad = corpus.order[12]
    flip(copies, bad)
    with pytest.raises(RunError) as caught:
        run(recipe_for(max_steps=9), tmp_path / "work", shards=copies)
    error = caught.value
    assert "damaged" in error.what and "kimi-eagle retry" in error.fix
    assert error.where == f"{copies[1].name}, sample {bad}"
    (met,) = damage.read(tmp_path / "work" / damage.NAME)
    assert (met.shard, met.sample, met.skipped) == (copies[1].name, bad, False)


def test_training_goes_on_without_the_sample(run, recipe_for, corpus, copies, tmp_path, caplog):
    """Two epochs over one of training and the last of validation: each named once."""
    from kimi_eagle.training import curves

    bad = {corpus.order[4], corpus.order[-1]}
    flip(copies, *bad)
    result = run(recipe_for(**SKIP, seq_len=256), tmp_path / "work", shards=copies)
    assert result.steps == result.total_steps and not result.interrupted
    found = damage.read(tmp_path / "work" / damage.NAME)
    assert {d.sample for d in found} == bad and len(found) == 2
    assert all(d.skipped for d in found)
    assert all(sample_id in caplog.text for sample_id in bad)
    lines = curves.read(tmp_path / "work/curves.jsonl")
    losses = [line[key] for line in lines for key in ("loss", "val_loss") if key in line]
    assert len(losses) == result.steps + 2 and all(map(math.isfinite, losses))


def test_a_step_without_a_sample_left_does_no_harm(run, recipe_for, corpus, copies, tmp_path):
    """All samples of a step damaged, in training and in validation: no crash and no NaN."""
    from kimi_eagle.shards.sampling import Sampling
    from kimi_eagle.training import curves

    recipe = recipe_for(**SKIP, max_steps=4)
    split = int(len(corpus.order) * (1 - recipe.train.validation_share))
    lengths = ShardSet(copies).lengths
    second = Sampling(lengths[:split], 64).batches(0)[1]
    flip(copies, *(corpus.order[i] for i in second), *corpus.order[split:])
    result = run(recipe, tmp_path / "work", shards=copies)
    lines = curves.read(tmp_path / "work/curves.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 4 and all(map(math.isfinite, losses))
    assert losses[1] == 0 and min(losses[0], *losses[2:]) > 0
    from safetensors.numpy import load_file

    weights = load_file(result.checkpoint / "model.safetensors")
    assert all(np.isfinite(w).all() for w in weights.values())


def test_too_many_to_be_left_out(run, recipe_for, corpus, copies, tmp_path):
    """A draft that saw nothing must not pass as trained."""
    flip(copies, *corpus.order)
    with pytest.raises(RunError, match="damaged.*at most 6 .*max_damaged_share") as caught:
        recipe = recipe_for(on_damage="skip", max_damaged_share=0.25)
        run(recipe, tmp_path / "work", shards=copies)
    assert "retry" in caught.value.fix
    # Two threads read: each may have met one at that moment.
    assert len({d.sample for d in damage.read(tmp_path / "work" / damage.NAME)}) in (7, 8)


@pytest.mark.campaign
def test_data_workers_do_the_same(run, recipe_for, corpus, copies, tmp_path):
    """Named once whichever worker meets it; the losses are those of one process."""
    from kimi_eagle.training import curves

    flip(copies, corpus.order[4])
    losses = []
    for workers in (0, 2):
        work = tmp_path / f"work{workers}"
        run(recipe_for(on_damage="skip", seq_len=256, data_workers=workers), work, shards=copies)
        assert [d.sample for d in damage.read(work / damage.NAME)] == [corpus.order[4]]
        losses.append([line.get("loss") for line in curves.read(work / "curves.jsonl")])
    assert losses[0] == losses[1]
    with pytest.raises(RunError, match=corpus.order[4]):
        run(recipe_for(seq_len=256, data_workers=1), tmp_path / "stop", shards=copies)


def test_a_file_that_is_gone_is_no_damage(run, recipe_for, copies, tmp_path):
    """A lost disk must not pass as samples to be skipped."""
    from kimi_eagle.training.damage import DamageLog
    from kimi_eagle.training.dataset import ShardDataset

    store = ShardSet(copies)
    data = ShardDataset(store, range(len(store)), 64, None, DamageLog(tmp_path / "log", skip=True))
    copies[0].unlink()
    with pytest.raises(RunError, match="cannot be read any more") as caught:
        data[0]
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert not (tmp_path / "log").exists()
    assert data[15]["input_ids"].numel()


def many(path: Path, name: str) -> None:
    for i in range(200):
        damage.append(path, damage.Damage(name, str(i), "x" * 300, True))


def test_lines_of_several_processes_do_not_mix(tmp_path):
    path = tmp_path / damage.NAME
    writers = [Process(target=many, args=(path, name)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = damage.read(path)
    assert len(found) == len(set(found)) == 800
    with open(path, "a") as f:
        f.write(json.dumps({"shard": "e"})[:7])  # killed within a line
    assert damage.read(path) == found
