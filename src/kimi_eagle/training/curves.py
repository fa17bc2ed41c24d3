"""The metrics of a training run: one JSON line a logged step, beside speculators' TensorBoard log.

Listens on speculators' own metric logger (`speculators.metrics`, 0.9.0) and writes
`curves.jsonl`. Training lines: step (optimizer steps done), epoch, loss, accuracy (by draft
step: share of tokens where this and all earlier draft steps were right, which is what vLLM
calls acceptance per position), conditional_accuracy, lr, grad_norm (before clipping), tokens_per_s,
step_ms, data_wait (share of the step spent waiting for data). Validation lines: step, epoch and the
same names with `val_`; after each a line with step, epoch, estimated_acceptance (tokens that a step
of a server will give, by `estimate.py`) and estimated_rates (by drafted position). Lines are
flushed one by one; a torn last line is dropped on resume, and so is what is done again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speculators.train.logger import TensorBoardHandler, setup_metric_logger

from kimi_eagle import files
from kimi_eagle.training.checkpoints import METRICS

METRICS_LOGGER = "speculators.metrics"


class CurvesHandler(logging.Handler):
    """Writes curves.jsonl; `last` is the newest training line, or None."""

    def __init__(self, path: Path):
        super().__init__()
        self.last: dict[str, Any] | None = None
        self._file = open(path, "a", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        """Turn one metrics record into a line; other records are not ours."""
        if not isinstance(record.msg, Mapping):
            return
        if "train" in record.msg:
            line = self.last = train_line(record.msg)
        elif "val" in record.msg:
            line = val_line(record.msg, getattr(record, "step", 0))
        elif "estimate" in record.msg:
            line = estimate_line(record.msg, getattr(record, "step", 0))
        else:
            return
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; further records are lost."""
        self._file.close()
        super().close()


def train_line(message: Mapping[str, Any]) -> dict[str, Any]:
    """The line of one training record of speculators' Trainer."""
    metrics, profile = message["train"], message.get("profile") or {}
    lr = message["lr"]
    step_ms = profile.get("step_ms", 0.0)
    return {
        "step": message["global_step"] + 1,
        "epoch": message["epoch"],
        "loss": metrics["loss"],
        "accuracy": _by_draft_step(metrics, "full_acc_{}"),
        "conditional_accuracy": _by_draft_step(metrics, "cond_acc_{}"),
        # With Muon there are two rates; the matrices' one is the run's.
        "lr": next(iter(lr.values())) if isinstance(lr, Mapping) else lr,
        **({"grad_norm": round(message["grad_norm"], 6)} if "grad_norm" in message else {}),
        "tokens_per_s": round(profile.get("tokens_per_s", 0.0), 1),
        "step_ms": round(step_ms, 1),
        "data_wait": round(profile["queue_ms"] / step_ms, 4) if step_ms else 0.0,
    }


def val_line(message: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The line of one validation record; `step` counts optimizer steps done."""
    metrics = message["val"]
    return {
        "step": step,
        "epoch": message["epoch"],
        "val_loss": metrics.get("loss_epoch"),
        "val_accuracy": _by_draft_step(metrics, "full_acc_{}_epoch"),
        "val_conditional_accuracy": _by_draft_step(metrics, "cond_acc_{}_epoch"),
    }


def estimate_line(message: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The line of an estimate that `log_estimate` gave out."""
    found = message["estimate"]
    return {
        "step": step,
        "epoch": message["epoch"],
        "estimated_acceptance": found["length"],
        "estimated_rates": [v for name, v in found.items() if name.startswith("rate_")],
    }


def log_estimate(found: Mapping[str, Any], epoch: int, step: int) -> None:
    """Give an estimate (`estimate.Tally.result`) out as the Trainer does its own metrics."""
    rates = {f"rate_{i}": rate for i, rate in enumerate(found["rates"])}
    message = {"estimate": {"length": found["length"], **rates}, "epoch": epoch}
    logging.getLogger(METRICS_LOGGER).info(message, extra={"step": step})


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a curves file; none where there is no file."""
    lines = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
    return lines


def rewind(path: Path, step: int, *, validated: bool = True) -> None:
    """Drop what was logged after `step` steps, and the validation there if it is yet to come: the
    run is about to do it again."""
    last = [line for line in read(path) if line["step"] <= step]
    kept = [x for x in last if validated or x["step"] < step or "loss" in x]
    files.write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))


def start(
    path: Path, tensorboard: Path, step: int = 0, checkpoint: Path | None = None
) -> CurvesHandler:
    """Log to `path` and, through speculators' own handler, to the TensorBoard folder.

    Both go on after `step` steps, at which the run was left with `checkpoint`. TensorBoard takes
    back all that lies at or after a step, so that the checkpoint's own validation is told again.
    """
    done = files.read_json(checkpoint / METRICS) if checkpoint else None
    rewind(path, step, validated=isinstance(done, dict))
    setup_metric_logger(loggers="", run_name="", output_dir="")
    metrics = logging.getLogger(METRICS_LOGGER)
    board = TensorBoardHandler(run_name="train", log_dir=tensorboard, purge_step=step)
    metrics.addHandler(board)
    if isinstance(done, dict):
        found, epoch = done.pop("estimated_acceptance", None), int(checkpoint.name)
        metrics.info({"val": done, "epoch": epoch}, extra={"step": step})
        if found:
            log_estimate(found, epoch, step)
    handler = CurvesHandler(path)
    metrics.addHandler(handler)
    return handler


def stop() -> None:
    """Flush and take away all handlers of the metric logger."""
    metrics = logging.getLogger(METRICS_LOGGER)
    for handler in list(metrics.handlers):
        metrics.removeHandler(handler)
        handler.close()


def _by_draft_step(metrics: Mapping[str, Any], name: str) -> list[float]:
    values = []
    while (key := name.format(len(values))) in metrics:
        values.append(round(float(metrics[key]), 6))
    return values
