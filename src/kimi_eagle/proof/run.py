"""Is everything that the records of a run name still there, and as it was written?

Quick: records, sizes, and of hidden states index, header and probe (a few ms for 100 units). Deep:
every byte, each once, and what is damaged has a name down to the sample. What is damaged gets a
mark that shuts the gate of whoever would read it; `retry` opens marked units again. Nothing else
is changed, so a live worker may go on; its unit is open, not damaged.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.ledger import Ledger, Record, Unit
from kimi_eagle.proof import files
from kimi_eagle.proof.files import Fault
from kimi_eagle.proof.report import Count, Damage, OnBytes, Report, Row, threads_here
from kimi_eagle.recipe import STAGES
from kimi_eagle.rundir import StageDir
from kimi_eagle.stages.context import Context
from kimi_eagle.survey import StageState, survey

if TYPE_CHECKING:
    from kimi_eagle.proof.shards import Wanted

DRAFT = "draft"
"""RUN/draft has a row of its own, after the stages."""
QUICK_THREADS = 16
GROUP, WAITING = 64, 4
"""Threads for small reads; they are used where the first GROUP units took WAITING times as long as
they computed: a shared file system may let each of three reads a unit wait for 1 ms."""


@dataclass
class _Unit:
    """One finished unit on its way through the checks."""

    row: Row
    unit: Unit
    record: Record
    faults: list[Fault] = field(default_factory=list)
    readable: bool = True
    """Whether its bytes can be compared at all."""
    shard: Any = None


def verify(
    ctx: Context,
    *,
    stage: str | None = None,
    deep: bool = False,
    threads: int | None = None,
    on_bytes: OnBytes | None = None,
) -> Report:
    """Check a run, or one stage of it; marks what is damaged.

    threads: files read at once, by default THREADS or the cores that there are. UsageError for a
    stage that is none.
    """
    if stage is not None and stage not in STAGES:
        raise UsageError(f"unknown stage {stage!r}", expected=f"one of {', '.join(STAGES)}")
    report, todo, ctx = Report(str(ctx.run.path), deep), [], _Look.of(ctx)
    with _without_collector():
        states = {s.name: s for s in survey(ctx)}
        for name in STAGES if stage is None else (stage,):
            row, units = _quick(ctx, states[name], report)
            report.rows.append(row)
            todo += units
    if deep:
        _deep(ctx, states, todo, threads or threads_here(), on_bytes)
    for item in todo:
        _conclude(ctx, item, report)
    if stage in (None, "train"):
        report.rows += _draft(ctx, todo, report, deep)
    return report


def draft_faults(ctx: Context, units: list[Unit]) -> list[Fault]:
    """What differs between RUN/draft and the record of train that it was made from."""
    found = []
    for record in ctx.ledger("train").records(units):
        if record.state == "done" and files.draft_is_of(ctx.run, record):
            found += files.draft_faults(ctx.run, record, deep=True)
    return found


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Records of 10,000 units are a million objects which all stay: the garbage collector would
    walk through them again and again (0.25 s of 1.9)."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


class _ReadOnce(Ledger):
    """Records as they were when they were read first."""

    def __init__(self, stage_dir: StageDir):
        super().__init__(stage_dir)
        self._read: dict[tuple[str, str], Record | None] = {}

    def record(self, unit: Unit) -> Record | None:
        place = unit.name, unit.key
        if place not in self._read:
            self._read[place] = super().record(unit)
        return self._read[place]


class _Look(Context):
    """One look at a run in which all is planned and read once, and not anew by every gate: of
    10,000 units that makes 2 s out of 10."""

    @classmethod
    def of(cls, ctx: Context) -> _Look:
        look = cls(ctx.run, ctx.recipe)
        # Whatever was opened already: verifier, template, selection.
        look.__dict__ |= {k: v for k, v in ctx.__dict__.items() if k != "reading"}
        look._ledgers, look._plans, look._gates = {}, {}, {}
        return look

    def ledger(self, stage: str) -> Ledger:
        if stage not in self._ledgers:
            self._ledgers[stage] = _ReadOnce(self.run.stage(stage))
        return self._ledgers[stage]

    def plan(self, stage: str) -> list[Unit]:
        if stage not in self._plans:
            self._plans[stage] = super().plan(stage)
        return self._plans[stage]

    def gate(self, stage: str) -> list[Record]:
        if stage not in self._gates:
            self._gates[stage] = super().gate(stage)
        return self._gates[stage]


# -- quick -----------------------------------------------------------------------------------------


def _quick(ctx: Context, state: StageState, report: Report) -> tuple[Row, list[_Unit]]:
    """Everything that can be said without reading bytes; -> the units that are done."""
    row = Row(state.name, state.state, len(state.units), reason=state.reason)
    ledger, found, known = ctx.ledger(state.name), [], set()
    freed = ledger.freed()
    wanted = _wanted(ctx) if state.name == "extract" and state.units else None
    for unit in state.units:
        try:
            record = ledger.record(unit)
        except RunError as e:
            row.damaged += 1
            report.damage.append(Damage(row.stage, unit.name, unit.key, 0, "", None, e.what))
            continue
        if record is None:
            row.open += 1
            continue
        item = _Unit(row, unit, record)
        item.faults += files.record_faults(record, unit, row.stage)
        if item.faults:
            item.readable = False
        elif record.state == "failed":
            row.failed += 1
            continue
        else:
            known |= {e["name"].split("/")[0] for e in record.data["files"]}
            if record.attempt_name in freed and not os.path.exists(record.path(".safetensors")):
                row.freed += 1
                continue
            row.files += len(record.data["files"])
            row.bytes += sum(e["bytes"] for e in record.data["files"])
        found.append(item)
    _look_at_all([i for i in found if i.readable], wanted)
    if state.units:
        at_work = {p.name for p in ledger.dir.claims.glob("*")}
        keys = {u.key for u in state.open_units}
        row.strays = files.strays(known, ledger.dir.files, at_work, keys)
    marked = {r.attempt_name: mark for r, mark in ledger.damaged(i.record for i in found)}
    for item in found:
        if not report.deep and (mark := marked.get(item.record.attempt_name)):
            said = {f.line() for f in item.faults}
            item.faults += [_fault_of(r) for r in mark["reasons"] if r not in said]
    return row, found


def _wanted(ctx: Context) -> Wanted:
    from kimi_eagle.proof.shards import Wanted

    return Wanted.of(ctx)


def _look_at_all(items: list[_Unit], wanted: Wanted | None) -> None:
    """One after the other on a local disk, where threads only take turns (1.9 s became 2 to 4 for
    10,000 units); side by side where most of the time is spent waiting for a server."""
    first, rest = items[:GROUP], items[GROUP:]
    wall, used = time.perf_counter(), time.thread_time()
    for item in first:
        _look(item, wanted)
    wall, used = time.perf_counter() - wall, time.thread_time() - used
    if wall < WAITING * used:
        for item in rest:
            _look(item, wanted)
        return
    with ThreadPoolExecutor(QUICK_THREADS, "verify") as pool:
        list(pool.map(lambda item: _look(item, wanted), rest))


def _look(item: _Unit, wanted: Wanted | None) -> None:
    item.faults += files.size_faults(item.record)
    # A shard that is cut short or lost says no more.
    if wanted is not None and not item.faults:
        from kimi_eagle.proof.shards import ShardProof

        item.shard = ShardProof(item.record, wanted)
        item.faults += item.shard.quick()
        item.readable = item.shard.opens


def _fault_of(reason: str) -> Fault:
    """A line of a mark, as `Fault.line` made it, or as training wrote it."""
    return Fault(f"marked: {reason}")


# -- deep ------------------------------------------------------------------------------------------


def _deep(
    ctx: Context,
    states: dict[str, StageState],
    todo: list[_Unit],
    threads: int,
    on_bytes: OnBytes | None,
) -> None:
    """Read every byte of the units, several at once; faults are added to them."""
    todo = [i for i in todo if i.readable]
    count = Count(sum(e["bytes"] for i in todo for e in i.record.data["files"]), on_bytes)
    with ThreadPoolExecutor(max(1, threads), "verify") as pool:
        # Plain files first: a tokens part that is damaged says nothing about states.
        plain = [i for i in todo if i.shard is None]
        for item, faults in zip(plain, pool.map(lambda i: _bytes(i, count), plain), strict=True):
            item.faults += [f for f in faults if f not in item.faults]
        shards = [i for i in todo if i.shard is not None]
        bad = _bad_parts(ctx, states, plain)
        found = pool.map(lambda i: _states(i, bad, count), shards)
        for item, faults in zip(shards, found, strict=True):
            item.faults += [f for f in faults if f not in item.faults]
    count.end()


def _bytes(item: _Unit, count: Count) -> list[Fault]:
    return list(files.byte_faults(item.record, count.add))


def _states(item: _Unit, bad: set[str], count: Count) -> list[Fault]:
    part = item.unit.payload
    return list(item.shard.deep(None if part.name in bad else part, count.add))


def _bad_parts(ctx: Context, states: dict[str, StageState], plain: list[_Unit]) -> set[str]:
    """Names of files of prepare that are not as recorded; read here where it is not looked at."""
    items = [i for i in plain if i.row.stage == "prepare"]
    if items:
        return {f.file for i in items for f in i.faults}
    ledger, units = ctx.ledger("prepare"), states["prepare"].units
    broken = ledger.broken(units)  # told by its own row; the ids of samples prove what they can
    records = ledger.records(u for u in units if u not in broken)
    done = [r for r in records if r.state == "done"]
    return {f.file for r in done for f in files.byte_faults(r, lambda count: None)}


# -- what comes of it ------------------------------------------------------------------------------


def _conclude(ctx: Context, item: _Unit, report: Report) -> None:
    """Count the unit, and mark it, or take its mark away."""
    ledger, record, row = ctx.ledger(item.row.stage), item.record, item.row
    name = f"{row.stage} {item.unit.name}"
    if not item.faults:
        row.ok += 1
        if report.deep and ledger.damage(record):
            report.whole_again.append(name)
            _write(report, lambda: ledger.unmark(f"{record.unit}.{record.key}"))
        return
    if (now := _meanwhile(ctx, item)) is not None:
        setattr(row, now, getattr(row, now) + 1)
        return
    bad = [f for f in item.faults if not f.unread]
    row.damaged, row.unread = row.damaged + bool(bad), row.unread + (not bad)
    place = row.stage, item.unit.name, item.unit.key, record.data.get("attempt", 0)
    for f in item.faults:
        told = report.unread if f.unread else report.damage
        told.append(Damage(*place, f.file, f.sample_id, f.what))
    lines = [f.line() for f in bad if not f.what.startswith("marked: ")]
    samples = [f.sample_id for f in bad if f.sample_id]
    if lines and _write(report, lambda: ledger.mark_damaged(record, lines, samples)):
        report.marked.append(name)


def _meanwhile(ctx: Context, item: _Unit) -> str | None:
    """`open` where somebody set the unit aside or made it again while we looked, `freed` where its
    states were deleted on purpose; None where its record still stands."""
    ledger = Ledger(ctx.run.stage(item.row.stage))
    try:
        now = ledger.record(item.unit)
    except RunError:
        return None
    if now is None or now.data.get("attempt") != item.record.data.get("attempt"):
        return "open"
    gone = any(f.what == "missing" for f in files.size_faults(now))
    return "freed" if gone and now.attempt_name in ledger.freed() else None


def _write(report: Report, call: Callable[[], None]) -> bool:
    if report.not_marked:
        return False
    try:
        call()
    except OSError as e:
        report.not_marked = e.strerror or str(e)
        return False
    return True


def _draft(ctx: Context, todo: list[_Unit], report: Report, deep: bool) -> Iterator[Row]:
    """RUN/draft, where train is done."""
    for item in todo:
        if item.row.stage != "train" or not item.readable:
            continue
        entries = [e for e in item.record.data["files"] if "/" in e["name"]]
        row = Row(DRAFT, "done", 1, len(entries), sum(e["bytes"] for e in entries))
        if not files.draft_is_of(ctx.run, item.record):
            row.state, row.open = "open", 1
            row.reason = "not there, or of an earlier training: `run` puts it there"
        elif faults := list(files.draft_faults(ctx.run, item.record, deep=deep)):
            bad = [f for f in faults if not f.unread]
            row.state, row.damaged, row.unread = "damaged", int(bool(bad)), int(not bad)
            for f in faults:
                told = report.unread if f.unread else report.damage
                told.append(Damage(DRAFT, "", "", 0, f.file, None, f.what))
        else:
            row.ok = 1
        yield row
