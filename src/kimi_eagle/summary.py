"""The end of a run in figures: one row a stage, the headline, and the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle import accepted, files
from kimi_eagle.errors import UsageError
from kimi_eagle.ledger import Ledger, Record
from kimi_eagle.recipe import STAGES
from kimi_eagle.rundir import RunDir, open_run
from kimi_eagle.stages.context import Context
from kimi_eagle.survey import StageState, all_workers, survey, times

if TYPE_CHECKING:
    from kimi_eagle.report.compared import Side


def stage_rows(ctx: Context, states: list[StageState] | None = None) -> list[dict[str, Any]]:
    """One row a stage: state, counts added up over its records, and where the time went.

    bytes: of the files that the records name; freed_bytes: of those that `clean` has deleted since.
    For runs with jobs also gpu_hours, waiting_s and cpu_seconds. warning: what a person should know
    of a stage that is done all the same. states: a survey made already.
    """
    rows, used = [], job_use(ctx.run)
    for state in states or survey(ctx):
        records = ctx.ledger(state.name).records(state.units)
        row: dict[str, Any] = {"stage": state.name, "state": state.state, "units": len(records)}
        for name in ("samples", "tokens", "rejected"):
            row[name] = sum(r.counts.get(name, 0) for r in records)
        freed = ctx.ledger(state.name).freed()
        row["bytes"] = file_bytes(records)
        row["freed_bytes"] = file_bytes([r for r in records if r.attempt_name in freed])
        if records:
            spent = times(records)
            row |= {k: round(v, 2) for k, v in spent.items()}
            row["ended"] = max(r.data["ended"] for r in records)
        if skipped := sum(len(r.info.get("skipped_samples", ())) for r in records):
            row["warning"] = (
                f"{skipped} damaged sample{'s'[: skipped > 1]} left out; "
                f"kimi-eagle retry {ctx.run.path} makes what is damaged again"
            )
        elif word := next(filter(None, (r.info.get("warning") for r in records)), None):
            row["warning"] = word
        jobs = used.get(state.name, {})
        row |= {k: jobs[k] for k in ("gpu_hours", "waiting_s", "cpu_seconds") if k in jobs}
        rows.append(row)
    return rows


def file_bytes(records: Sequence[Record]) -> int:
    """Sizes of the files that records name, those freed by `clean --hidden` too."""
    return sum(entry["bytes"] for r in records for entry in r.data["files"])


def job_use(run: RunDir) -> dict[str, dict[str, float]]:
    """What the run's jobs used, by stage (see slurm/use.py); {} for a run without jobs."""
    from kimi_eagle.slurm import book, use

    starts = use.read_starts(run)
    workers = {s.stage: all_workers(run.stage(s.stage)) for s in starts}
    return use.by_stage(starts, book.read_book(run), workers)


def headline(run: RunDir) -> dict[str, Any] | None:
    """What results.json says at its top level, without the details."""
    results = files.read_json(run.bench / "results.json")
    if not results:
        return None
    shown = ("acceptance_length", "acceptance_per_position", "identical_outputs", "k")
    return {k: results.get(k) for k in (*shown, "tokens_per_second")}


def record_of(ctx: Context, stage: str, states: list[StageState] | None = None) -> Record | None:
    """The record of a stage of one unit, None while there is none. states: as in stage_rows."""
    state = next(s for s in states or survey(ctx) if s.name == stage)
    records = ctx.ledger(stage).records(state.units)
    return records[0] if records else None


def curves_of(ctx: Context, states: list[StageState]) -> Path | None:
    """curves.jsonl of this recipe's training; where it has not ended, what it has logged so far."""
    if trained := record_of(ctx, "train", states):
        return trained.path("curves.jsonl")
    units = next(s for s in states if s.name == "train").units
    work = ctx.run.stage("train").files
    return work / f"work-{units[0].key}" / "curves.jsonl" if units else None


def write_report(ctx: Context) -> None:
    """RUN/report.html from what there is so far."""
    from kimi_eagle.report.page import ReportData
    from kimi_eagle.report.page import write_report as write

    states = survey(ctx)
    prepared, mapping, trained, measured = (
        record_of(ctx, name, states) for name in ("prepare", "vocab", "train", "benchmark")
    )
    data = ReportData(
        name=ctx.recipe.name,
        results=files.read_json(ctx.run.bench / "results.json"),
        earlier=measured is None,
        curves=curves_of(ctx, states),
        stages=stage_rows(ctx, states),
        sources=prepared.info["by_source"] if prepared else {},
        counts=prepared.counts if prepared else {},
        vocab=(mapping.info | mapping.counts) if mapping else {},
        lock=lock_of(ctx.run),
        provenance=(trained or prepared).data["provenance"] if (trained or prepared) else {},
        keys={r.data["stage"]: r.key for r in (trained, measured) if r},
        use=job_use(ctx.run),
        accepted=accepted.read(ctx.run),
    )
    write(ctx.run.report, data)


def lock_of(run: RunDir) -> dict[str, Any]:
    """The content of run.lock.json; {} where there is none, or none that is whole."""
    from kimi_eagle.lock import runlock

    try:
        return runlock.read(run.path)
    except UsageError:
        return {}


def write_comparison(paths: Sequence[str], out: Path) -> None:
    """One page that shows several runs side by side, from what lies in them.

    UsageError for a path that is no run, and where `out` cannot be written.
    """
    from kimi_eagle.report.compared import write_comparison as write

    runs = [open_run(path) for path in paths]
    sides = [_side(run, name) for run, name in zip(runs, _names(runs), strict=True)]
    try:
        write(out, sides)
    except OSError as e:
        raise UsageError(f"cannot be written: {e.strerror}", where=out) from None


def _names(runs: Sequence[RunDir]) -> list[str]:
    """The ends of the runs' paths, as short as tells them apart."""
    whole = [run.path.parts for run in runs]
    depth = 1
    while depth < max(map(len, whole)) and len({p[-depth:] for p in whole}) < len(set(whole)):
        depth += 1
    return ["/".join(parts[-depth:]).replace("//", "/") for parts in whole]


def _side(run: RunDir, name: str) -> Side:
    """What a comparison shows of a run: its newest records, whatever their keys."""
    from kimi_eagle.lock.rundiff import flat_recipe
    from kimi_eagle.report.compared import Side

    records = {stage: Ledger(run.stage(stage)).newest() for stage in STAGES}
    trained, used, lock = records["train"], job_use(run), lock_of(run)
    return Side(
        name=name,
        path=str(run.path),
        results=files.read_json(run.bench / "results.json"),
        lock=lock,
        curves=trained[-1].path("curves.jsonl") if trained else None,
        fields=(flat_recipe(lock) or {}) if lock else {},
        bytes=sum(map(file_bytes, records.values())),
        seconds=sum(times(found).get("wall", 0.0) for found in records.values() if found),
        gpu_hours=used["all"]["gpu_hours"] if used else None,
    )
