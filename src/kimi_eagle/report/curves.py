"""Training curves for the report: curves.jsonl read and thinned. The training room writes it.

Reads one JSON object a line: training lines (step, loss, accuracy by draft token), validation lines
(step, val_loss, val_accuracy) and, after each of these, the acceptance estimated then. Kept apart
from training.curves, which imports speculators.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kimi_eagle import files

POINTS = 80
"""Points of a training curve at most; each is the mean of equally many logged steps."""


def read(path: Path | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training lines, validation lines) of the file; a torn line is left out.

    Each training line has step, loss and accuracy (a list, maybe empty); each validation line has
    step and val_loss, and estimated_acceptance and estimated_rates where they were estimated.
    """
    training: list[dict[str, Any]] = []
    validation: list[dict[str, Any]] = []
    for line in files.json_lines(path) if path and path.is_file() else ():
        if "step" not in line:
            continue
        if "val_loss" in line:
            validation.append(line)
        elif "loss" in line:
            training.append({"accuracy": [], **line})
        elif "estimated_acceptance" in line and validation:
            if validation[-1]["step"] == line["step"]:
                validation[-1] = {**validation[-1], **line}
    return training, validation


def _bin_size(count: int) -> int:
    return max(1, -(-count // POINTS))


def bins(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of equally many neighbouring (x, y) points, `POINTS` of them at most."""
    size = _bin_size(len(points))
    found = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        found.append(tuple(sum(p[i] for p in part) / len(part) for i in (0, 1)))
    return found


def bin_note(training: Sequence[Any]) -> str:
    """What a point of the curve stands for, in words."""
    size = _bin_size(len(training))
    return f"Training: means of {size} logged steps" if size > 1 else "Training: every logged step"
