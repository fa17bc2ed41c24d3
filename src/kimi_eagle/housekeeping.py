"""What may be deleted: files that no current record names, and on request the hidden states."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from kimi_eagle import files, proof
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.ledger import Ledger, Unit
from kimi_eagle.recipe import STAGES
from kimi_eagle.record import RIGHTS, of_the_machine
from kimi_eagle.rundir import RunDir
from kimi_eagle.stages import upstream_of
from kimi_eagle.stages.context import Context
from kimi_eagle.survey import live_workers, survey


def gc(ctx: Context, *, dry_run: bool) -> dict[str, Any]:
    """Remove files, records and working folders that no current key needs.

    Refuses while a worker lives: what it is writing is named by no record yet.
    """
    _refuse_live(ctx.run)
    doomed: list[Path] = []
    for state in survey(ctx):
        folder = ctx.run.stage(state.name)
        if state.state in ("waiting", "failed") or not folder.path.is_dir():
            continue  # its units cannot be known yet, so nothing of it is known to be garbage
        keys = [f"{u.name}.{u.key}" for u in state.units]
        keep_records = {f"{k}.{end}" for k in keys for end in ("json", "failed")}
        ledger = ctx.ledger(state.name)
        records = ledger.records(state.units)
        keep_files = {f["name"].split("/")[0] for r in records for f in r.data["files"]}
        keep_files |= {f"work-{u.key}" for u in state.open_units}
        doomed += [p for p in folder.records.glob("*") if p.name not in keep_records]
        doomed += [p for p in folder.files.glob("*") if p.name not in keep_files]
        doomed += [p for p in folder.claims.glob("*")]
        live = {f"{r.unit}.{r.key}.json" for r, _ in ledger.damaged(records)}
        doomed += [p for p in folder.damaged.glob("*") if p.name not in live]
        for sub in (folder.workers, folder.attempts, folder.path):
            doomed += sub.glob(f"{files.TEMPORARY}*")
    freed = sum(_size(p) for p in doomed)
    if not dry_run:
        for path in doomed:
            _remove(path)
    return {"removed": len(doomed), "bytes": freed, "dry_run": dry_run}


def retry(ctx: Context) -> dict[str, Any]:
    """Set aside the records of units that failed or are damaged, so that `run` makes these again.

    Damaged: marked so by `verify` or by training, or files gone or cut short, or a record that is
    none. -> {stage: units, held: holds lifted, draft: 1 where RUN/draft is to be put there anew,
    warnings: lines}; what is nothing is left out.
    """
    _refuse_live(ctx.run)
    found: dict[str, Any] = {}
    for held in (ctx.run.held, *(ctx.run.stage(name).held for name in STAGES)):
        if held.exists():
            held.unlink()
            found["held"] = found.get("held", 0) + 1
    states = {s.name: s for s in survey(ctx)}
    warnings = []
    for name in STAGES:
        failed, damaged, unread = _set_aside(ctx.ledger(name), states[name].units)
        if unread:
            more = f" and {len(unread) - 1} units more" if len(unread) > 1 else ""
            warnings.append(f"left as it is: {unread[0]}{more}; {RIGHTS}")
        if failed or damaged:
            found[name] = failed + damaged
        after = [s for s in STAGES if name in upstream_of(s) and states[s].state == "done"]
        if damaged and after:
            warnings.append(
                f"{', '.join(after)} stay{'s'[: len(after) == 1]} done, though units of {name} are "
                "made again: what was made from damaged bytes cannot be told from the rest; to be "
                f"sure, remove {ctx.run.stage(after[0]).records} before `run`"
            )
    if any(not f.unread for f in proof.draft_faults(ctx, states["train"].units)):
        (ctx.run.draft / "record.json").unlink(missing_ok=True)
        found["draft"] = 1
    return found | ({"warnings": warnings} if warnings else {})


def _set_aside(ledger: Ledger, units: list[Unit]) -> tuple[int, int, list[str]]:
    """Open failed and damaged units again; -> how many of each, and what cannot be looked at.

    Their marks go, last.
    """
    broken = ledger.broken(units)
    for unit in broken:
        ledger.set_aside(unit, "damaged")
        ledger.unmark(f"{unit.name}.{unit.key}")
    failed, damaged, freed = 0, len(broken), ledger.freed()
    unread = []
    for record in ledger.records(units):
        fault = None if record.attempt_name in freed else record.files_whole()
        marked = record.attempt_name not in freed and ledger.damage(record)
        if record.state == "failed":
            ledger.set_aside(record, "failed")
            failed += 1
        elif marked or (fault and not of_the_machine(fault)):
            ledger.set_aside(record, "damaged")
            damaged += 1
        elif fault:
            unread.append(fault)
        ledger.unmark(f"{record.unit}.{record.key}")  # handled, or of an earlier attempt
    return failed, damaged, unread


def clean_hidden(ctx: Context) -> dict[str, Any]:
    """Delete the hidden states of a finished run; its records stay, so nothing is done again."""
    _refuse_live(ctx.run)
    states = {s.name: s for s in survey(ctx)}
    if states["train"].state != "done":
        raise UsageError(
            "the states are still needed: train is not done",
            where=ctx.run.path,
            fix="kimi-eagle run first, or delete the run directory",
        )
    ledger = ctx.ledger("extract")
    records = ledger.records(states["extract"].units)
    # Written first: a file that is missing without a word here was lost.
    names = sorted(r.attempt_name for r in records if r.state == "done")
    files.write_atomic(ledger.dir.freed, files.to_json({"units": names}) + "\n")
    freed = 0
    for record in records:
        for entry in record.data["files"]:
            path = record.stage_dir.files / entry["name"]
            freed += _size(path)
            path.unlink(missing_ok=True)
        ledger.unmark(f"{record.unit}.{record.key}")
    return {"bytes": freed}


def _refuse_live(run: RunDir) -> None:
    for name in STAGES:
        if alive := live_workers(run.stage(name)):
            raise RunError(f"a worker is alive (pid {alive[0]['pid']})", where=name)


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(p.lstat().st_size for p in path.rglob("*") if p.is_file())
    return path.lstat().st_size if path.exists() else 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
