"""What a person sees while stages run and when they are done: bars, lines, the table at the end.

On a terminal rich draws bars; elsewhere (a log file, CI) one plain line a stage every few seconds,
so that nothing is lost and nothing is repeated a thousand times.
"""

from __future__ import annotations

import time
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from kimi_eagle.survey import StageState, StageView

PLAIN_SECONDS = 10


def rate_and_eta(view: StageView) -> tuple[float, float | None]:
    """Tokens per second of the live workers, and seconds left by the plan's sizes."""
    now = time.time()
    rate = sum(w["tokens"] / max(1e-9, now - _work_start(w)) for w in view.workers if w["tokens"])
    share = view.tokens_done / view.tokens_total if view.tokens_total else 0.0
    started = min((_work_start(w) for w in view.workers), default=now)
    eta = (now - started) * (1 - share) / share if share > 0.01 and view.done < view.units else None
    return rate, eta


def _work_start(worker: dict[str, Any]) -> float:
    waited = sum(v for k, v in worker["phases"].items() if k == "load")
    return worker["started"] + waited


def describe(view: StageView) -> str:
    """`3/8 units  214 tok/s  ETA 1:12` as far as it is known."""
    parts = [f"{view.done}/{view.units} units"] if view.units else []
    rate, eta = rate_and_eta(view)
    phase = view.workers[0]["phase"] if view.workers else ""
    if phase in ("start", "load"):
        parts.append("loading" if phase == "load" else "starting")
    elif rate:
        parts.append(f"{rate:,.0f} tok/s")
    if eta is not None and phase == "work":
        parts.append(f"ETA {int(eta) // 60}:{int(eta) % 60:02d}")
    for worker in view.workers[:1]:
        notes = worker.get("notes", {})
        if "step" in notes:
            parts.append(f"step {notes['step']}/{notes['total_steps']}")
        if "loss" in notes:
            parts.append(f"loss {notes['loss']:.3f}")
    return "  ".join(parts)


class Bars:
    """The watcher that `local.run_stages` calls."""

    def __init__(self, console: Console, *, quiet: bool = False):
        self._console, self._quiet = console, quiet
        self._live = console.is_terminal and not quiet
        self._tasks: dict[str, Any] = {}
        self._said: dict[str, tuple[str, float]] = {}
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[note]}"),
            console=console,
        )

    def __enter__(self) -> Bars:
        if self._live:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._progress.stop()

    def __call__(self, states: list[StageState], view: StageView | None) -> None:
        if self._quiet:
            return
        for state in states:
            if state.state == "done":
                self._show(state.name, 1.0, f"{len(state.units)}/{len(state.units)} units")
        if view is not None:
            share = view.tokens_done / view.tokens_total if view.tokens_total else 0.0
            self._show(view.name, min(share, 0.999), describe(view))

    def _show(self, stage: str, share: float, note: str) -> None:
        if self._live:
            if stage not in self._tasks:
                self._tasks[stage] = self._progress.add_task(stage, total=1.0, note="")
            self._progress.update(self._tasks[stage], completed=share, note=note)
            return
        last, when = self._said.get(stage, ("", 0.0))
        finished = share == 1.0
        if note == last or (not finished and time.monotonic() - when < PLAIN_SECONDS):
            return
        if last.endswith("done") and finished:
            return
        self._said[stage] = (note + (" done" if finished else ""), time.monotonic())
        end = "done" if finished else f"{share:4.0%}"
        self._console.print(f"{stage:<10} {end}  {note}", highlight=False, soft_wrap=True)


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows of `summary.stage_rows`: what was done and where the time went."""
    columns = ("stage", "state", "units", "samples", "tokens", "load s", "work s", "wall s", "GiB")
    shown = Table(show_footer=True, box=box.SIMPLE, padding=(0, 1, 0, 0))
    wall = sum(row.get("wall", 0.0) for row in rows)
    most = max(row.get("peak_gib", 0.0) for row in rows)
    footers = {"stage": "all", "wall s": f"{wall:.1f}", "GiB": f"{most:.1f}"}
    for name in columns:
        side = "left" if name in ("stage", "state") else "right"
        shown.add_column(name, justify=side, footer=footers.get(name, ""), no_wrap=True)
    for row in rows:
        cells = [row["stage"], row["state"], str(row["units"])]
        cells += [f"{row[k]:,}" if row.get(k) else "" for k in ("samples", "tokens")]
        timed = ("load", "work", "wall", "peak_gib")
        cells += [f"{row[k]:.1f}" if row.get(k) else "" for k in timed]
        shown.add_row(*cells)
    return shown
