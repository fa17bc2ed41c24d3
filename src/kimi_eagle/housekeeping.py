"""What may be deleted: files that no current record names, and on request the hidden states."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from kimi_eagle import files
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.recipe import STAGES
from kimi_eagle.rundir import RunDir
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
        records = ctx.ledger(state.name).records(state.units)
        keep_files = {f["name"].split("/")[0] for r in records for f in r.data["files"]}
        keep_files |= {f"work-{u.key}" for u in state.open_units}
        doomed += [p for p in folder.records.glob("*") if p.name not in keep_records]
        doomed += [p for p in folder.files.glob("*") if p.name not in keep_files]
        doomed += [p for p in folder.claims.glob("*")]
        for sub in (folder.workers, folder.attempts, folder.path):
            doomed += sub.glob(f"{files.TEMPORARY}*")
    freed = sum(_size(p) for p in doomed)
    if not dry_run:
        for path in doomed:
            _remove(path)
    return {"removed": len(doomed), "bytes": freed, "dry_run": dry_run}


def retry(ctx: Context) -> dict[str, int]:
    """Set aside the records of failed units, and of units whose files are gone or cut short.

    Stages that were held may be started again.
    """
    _refuse_live(ctx.run)
    found: dict[str, int] = {}
    for held in (ctx.run.held, *(ctx.run.stage(name).held for name in STAGES)):
        if held.exists():
            held.unlink()
            found["held"] = found.get("held", 0) + 1
    states = {s.name: s for s in survey(ctx)}
    for name in STAGES:
        ledger, state = ctx.ledger(name), states[name]
        freed = name == "extract" and states["train"].state == "done"
        for record in ledger.records(state.units):
            if record.state == "failed":
                ledger.set_aside(record, "failed")
            elif not freed and record.files_whole():
                ledger.set_aside(record, "damaged")
            else:
                continue
            found[name] = found.get(name, 0) + 1
    return found


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
    freed = 0
    for record in ctx.ledger("extract").records(states["extract"].units):
        for entry in record.data["files"]:
            path = record.stage_dir.files / entry["name"]
            freed += _size(path)
            path.unlink(missing_ok=True)
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
