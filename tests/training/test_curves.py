"""Curves: one line a step in curves.jsonl and TensorBoard alike, however often a run was left."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest


def train_message(step: int, value: float) -> dict:
    """What the Trainer logs of optimizer step `step`, counted from 0."""
    return {
        "train": {"loss": value, "full_acc_0": 0.5, "full_acc_1": 0.25, "cond_acc_0": 0.5},
        "profile": {"step_ms": 200.0, "queue_ms": 1.0, "tokens_per_s": 1000.0},
        "grad_norm": value / 10,
        "epoch": 0,
        "lr": {"Muon": 0.02, "AdamW": 0.01},
        "global_step": step,
    }


def log(message: dict, step: int) -> None:
    logging.getLogger("speculators.metrics").info(message, extra={"step": step})


def validate(epoch: int, step: int, loss: float, folder: Path | None) -> None:
    """Log a validation with its estimate; `folder`: the checkpoint that keeps it."""
    from kimi_eagle.training import curves

    found = {"k": 2, "length": 1 + loss, "rates": [0.5, 0.25]}
    log({"val": {"loss_epoch": loss}, "epoch": epoch}, step)
    curves.log_estimate(found, epoch, step)
    if folder:
        folder.mkdir(parents=True)
        text = json.dumps({"loss_epoch": loss, "estimated_acceptance": found})
        (folder / "val_metrics.json").write_text(text)


def board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "train"))
    events.Reload()
    return {
        tag: [(e.step, round(e.value, 4)) for e in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_lines_have_what_a_person_asks_for(tmp_path):
    from kimi_eagle.training import curves

    curves.start(tmp_path / "curves.jsonl", tmp_path / "tb")
    log(train_message(0, 3.0), 0)
    validate(0, 1, 0.5, None)
    curves.stop()
    train, val, estimate = curves.read(tmp_path / "curves.jsonl")
    assert train == {
        "step": 1,
        "epoch": 0,
        "loss": 3.0,
        "accuracy": [0.5, 0.25],
        "conditional_accuracy": [0.5],
        "lr": 0.02,
        "grad_norm": 0.3,
        "tokens_per_s": 1000.0,
        "step_ms": 200.0,
        "data_wait": 0.005,
    }
    assert (val["step"], val["val_loss"]) == (1, 0.5)
    assert estimate == {
        "step": 1,
        "epoch": 0,
        "estimated_acceptance": 1.5,
        "estimated_rates": [0.5, 0.25],
    }
    assert board(tmp_path / "tb")["grad_norm"] == [(0, 0.3)]


def test_the_report_reads_an_estimate_with_its_validation(tmp_path):
    from kimi_eagle.report import curves as told
    from kimi_eagle.training import curves

    curves.start(tmp_path / "curves.jsonl", tmp_path / "tb")
    log(train_message(0, 3.0), 0)
    validate(0, 1, 0.5, None)
    log({"val": {"loss_epoch": 0.25}, "epoch": 1}, 2)  # one without an estimate
    curves.stop()
    training, validation = told.read(tmp_path / "curves.jsonl")
    assert [line["step"] for line in training] == [1]
    assert [line.get("estimated_acceptance") for line in validation] == [1.5, None]
    assert (validation[0]["val_loss"], validation[0]["estimated_rates"]) == (0.5, [0.5, 0.25])


@pytest.mark.parametrize("validated", [True, False], ids=["after", "before"])
def test_left_and_resumed_at_the_end_of_an_epoch_is_as_in_one_go(tmp_path, validated):
    """Killed after (or before) the validation was kept, two steps into what is done again."""
    from kimi_eagle.training import curves

    def steps(first: int, last: int, wrong: float = 0.0) -> None:
        for step in range(first, last):
            log(train_message(step, 5.0 - step + wrong), step)

    once, twice = tmp_path / "once", tmp_path / "twice"
    for folder in (once, twice):
        folder.mkdir()
        curves.start(folder / "curves.jsonl", folder / "tb")
        steps(0, 3)
        validate(0, 3, 0.5, folder / "0" if folder == once or validated else None)
        if folder == once:
            steps(3, 6)
            validate(1, 6, 0.25, folder / "1")
        else:
            steps(3, 5, wrong=1.0)
        curves.stop()
    (twice / "0").mkdir(exist_ok=True)
    with open(twice / "curves.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    curves.start(twice / "curves.jsonl", twice / "tb", 3, twice / "0")
    if not validated:
        validate(0, 3, 0.5, None)
    steps(3, 6)
    validate(1, 6, 0.25, twice / "1")
    curves.stop()

    assert curves.read(twice / "curves.jsonl") == curves.read(once / "curves.jsonl")
    assert board(twice / "tb") == board(once / "tb")
    assert board(once / "tb")["estimate/length"] == [(3, 1.5), (6, 1.25)]


def test_a_fresh_start_drops_all_that_was_before(tmp_path):
    from kimi_eagle.training import curves

    for value in (9.0, 5.0):
        curves.start(tmp_path / "curves.jsonl", tmp_path / "tb")
        log(train_message(0, value), 0)
        curves.stop()
    assert [x["loss"] for x in curves.read(tmp_path / "curves.jsonl")] == [5.0]
    assert board(tmp_path / "tb")["train/loss"] == [(0, 5.0)]
