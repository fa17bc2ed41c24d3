"""Several runs on one page: what each draft is worth, what it took, and where recipes differ.

Reads what lies in the runs (results.json, locks, records) and plans nothing, so runs of other
images and of recipes that cannot be read any more can stand beside each other. Whether two runs are
the same down to their bytes is another question: `kimi-eagle diff` answers it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from kimi_eagle.files import write_atomic
from kimi_eagle.report import curves
from kimi_eagle.report.acceptance import GAIN, INTERVAL, bar_of, spread
from kimi_eagle.report.page import page
from kimi_eagle.report.run import duration, size
from kimi_eagle.report.shown import MISSING, Place
from kimi_eagle.report.svg import h, ranges
from kimi_eagle.report.tables import figure, plain, quiet, section, table
from kimi_eagle.report.trained import shares

MOST_ROWS = 60
"""Recipe fields shown at most; two recipes that differ in more have little in common."""


@dataclass
class Side:
    """One run; anything may be missing.

    name: as it is told apart, path: where it lies. results, lock: contents of the run's files.
    curves: path of curves.jsonl. fields: the recipe flattened, `train.lr` -> 0.002. bytes, seconds:
    of the files and workers of its newest records. gpu_hours: of its jobs, None for a run without.
    """

    name: str
    path: str = ""
    results: Mapping[str, Any] | None = None
    lock: Mapping[str, Any] = field(default_factory=dict)
    curves: Path | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0
    gpu_hours: float | None = None


def write_comparison(path: Path, sides: Sequence[Side]) -> None:
    """Write the page of `sides` to `path`, whole or not at all."""
    write_atomic(path, render(sides))


def render(sides: Sequence[Side]) -> str:
    """The page as text."""
    places = [Place(side.results, run=str(i)) for i, side in enumerate(sides)]
    body = h(
        "main",
        h("header", h("h1", f"{len(sides)} runs compared"), quiet("EAGLE-3 draft models")),
        *(h("p", text, class_="bad") for text in warnings(places)),
        h("div", _plot(sides, places), class_="figures"),
        _table(sides, places),
        _differences(sides),
    )
    return page(f"{len(sides)} runs compared", body)


def warnings(places: Sequence[Place]) -> list[str]:
    """Why figures of these results cannot be held against each other."""
    measured = [p for p in places if p]

    def differ(*path: str) -> bool:
        values = [p.to(*path).value for p in measured]
        return any(v != values[0] for v in values)

    k, length = differ("k"), differ("details", "max_tokens")
    found = [
        (k, "another number of draft tokens a step (k)"),
        (length, "other answer lengths (max_tokens)"),
        # The digest is over these two as well.
        (differ("workload") and not k and not length, "other prompts"),
        (differ("details", "dtype"), "another dtype"),
        (differ("details", "verifier_id"), "another verifier"),
        (differ("details", "batch_sizes", 0, "batch_size"), "speed at another batch size"),
        (differ("details", "machine") or differ("details", "threads"), "speed on another machine"),
        (differ("details", "engine", "vllm"), "another version of vLLM"),
        (differ("format"), "another format of results, whose figures may mean something else"),
    ]
    return [f"Not measured alike: {what}." for there, what in found if there]


def _plot(sides: Sequence[Side], places: Sequence[Place]) -> Element | None:
    bars = [
        bar
        for i, (side, place) in enumerate(zip(sides, places, strict=True))
        if (bar := bar_of(side.name, place, f"c{i % 6}"))
    ]
    if not bars:
        return None
    note = GAIN + (INTERVAL if any(b.low is not None for b in bars) else "")
    return figure("Acceptance length", note, ranges(bars, "acceptance length", low=1.0))


def _table(sides: Sequence[Side], places: Sequence[Place]) -> Element:
    """One column a run: on a phone a run is as narrow as its figures, and names stay in sight."""
    rows: list[list[Any]] = [
        ["acceptance length", *(p.to("acceptance_length").figure(".3f") for p in places)],
        ["95 % interval", *(spread(p, ".3f", "acceptance_length") for p in places)],
        ["speed-up", *(p.to("details", "speedup").figure(".2f", "×") for p in places)],
        ["tokens/s without", *(p.to("tokens_per_second", "baseline").figure() for p in places)],
        ["tokens/s with", *(p.to("tokens_per_second", "draft").figure() for p in places)],
        ["identical outputs", *(p.to("identical_outputs").word(MISSING) for p in places)],
        ["k", *(p.to("k").figure() for p in places)],
        ["dtype", *(p.to("details", "dtype").word(MISSING) for p in places)],
    ]
    rows += _training(sides)
    rows += [
        ["files", *(size(s.bytes) if s.bytes else MISSING for s in sides)],
        ["worker time", *(duration(s.seconds) if s.seconds else MISSING for s in sides)],
        ["GPU hours", *(MISSING if s.gpu_hours is None else f"{s.gpu_hours:,.2f}" for s in sides)],
        ["image", *(_image(s.lock) for s in sides)],
    ]
    where = table(("", ""), [[s.name, s.path] for s in sides], words=2)
    return section("Side by side", table(("", *(s.name for s in sides)), rows, words=1), where)


def _training(sides: Sequence[Side]) -> list[list[Any]]:
    """Steps, and the last validation, of each run."""
    read = [curves.read(side.curves) for side in sides]
    last = [validation[-1] if validation else {} for _, validation in read]
    steps = [training[-1]["step"] if training else None for training, _ in read]
    return [
        ["training steps", *(f"{n:,}" if isinstance(n, int) else MISSING for n in steps)],
        ["validation loss", *(_plain(v.get("val_loss")) for v in last)],
        ["accuracy, token 1", *(_plain([*shares(v, "val_accuracy"), None][0]) for v in last)],
        ["estimated acceptance", *(_plain(v.get("estimated_acceptance")) for v in last)],
    ]


def _plain(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else MISSING


def _image(lock: Mapping[str, Any]) -> str:
    image = lock.get("image")
    digest = image.get("sha256") if isinstance(image, Mapping) else None
    return f"sha256:{digest[:12]}" if digest else MISSING


def _differences(sides: Sequence[Side]) -> Element:
    names = dict.fromkeys(name for side in sides for name in side.fields)
    rows = []
    for name in names:
        values = [side.fields.get(name) for side in sides]
        if any(v != values[0] for v in values):
            rows.append([name, *(MISSING if v is None else plain(v) for v in values)])
    if not all(side.fields for side in sides):
        note = quiet("A run's lock is missing or knows no recipe.")
    elif not rows:
        note = quiet("None: the recipes are the same.")
    else:
        more = f"; the first {MOST_ROWS} are shown" if len(rows) > MOST_ROWS else ""
        note = quiet(f"{len(rows)} fields differ{more}. kimi-eagle diff compares everything else.")
    titles = ("", *(side.name for side in sides))
    found = table(titles, rows[:MOST_ROWS], words=1) if rows else None
    return section("Differences of the recipes", note, found)
