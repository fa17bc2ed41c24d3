"""Whole training runs on real hidden states: as speculators, stopped, killed, resumed."""

from __future__ import annotations

import json
import logging
import shutil
import signal
from pathlib import Path

import pytest

from kimi_eagle.errors import RunError, UsageError


def lines_of(workdir: Path, key: str = "loss") -> list[dict]:
    """Lines of curves.jsonl that have `key`."""
    from kimi_eagle.training import curves

    return [line for line in curves.read(workdir / "curves.jsonl") if key in line]


@pytest.fixture(scope="module")
def finished(run, recipe_for, tmp_path_factory):
    """One uninterrupted run of two epochs, with which other tests compare."""
    workdir = tmp_path_factory.mktemp("finished")
    progress: list[dict] = []
    return run(recipe_for(), workdir, progress=progress), workdir, progress


def test_learns_and_reports(finished):
    result, workdir, progress = finished
    assert not result.interrupted and result.steps == result.total_steps > 10
    train, val = lines_of(workdir), lines_of(workdir, "val_loss")
    assert [line["step"] for line in train] == list(range(1, result.steps + 1))
    assert [line["epoch"] for line in val] == [0, 1]
    assert train[-1]["loss"] < train[0]["loss"] / 3
    assert val[1]["val_loss"] < val[0]["val_loss"]
    assert all(len(line["accuracy"]) == 3 for line in train)
    assert {"conditional_accuracy", "lr", "tokens_per_s", "step_ms", "data_wait"} <= train[0].keys()
    assert 0 < train[-1]["lr"] < train[3]["lr"] <= 2e-3, "the schedule ends with the run"
    assert [p["step"] for p in progress] == list(range(1, result.steps + 1))
    assert progress[-1]["tokens"] == progress[-1]["total_tokens"] == result.tokens
    # Every line counts its own tokens: the plan must agree with what the steps saw.
    seen = sum(line["tokens_per_s"] * line["step_ms"] / 1000 for line in train)
    assert seen == pytest.approx(result.tokens, rel=0.01)


def test_best_checkpoint_and_tensorboard(finished):
    result, workdir, _ = finished
    best = min(lines_of(workdir, "val_loss"), key=lambda line: line["val_loss"])
    assert result.checkpoint == workdir / "checkpoints" / str(best["epoch"])
    assert (workdir / "checkpoints/checkpoint_best").resolve() == result.checkpoint.resolve()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(workdir / "tensorboard/train"))
    events.Reload()
    logged = [e.value for e in events.Scalars("train/loss")]
    assert logged == pytest.approx([line["loss"] for line in lines_of(workdir)])


def test_equals_speculators_own_command_with_its_file_backend(
    run, recipe_for, corpus, verifier, tmp_path, monkeypatch
):
    """Same rows and seed, once from shards and once from hs_{i}.safetensors by `speculators train`.

    Bit for bit, in float32, with sdpa in both (our own attention differs in the last digits).
    """
    import torch
    from safetensors.torch import save_file

    from kimi_eagle.training.backend import write_view

    recipe = recipe_for(attention="sdpa", epochs=1)
    result = run(recipe, tmp_path / "ours")
    ours = lines_of(tmp_path / "ours")
    write_view(corpus.shards, corpus.order, tmp_path / "view")

    from speculators.train import cli, trainer
    from speculators.train.config import TrainConfig

    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for row, sample_id in enumerate(corpus.order):
        ids, _, states = corpus.states[sample_id]
        ids = torch.from_numpy(ids).long()
        save_file({"hidden_states": states, "token_ids": ids}, hidden / f"hs_{row}.safetensors")
    # What ShardTrainer overrides; patches.py is still in place from our own run.
    original = trainer.Trainer.setup_trainer

    def on_cpu(self):
        self.local_rank, self.device_type = torch.device("cpu"), "cpu"
        original(self)

    monkeypatch.setattr(trainer.Trainer, "setup_trainer", on_cpu)
    monkeypatch.setattr(cli, "setup_root_logger", lambda: None)
    caught: list[dict] = []
    handler = logging.Handler()
    handler.emit = lambda record: caught.append(record.msg) if "train" in record.msg else None
    monkeypatch.setattr(
        cli,
        "setup_metric_logger",
        lambda **_: logging.getLogger("speculators.metrics").addHandler(handler),
    )
    section = recipe.train
    arguments = {
        "verifier-name-or-path": verifier.path,
        "data-path": tmp_path / "view",
        "hidden-states-path": hidden,
        "save-path": tmp_path / "theirs",
        "d2t-path": corpus.d2t,
        "t2d-path": corpus.t2d,
        "draft-vocab-size": recipe.vocab.draft_vocab_size,
        "target-layer-ids": "2 15 27",
        "full-attention-indices": 0,
        "draft-attn-impl": "sdpa",
        "loss-implementation": "eager",
        "hidden-states-dtype": "float32",
        "total-seq-len": section.seq_len,
        "train-data-ratio": 1 - section.validation_share,
        "num-workers": 0,
        "optimizer": "muon",
        "lr": section.lr,
        "epochs": 1,
        "ttt-steps": section.ttt_steps,
        "scheduler-type": "cosine",
        "scheduler-warmup-ratio": section.warmup_ratio,
        "scheduler-total-steps": result.total_steps,
        "mask-token-id": 0,
        "on-missing": "raise",
        "seed": 0,
    }
    argv = [part for k, v in arguments.items() for part in (f"--{k}", *str(v).split())]
    try:
        cli.main(TrainConfig.resolve([*argv, "--norm-before-residual"]))
    finally:
        logging.getLogger("speculators.metrics").removeHandler(handler)

    assert len(ours) >= 6
    assert [m["train"]["loss"] for m in caught] == [line["loss"] for line in ours]
    for message, line in zip(caught, ours, strict=True):
        theirs = [message["train"][f"full_acc_{i}"] for i in range(3)]
        assert theirs == pytest.approx(line["accuracy"], abs=1e-6)


def test_own_attention_trains_alike(finished, run, recipe_for, tmp_path):
    run(recipe_for(attention="sdpa", max_steps=6, scheduler="none"), tmp_path / "sdpa")
    run(recipe_for(max_steps=6, scheduler="none"), tmp_path / "own")
    want, got = ([line["loss"] for line in lines_of(tmp_path / d)] for d in ("sdpa", "own"))
    assert got == pytest.approx(want, rel=2e-3)


def test_stopped_and_resumed_equals_uninterrupted(
    finished, run, recipe_for, same_weights, tmp_path
):
    whole, whole_dir, _ = finished
    for stop_at in (4, 9, 17):  # twice within the first epoch
        part = run(recipe_for(), tmp_path, stop_at=stop_at)
        assert part.interrupted and part.steps == stop_at
        assert part.tokens < whole.tokens
        assert part.checkpoint is not None
    last = run(recipe_for(), tmp_path)
    assert not last.interrupted and (last.steps, last.tokens) == (whole.steps, whole.tokens)
    again, once = lines_of(tmp_path), lines_of(whole_dir)
    for key in ("loss", "accuracy", "lr", "grad_norm"):
        assert [line[key] for line in again] == [line[key] for line in once]
    assert lines_of(tmp_path, "val_loss") == lines_of(whole_dir, "val_loss")
    for epoch in ("0", "1"):
        assert same_weights(*(d / "checkpoints" / epoch for d in (tmp_path, whole_dir)))


def test_a_finished_run_does_nothing_more(finished, run, recipe_for):
    whole, workdir, _ = finished
    before = (workdir / "curves.jsonl").read_bytes()
    result = run(recipe_for(), workdir)
    assert (result.checkpoint, result.steps) == (whole.checkpoint, whole.steps)
    assert (workdir / "curves.jsonl").read_bytes() == before


def test_torn_checkpoint_is_skipped_and_the_run_finishes(
    finished, run, recipe_for, tmp_path, caplog
):
    whole, workdir, _ = finished
    shutil.copytree(workdir, tmp_path, symlinks=True, dirs_exist_ok=True)
    want = [line["loss"] for line in lines_of(tmp_path)]
    (tmp_path / "checkpoints/1/optimizer_state_dict.pt").write_bytes(b"half")
    result = run(recipe_for(), tmp_path)
    assert "checkpoint 1 skipped" in caplog.text
    assert result.steps == whole.steps and not result.interrupted
    assert [line["loss"] for line in lines_of(tmp_path)] == want


def test_killed_before_validation_is_validated_after(finished, run, recipe_for, tmp_path):
    _, workdir, _ = finished
    shutil.copytree(workdir, tmp_path, symlinks=True, dirs_exist_ok=True)
    want, best = lines_of(tmp_path, "val_loss"), tmp_path / "checkpoints/checkpoint_best"
    target = best.readlink()
    (tmp_path / "checkpoints/1/val_metrics.json").unlink()
    best.unlink()
    run(recipe_for(), tmp_path)
    assert lines_of(tmp_path, "val_loss")[-1] == want[-1]
    assert best.readlink() == target
    assert lines_of(tmp_path, "val_loss") == want, "the line that was there is not repeated"


def test_max_steps_is_a_total(run, recipe_for, tmp_path):
    result = run(recipe_for(epochs=3, max_steps=5), tmp_path)
    assert result.steps == result.total_steps == 5 and not result.interrupted
    assert len(lines_of(tmp_path)) == 5 and len(lines_of(tmp_path, "val_loss")) == 1
    again = run(recipe_for(epochs=3, max_steps=5), tmp_path)
    assert again.steps == 5 and len(lines_of(tmp_path)) == 5


def test_checkpoints_within_an_epoch(run, recipe_for, tmp_path):
    run(recipe_for(epochs=1, checkpoints_per_epoch=3), tmp_path, stop_at=8)
    state = json.loads((tmp_path / "checkpoints/0/training_state.json").read_text())
    samples = state.pop("samples")
    assert state == {"epoch": 0, "local_step": 8, "global_step": 8, "lanes": 1}
    assert 8 <= samples <= 24, "at least one a step"
    # As two ranks would have left it: fewer steps, the same samples. They are not read again.
    state |= {"local_step": 4, "global_step": 4, "samples": samples, "lanes": 2}
    (tmp_path / "checkpoints/0/training_state.json").write_text(json.dumps(state))
    last = run(recipe_for(epochs=1, checkpoints_per_epoch=3), tmp_path)
    assert last.steps == last.total_steps, "those of one rank that are left, after the four"
    (rate,) = (line["lr"] for line in lines_of(tmp_path) if line["step"] == last.steps)
    assert 0 < rate < 1e-3, "the schedule ends with the run"


def test_bfloat16_and_adamw(run, recipe_for, tmp_path):
    import torch

    recipe = recipe_for(dtype="bfloat16", optimizer="adamw", scheduler="linear", max_steps=8)
    result = run(recipe, tmp_path)
    losses = [line["loss"] for line in lines_of(tmp_path)]
    assert losses[-1] < losses[0]
    from safetensors.torch import load_file

    kept = load_file(result.checkpoint / "model.safetensors")
    assert kept["fc.weight"].dtype == torch.float32, "master weights"
    assert "embed_tokens.weight" not in kept


def test_diverging_run_stops(run, recipe_for, corpus, tmp_path):
    """The first step is good, and so is its checkpoint; the next is named with its samples."""
    recipe = recipe_for(optimizer="adamw", lr=1e30, scheduler="none")
    assert run(recipe, tmp_path, stop_at=1).interrupted
    with pytest.raises(RunError, match="(the loss|norm) is (nan|inf) at step [23];") as caught:
        run(recipe, tmp_path)
    where = str(caught.value.where)
    assert where.startswith("epoch 0, samples ")
    named = where.removeprefix("epoch 0, samples ").split(", ")
    assert named and set(named) <= set(corpus.order)
    state = json.loads((tmp_path / "checkpoints/0/training_state.json").read_text())
    assert state["global_step"] == 1, "no checkpoint of such weights"


def test_a_gradient_that_is_not_finite_stops(run, recipe_for, tmp_path, monkeypatch):
    """Where the loss is a number all the same."""
    import torch

    clip = torch.nn.utils.clip_grad_norm_

    def broken(parameters, most):
        parameters = list(parameters)
        next(p for p in parameters if p.grad is not None).grad.view(-1)[0] = float("inf")
        return clip(parameters, most)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", broken)
    with pytest.raises(RunError, match="the gradient's norm is inf at step 1;"):
        run(recipe_for(), tmp_path)


def test_the_last_and_the_best_checkpoints_stay(run, recipe_for, tmp_path):
    from kimi_eagle.training import checkpoints

    root = tmp_path / "checkpoints"
    run(recipe_for(epochs=3, max_steps=12, keep_checkpoints=1), tmp_path)
    assert checkpoints.epochs(root) == [1] and checkpoints.best(root).name == "1"


@pytest.mark.parametrize(
    ("train", "word"),
    [
        ({"attention": "simple_flex_attention"}, "train.attention"),
        ({"loss": "no_such"}, "train.loss"),
        ({"device": "cuda"}, "train.device"),
    ],
)
def test_what_cannot_be_is_refused(run, recipe_for, tmp_path, train, word):
    import torch

    if train.get("device") and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UsageError, match=word):
        run(recipe_for(**train), tmp_path)


def test_killed_at_any_moment_and_quiet(finished, recipe_for, in_a_process, tmp_path):
    """SIGKILL twice in a process of its own, then to the end: as if nothing had happened."""
    whole, whole_dir, _ = finished
    recipe = recipe_for(checkpoints_per_epoch=4)
    for step in (5, 12):
        assert in_a_process(recipe, tmp_path, kill_at=step).returncode == -signal.SIGKILL
    last = in_a_process(recipe, tmp_path)
    assert last.returncode == 0, last.stderr[-2000:]
    assert last.stdout == "", "nothing on stdout when it is no terminal"
    assert f"finished {whole.steps}" in last.stderr
    losses = [[line["loss"] for line in lines_of(d)] for d in (tmp_path, whole_dir)]
    assert losses[0] == losses[1]
