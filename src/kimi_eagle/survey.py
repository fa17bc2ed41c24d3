"""How far a run is.

`survey` is exact: it plans every stage under the recipe as it is (needs the tokenizer, a few
seconds). `view` is quick: it believes the plan that the stage's last worker wrote and adds
heartbeats, for status and progress bars (no torch, no tokenizer).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kimi_eagle import files, liveness
from kimi_eagle.ledger import Ledger, Record, Unit
from kimi_eagle.recipe import STAGES
from kimi_eagle.rundir import RunDir, StageDir
from kimi_eagle.stages import UPSTREAM
from kimi_eagle.stages.context import Context, GateShut, Waiting


@dataclass
class StageState:
    """A stage under the current recipe. state: done, open, waiting, failed or skipped."""

    name: str
    state: str
    units: list[Unit] = field(default_factory=list)
    open_units: list[Unit] = field(default_factory=list)
    reason: str = ""


def survey(ctx: Context) -> list[StageState]:
    """The state of all six stages, upstream first."""
    states: dict[str, StageState] = {}
    for name in STAGES:
        waits = [u for u in UPSTREAM[name] if states[u].state not in ("done", "skipped")]
        if waits:
            states[name] = StageState(name, "waiting", reason=f"waits for {', '.join(waits)}")
            continue
        try:
            units = ctx.plan(name)
        except Waiting as e:
            states[name] = StageState(name, "waiting", reason=e.line())
            continue
        except GateShut as e:
            states[name] = StageState(name, "failed", reason=e.line())
            continue
        if not units:
            states[name] = StageState(name, "skipped", reason="nothing to do in this recipe")
            continue
        open_units = ctx.ledger(name).open_units(units)
        state = "open" if open_units else "done"
        states[name] = StageState(name, state, units, open_units)
    return list(states.values())


# -- why ---------------------------------------------------------------------------------------


def explain(ctx: Context) -> list[dict[str, Any]]:
    """For each stage: its state and, for open units, what changed since their last record."""
    found = []
    for state in survey(ctx):
        entry: dict[str, Any] = {
            "stage": state.name,
            "state": state.state,
            "units": len(state.units),
            "open": len(state.open_units),
            "reason": state.reason,
        }
        if state.open_units:
            entry["changes"] = _changes(ctx.ledger(state.name), state.open_units)
        found.append(entry)
    return found


def _changes(ledger: Ledger, units: list[Unit]) -> dict[str, Any]:
    """{never done: n, "engine.dtype: a -> b": n units, ...} over the open units."""
    counted: dict[str, int] = {}
    for unit in units:
        old = ledger.records_of(unit.name)
        if not old:
            tries, aside = ledger.failures(unit), ledger.reason_aside(unit)
            texts = [f"tried, failed: {tries[-1]}" if tries else "never done"]
            if aside == "damaged":
                texts = ["set aside: damaged"]
        else:
            texts = differences(old[0].data["parts"], unit.parts)
        for text in texts:
            counted[text] = counted.get(text, 0) + 1
    return counted


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """`engine.dtype: 'bfloat16' -> 'float32'` for every leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        texts: list[str] = []
        for key in sorted(old.keys() | new.keys()):
            inner = f"{path}.{key}" if path else key
            texts += differences(old.get(key), new.get(key), inner)
        return texts
    return [] if old == new else [f"{path}: {old!r} -> {new!r}"]


# -- quick look --------------------------------------------------------------------------------


@dataclass
class StageView:
    """What can be seen of a stage without planning it. Tokens are the plan's sizes."""

    name: str
    units: int = 0
    done: int = 0
    failed: int = 0
    running: int = 0
    samples: int = 0
    """In all units, by the plan."""
    rejected: int = 0
    """Samples rejected in units that are done."""
    lost: int = 0
    """Samples rejected or in failed units."""
    damaged: int = 0
    """Units among those done that are marked as damaged (`verify`, training)."""
    tokens_total: int = 0
    tokens_done: float = 0.0
    tokens_left: float = 0.0
    tokens_worked: int = 0
    """As the workers counted them, dead ones too: actual lengths, where the plan has limits."""
    workers: list[dict[str, Any]] = field(default_factory=list)
    """The files of live workers, those of other machines until their silence is noticed."""
    error: str | None = None
    planned_by: str = ""
    """Digest of the recipe that the plan was made by."""
    skipped: bool = False
    """The recipe has nothing to do here."""

    @property
    def left(self) -> int:
        return self.units - self.done - self.failed

    @property
    def complete(self) -> bool:
        """Every unit has a record, done or failed."""
        return self.units > 0 and self.left == 0

    @property
    def state(self) -> str:
        if self.skipped:
            return "skipped"
        if self.workers:
            return "running"
        if self.complete:
            return "failed" if self.failed else "done"
        return "stopped" if self.error else ("waiting" if not self.units else "open")


def view(
    run: RunDir,
    name: str,
    watch: liveness.Watch | None = None,
    *,
    every: list[dict[str, Any]] | None = None,
    alive: Callable[[dict[str, Any]], bool | None] | None = None,
) -> StageView:
    """Count records and heartbeats of a stage.

    every: the workers' files, where they were read already. alive: what else can tell whether a
    worker lives, such as Slurm's queue; without it the process table and heartbeats do.
    """
    stage_dir = run.stage(name)
    ledger, seen = Ledger(stage_dir), StageView(name)
    every = all_workers(stage_dir) if every is None else every
    watch = watch or liveness.Watch()
    judge = alive or (lambda w: watch.alive(w["id"], w))
    seen.workers = [w for w in every if judge(w) is not False]
    fractions = {w["unit"]: w["fraction"] for w in seen.workers if w.get("unit")}
    tally = ledger.tally()
    plan = ledger.plan() or {}
    seen.planned_by = plan.get("recipe", "")
    for unit in plan.get("units", ()):
        seen.units += 1
        seen.tokens_total += unit["tokens"]
        samples = unit.get("samples", 1)
        seen.samples += samples
        name = f"{unit['name']}.{unit['key']}"
        if name in tally.failed:
            seen.failed += 1
            seen.lost += samples
        elif name in tally.inodes:
            seen.done += 1
            seen.damaged += name in tally.damaged
            seen.tokens_done += unit["tokens"]
            seen.rejected += tally.rejected.get(name, 0)
        else:
            worked = unit["tokens"] * fractions.get(unit["name"], 0.0)
            seen.running += unit["name"] in fractions
            seen.tokens_done += worked
            seen.tokens_left += unit["tokens"] - worked
    seen.lost += seen.rejected
    if every:
        newest = max(every, key=lambda w: w["started"])
        mine = [w for w in every if w.get("recipe") == newest.get("recipe")]
        seen.tokens_worked = sum(w["tokens"] for w in mine)
        if not seen.workers and not seen.complete:
            dead = (
                None if newest.get("ended") else f"its worker died without a word ({_of(newest)})"
            )
            seen.error = newest.get("error") or dead
    return seen


def _of(worker: dict[str, Any]) -> str:
    job = f"job {worker['job']} on " if worker.get("job") else f"pid {worker['pid']} on "
    return job + worker["host"]


def rate_and_eta(view: StageView) -> tuple[float, float | None]:
    """Tokens per second of the live workers, and seconds left at that rate.

    What is left is known in the plan's sizes; so far `tokens_worked` real tokens were
    `tokens_done` of those (regenerate plans with the longest answers that may come).
    """
    now = time.time()
    rate = sum(w["tokens"] / max(1e-9, now - _work_start(w)) for w in view.workers if w["tokens"])
    share = view.tokens_done / view.tokens_total if view.tokens_total else 0.0
    if view.left == 0 or share <= 0.01:
        return rate, None
    if rate and view.tokens_worked:
        return rate, view.tokens_left / (rate * view.tokens_done / view.tokens_worked)
    started = min((_work_start(w) for w in view.workers), default=now)
    return rate, (now - started) * (1 - share) / share if view.workers else None


def _work_start(worker: dict[str, Any]) -> float:
    waited = sum(v for k, v in worker["phases"].items() if k == "load")
    return worker["started"] + waited


_WORKER_KEYS = {"id", "host", "pid", "started", "phase", "phases", "tokens", "unit", "fraction"}


def all_workers(stage_dir: StageDir) -> list[dict[str, Any]]:
    """The files of all workers of a stage, dead or alive."""
    found = [files.read_json(p) for p in sorted(stage_dir.workers.glob("*.json"))]
    return [w for w in found if isinstance(w, dict) and _WORKER_KEYS <= w.keys()]


def live_workers(stage_dir: StageDir) -> list[dict[str, Any]]:
    """The workers of a stage that live; waits up to 3 beats where only a heartbeat can tell."""
    watch = liveness.Watch()
    while True:
        workers = all_workers(stage_dir)
        verdicts = [(watch.alive(w["id"], w), w) for w in workers]
        if all(alive is not None for alive, _ in verdicts):
            return [w for alive, w in verdicts if alive]
        time.sleep(liveness.BEAT_SECONDS / 2)


def times(records: list[Record]) -> dict[str, float]:
    """Seconds of the workers that made these records: wall, and each phase."""
    total: dict[str, float] = {}
    for worker_id in {r.data["worker"] for r in records}:
        stage_dir = records[0].stage_dir
        worker = files.read_json(stage_dir.workers / f"{worker_id}.json")
        if not worker:
            continue
        end = worker.get("ended") or max(r.data["ended"] for r in records)
        total["wall"] = total.get("wall", 0.0) + end - worker["started"]
        total["peak_gib"] = max(total.get("peak_gib", 0.0), worker.get("peak_gib", 0.0))
        for phase, seconds in worker["phases"].items():
            total[phase] = total.get(phase, 0.0) + seconds
    return total
