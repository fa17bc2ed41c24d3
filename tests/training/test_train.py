"""Whole training runs on real hidden states: as speculators, stopped, killed, resumed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kimi_eagle.errors import RunError, UsageError

CHILD = """
import json, sys
from pathlib import Path
from kimi_eagle.recipe import Recipe
from kimi_eagle.shards import ShardSet
from kimi_eagle.training.loop import train
from kimi_eagle.verifier import open_verifier
job = json.loads(Path(sys.argv[1]).read_text())
recipe = Recipe.model_validate(job["recipe"], strict=False)
result = train(recipe, open_verifier(recipe.verifier.path), ShardSet(job["shards"]),
    Path(job["d2t"]), Path(job["t2d"]), Path(job["workdir"]),
    should_stop=lambda: False, on_progress=lambda d: print(d["step"], file=sys.stderr, flush=True))
print("finished", result.steps, file=sys.stderr, flush=True)
"""


def lines_of(workdir: Path, key: str = "loss") -> list[dict]:
    """Lines of curves.jsonl that have `key`."""
    from kimi_eagle.training import curves

    return [line for line in curves.read(workdir / "curves.jsonl") if key in line]


def same_weights(one: Path, other: Path) -> bool:
    import torch
    from safetensors.torch import load_file

    a, b = (load_file(p / "model.safetensors") for p in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


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


def test_stopped_and_resumed_equals_uninterrupted(finished, run, recipe_for, tmp_path):
    whole, whole_dir, _ = finished
    for stop_at in (4, 9):  # twice within the first epoch
        part = run(recipe_for(), tmp_path, stop_at=stop_at)
        assert part.interrupted and part.steps == stop_at
        assert part.tokens < whole.tokens
        assert part.checkpoint is not None
    last = run(recipe_for(), tmp_path)
    assert not last.interrupted and (last.steps, last.tokens) == (whole.steps, whole.tokens)
    again, once = lines_of(tmp_path), lines_of(whole_dir)
    assert [line["loss"] for line in again] == [line["loss"] for line in once]
    assert same_weights(last.checkpoint, whole.checkpoint)


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
    assert len(lines_of(tmp_path, "val_loss")) == len(want) + 1


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
    assert state == {"epoch": 0, "local_step": 8, "global_step": 8}
    assert 8 <= samples <= 24, "at least one a step"
    # As two ranks would have left it: fewer steps, the same samples. They are not read again.
    state |= {"local_step": 4, "samples": samples}
    (tmp_path / "checkpoints/0/training_state.json").write_text(json.dumps(state))
    last = run(recipe_for(epochs=1, checkpoints_per_epoch=3), tmp_path)
    assert last.steps == last.total_steps > 8


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


def test_diverging_run_stops(run, recipe_for, tmp_path):
    with pytest.raises(RunError, match="the loss is nan|the loss is inf"):
        run(recipe_for(optimizer="adamw", lr=1e30, scheduler="none"), tmp_path)


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


def test_killed_at_any_moment_and_quiet(finished, recipe_for, corpus, tmp_path):
    """SIGKILL twice in a process of its own, then to the end: as if nothing had happened."""
    whole, whole_dir, _ = finished
    recipe = recipe_for(checkpoints_per_epoch=4)
    job = {
        "recipe": recipe.model_dump(mode="json"),
        "shards": [str(p) for p in corpus.shards],
        "d2t": str(corpus.d2t),
        "t2d": str(corpus.t2d),
        "workdir": str(tmp_path / "work"),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))

    def child(kill_at: int | None) -> subprocess.CompletedProcess[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path / "job.json")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        said = []
        for line in process.stderr:
            said.append(line)
            if kill_at is not None and line.strip() == str(kill_at):
                time.sleep(0.02)
                process.send_signal(signal.SIGKILL)
        out = process.stdout.read()
        return subprocess.CompletedProcess([], process.wait(), out, "".join(said))

    assert child(kill_at=5).returncode == -signal.SIGKILL
    assert child(kill_at=12).returncode == -signal.SIGKILL
    last = child(kill_at=None)
    assert last.returncode == 0, last.stderr[-2000:]
    assert last.stdout == "", "nothing on stdout when it is no terminal"
    assert f"finished {whole.steps}" in last.stderr
    losses = [[line["loss"] for line in lines_of(d)] for d in (tmp_path / "work", whole_dir)]
    assert losses[0] == losses[1]
