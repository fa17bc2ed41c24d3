"""What a person sees while stages run and when they are done: bars, lines, the table at the end.

On a terminal rich draws bars; elsewhere (a log file, CI) one plain line a stage every few seconds,
so that nothing is lost and nothing is repeated a thousand times.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from kimi_eagle.survey import StageState, StageView, rate_and_eta

if TYPE_CHECKING:
    from kimi_eagle.slurm.status import Look

PLAIN_SECONDS = 10


def describe(view: StageView) -> str:
    """`3/8 units  214 tok/s  ETA 1:12` as far as it is known."""
    parts = [f"{view.done}/{view.units} units"] if view.units else []
    if len(view.workers) > 1 and view.running:
        parts.append(f"{view.running} running")
    if view.failed:
        parts.append(f"{view.failed} failed")
    if view.damaged:
        parts.append(f"{view.damaged} damaged")
    if view.rejected:
        parts.append(f"{view.rejected:,} samples rejected")
    if view.left and view.units > 1:
        parts.append(f"{view.left} left")
    rate, eta = rate_and_eta(view)
    phases = {w["phase"] for w in view.workers}
    if phases and phases <= {"start", "load"}:
        parts.append("loading" if "load" in phases else "starting")
    elif rate:
        parts.append(f"{rate:,.0f} tok/s")
    if eta is not None and "work" in phases:
        parts.append(f"ETA {clock(eta)}")
    for worker in view.workers[:1]:
        notes = worker.get("notes", {})
        if "step" in notes:
            parts.append(f"step {notes['step']}/{notes['total_steps']}")
        if "loss" in notes:
            parts.append(f"loss {notes['loss']:.3f}")
        if "estimated_acceptance" in notes:
            parts.append(f"acceptance {notes['estimated_acceptance']:.2f} estimated")
        if "plan" in notes:
            parts.append(f"({notes['plan']})")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """`1:12`, or `3:01:12` from an hour on."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def status_lines(look: Look) -> list[str]:
    """What `status` prints of a run: its state, one line a stage, one a job that lives."""
    why = f"  {look.why}" if look.why else ""
    lines = [f"{look.run.path}  {look.state}{why}"]
    if look.slurm not in ("ok", "none"):
        lines.append(f"  Slurm: {look.slurm}")
    if look.held:
        lines.append(f"  held: {look.held}")
    if look.image:
        lines.append(f"  image {look.image['name']}  sha256:{look.image['sha256'][:12]}")
    for stage, view in zip(look.stages, look.views, strict=True):
        parts = [f"{stage['name']:<10} {stage['state']:<8}", describe(view)]
        if stage["gpu_hours"]:
            parts.append(f"{stage['gpu_hours']:,.2f} GPU h")
        unsure = [w for w in view.workers if not w["sure"]]
        if unsure:
            parts.append(f"(not sure that the worker on {unsure[0]['host']} lives: --watch tells)")
        parts.append(stage["why"])
        if view.error and view.error not in stage["why"]:
            parts.append(view.error)
        lines.append("  " + "  ".join(p for p in parts if p))
    lines += _job_lines(look.jobs)
    if used := look.use.get("all"):
        lines.append(
            f"  used {used['gpu_hours']:,.2f} GPU h in {used['starts']:.0f} starts, "
            f"{clock(used['wall_s'])} wall, {clock(used['waiting_s'])} in the queue (all jobs)"
        )
    for entry in look.accepted:
        lines.append(f"  accepted {entry['stage']}: {entry['share']:g} lost ({entry['reason']})")
    if look.result:
        lines.append(f"  acceptance length {look.result['acceptance_length']:.2f}")
    return [printable(line) for line in lines]


ENDED_SHOWN = 8


def _job_lines(jobs: list[dict[str, Any]]) -> list[str]:
    """Jobs that run one by one; those that wait or ended alike, such as array tasks, together.

    Of jobs that ended only the last few: a run that was submitted ten times has many.
    """
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for i, job in enumerate(jobs):
        alone = str(i) if job["stage"] and job["live"] else ""
        same_words = job["reason"] or job["words"]
        alike.setdefault((job["suffix"], job["state"], same_words, alone), []).append(job)
    ended = [key for key in alike if key[1] in ("ENDED", "WITHDRAWN")]
    lines = [f"{len(ended) - ENDED_SHOWN} older: see --json"] if len(ended) > ENDED_SHOWN else []
    for key, same in alike.items():
        if key in ended[:-ENDED_SHOWN]:
            continue
        job, state, words, many = same[0], key[1], same[0]["words"], ""
        if len(same) > 1:
            many = f" and {len(same) - 1} more"
            if job["id"]:  # a command for one task: Slurm takes the whole array too
                words = words.replace(job["id"], job["id"].partition("_")[0])
        parts = [f"job {job['id'] or job['name']}{many}"]
        parts += [job["name"].rpartition("-")[0]] if job["id"] else []
        parts.append(state)
        if job["live"] and job["node"]:
            parts.append(job["node"])
        if job["live"] and job["stage"]:
            share = f" {job['fraction']:.0%}" if job["unit"] and job["fraction"] else ""
            parts.append(f"{job['stage']} {job['unit'] or ''}{share}".strip())
        lines.append("  ".join(p for p in [*parts, words] if p))
    return [f"  {line}" for line in lines]


def printable(text: str) -> str:
    """One line for any terminal: control characters of a path or a reason are shown as escapes."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return shown.encode("utf-8", "backslashreplace").decode()


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
    warnings = [f"warning: {row['stage']}: {row['warning']}" for row in rows if "warning" in row]
    if warnings:
        shown.caption, shown.caption_justify = Text("\n".join(warnings)), "left"
    return shown
