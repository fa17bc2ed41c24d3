"""The report's training curves, from curves.jsonl: how the draft came about.

Each curve that a run has not logged is left out and named by `missing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from kimi_eagle.report import curves
from kimi_eagle.report.shown import Place
from kimi_eagle.report.svg import Series, lines
from kimi_eagle.report.tables import figure

Lines = Sequence[Mapping[str, Any]]

SMALL = (
    ("Learning rate", "lr", 1.0, "of the matrices, where Muon has two"),
    ("Training speed", "tokens_per_s", 1.0, "tokens a second"),
    ("Waiting for data", "data_wait", 100.0, "percent of a step's time"),
    ("Gradient norm", "grad_norm", 1.0, "before clipping"),
)
"""Small curves: title, name in curves.jsonl, factor, what the axis means."""


def loss(training: Lines, validation: Lines) -> Element | None:
    series = [
        Series("training", curves.bins(_points(training, "loss"))),
        Series("validation", _points(validation, "val_loss"), "s2", dots=True),
    ]
    series = [s for s in series if s.points]
    if not series:
        return None
    return figure("Loss", curves.bin_note(training), lines(series, "step"))


def accuracy(training: Lines, validation: Lines) -> Element | None:
    told = [(t["step"], shares(t, "accuracy")) for t in training if _is_number(t.get("step"))]
    series = []
    for i in range(max((len(found) for _, found in told), default=0)):
        points = [(step, found[i]) for step, found in told if len(found) > i]
        series.append(Series(f"token {i + 1}", curves.bins(points), f"p{min(i, 3)}"))
    tested = [
        (v["step"], found[0])
        for v in validation
        if _is_number(v.get("step")) and (found := shares(v, "val_accuracy"))
    ]
    if tested:
        series.append(Series("1, valid.", tested, "s2", dots=True))
    if not series:
        return None
    note = "Share of draft tokens right, with all before them. " + curves.bin_note(training)
    return figure("Accuracy by draft token", note, lines(series, "step", zero=True))


def shares(line: Mapping[str, Any], name: str) -> list[float]:
    """A line's list of numbers by draft token; empty where it is none."""
    found = line.get(name)
    return found if isinstance(found, list) and all(map(_is_number, found)) else []


def estimate(validation: Lines, results: Place) -> Element | None:
    """Acceptance length as estimated at each validation, beside what was served in the end."""
    points = _points(validation, "estimated_acceptance")
    if not points:
        return None
    served = results.to("acceptance_length").amount
    note = "Tokens a verifier step, told from validation samples without serving"
    if served is not None:
        note += "; dashed: what the benchmark found"
    series = [Series("estimated", points, "s2", dots=True)]
    return figure("Estimated acceptance", note, lines(series, "step", level=served))


def small(training: Lines) -> list[Element]:
    """Learning rate, speed, data wait and gradient norm, those that were logged."""
    found = []
    for title, name, factor, meaning in SMALL:
        points = [(x, factor * y) for x, y in _points(training, name)]
        if points:
            chart = lines(
                [Series(title, curves.bins(points))], "step", zero=True, width=250, height=150
            )
            found.append(figure(title, meaning, chart))
    return found


def missing(training: Lines, validation: Lines) -> list[tuple[str, str]]:
    """(curve, why it is not shown)."""
    if not training:
        return [("Training curves", "no training of this recipe has begun")]
    found: list[tuple[str, Callable[[], bool]]] = [
        ("Validation loss", lambda: not _points(validation, "val_loss")),
        ("Estimated acceptance", lambda: not _points(validation, "estimated_acceptance")),
        *((title, lambda name=name: not _points(training, name)) for title, name, *_ in SMALL),
    ]
    return [(name, "not in this run's curves.jsonl") for name, absent in found if absent()]


def _points(rows: Lines, name: str) -> list[tuple[float, float]]:
    """(step, value) of the lines that have both as numbers; a torn or foreign line has not."""
    return [(r["step"], r[name]) for r in rows if _is_number(r.get("step"), r.get(name))]


def _is_number(*values: Any) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
