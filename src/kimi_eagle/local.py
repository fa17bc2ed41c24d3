"""`kimi-eagle run`: all stages on this machine, one after the other, through submitit.

The front process only launches, watches and prints. Each stage is a process of its own (submitit's
local executor) that survives the front: kill the front, type the command again, and it attaches to
the live stage instead of starting a second one. What is done is read from the ledger alone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kimi_eagle import files, liveness
from kimi_eagle.begin import begin
from kimi_eagle.errors import RunError
from kimi_eagle.ledger import Ledger
from kimi_eagle.recipe import STAGES, Recipe
from kimi_eagle.rundir import RunDir, StageDir
from kimi_eagle.slurm import guard
from kimi_eagle.stages import module
from kimi_eagle.stages.context import Context, recipe_digest
from kimi_eagle.survey import (
    StageState,
    StageView,
    all_workers,
    live_workers,
    survey,
    view,
)

POLL_SECONDS = 0.5
_GPUS = "KIMI_EAGLE_CUDA_VISIBLE_DEVICES"

Watcher = Callable[[list[StageState], StageView | None], None]
"""Called with the survey and, while a stage runs, its view; draws the progress bars."""


def run_stages(
    run: RunDir, recipe: Recipe, recipe_path: Path, until: str | None, watcher: Watcher
) -> list[StageState]:
    """Do all stages that are not done (up to `until`); returns the final survey.

    Raises UsageError where the recipe cannot be done, before anything of the run is changed, and
    RunError when a stage ended without finishing its units.
    """
    digest = recipe_digest(recipe)
    _become_driver(run, digest, watcher)
    try:
        _refuse_other_recipe(run, digest)
        guard.before_following(run, recipe)
        ctx = Context(run, recipe)
        ctx.preflight()
        begin(run, recipe, recipe_path)
        launched: set[str] = set()
        watch = liveness.Watch()
        while True:
            states = survey(ctx)
            _publish(ctx, states)
            watcher(states, None)
            todo = next((s for s in states if s.state in ("open", "failed")), None)
            if todo is None or (until and _past(states, todo.name, until)):
                return states
            if todo.state == "failed":
                raise RunError(todo.reason)
            _stage(run, todo, states, watcher, watch, launched)
    finally:
        run.driver.unlink(missing_ok=True)


def _publish(ctx: Context, states: list[StageState]) -> None:
    """Show the results of the current recipe, also those that an earlier run had made."""
    digest = recipe_digest(ctx.recipe)
    for state in (s for s in states if s.state == "done"):
        if hasattr(module(state.name), "publish"):
            module(state.name).publish(ctx)
        ledger = Ledger(ctx.run.stage(state.name), digest)
        if (ledger.plan() or {}).get("recipe") != digest:  # no worker of this recipe was needed
            ledger.write_plan(state.units)


def _past(states: list[StageState], name: str, until: str) -> bool:
    order = [s.name for s in states]
    return order.index(name) > order.index(until)


def _stage(
    run: RunDir,
    todo: StageState,
    states: list[StageState],
    watcher: Watcher,
    watch: liveness.Watch,
    launched: set[str],
) -> None:
    """Attach to the stage's live process or launch one, and follow it to its end."""
    folder = run.stage(todo.name).make()
    pid_file = folder.path / "launch.json"
    if not _live(folder, pid_file, watch):
        if todo.name in launched:
            raise RunError(_why(folder), where=todo.name)
        launched.add(todo.name)
        job = _launch(run, folder, pid_file)
    else:
        job = None
    while _live(folder, pid_file, watch) and (job is None or not job.done()):
        watcher(states, view(run, todo.name, watch))
        time.sleep(POLL_SECONDS)
    if job is not None:
        while not job.done():
            time.sleep(0.05)


def _launch(run: RunDir, folder: StageDir, pid_file: Path) -> Any:
    """Start `kimi-eagle stage` under submitit's local executor."""
    import submitit

    folder.stop.unlink(missing_ok=True)
    # A grp.py in the user's folder must not become the standard library's.
    os.environ["PYTHONSAFEPATH"] = "1"
    os.environ[_GPUS] = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    executor = submitit.LocalExecutor(folder=folder.log)
    executor.update_parameters(timeout_min=60 * 24 * 365, stderr_to_stdout=True)
    job = executor.submit(exec_stage, folder.path.name, str(run.path))
    started = liveness.process_start(int(job.job_id))
    launch = {**liveness.identity(), "pid": int(job.job_id), "pid_started": started}
    files.write_atomic(pid_file, files.to_json(launch))
    return job


def exec_stage(stage: str, run: str) -> None:
    """What submitit runs: becomes the stage itself, so that signals and exit codes are its own."""
    gpus = os.environ.pop(_GPUS, "unset")  # submitit's local executor hides the GPUs
    if gpus == "unset":
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    sys.stdout.flush()
    argv = [sys.executable, "-m", "kimi_eagle", "stage", stage, "--run", run]
    os.execv(sys.executable, argv)


def _live(folder: StageDir, pid_file: Path, watch: liveness.Watch) -> bool:
    """Is a worker of this stage alive, or one just being started?"""
    launch = files.read_json(pid_file)
    if launch and liveness.is_alive_here(launch):
        return True
    return any(watch.alive(w["id"], w) is not False for w in all_workers(folder))


def _why(folder: StageDir) -> str:
    """Why the stage's last worker ended."""
    workers = all_workers(folder)
    error = max(workers, key=lambda w: w["started"]).get("error") if workers else None
    log = _newest_log(folder)
    lines = log.read_text(errors="replace").splitlines() if log else []
    last = next((x for x in reversed(lines) if x.strip() and "submitit" not in x), "no log")
    if error:
        return error.removeprefix(f"{folder.path.name}: ")
    return f"the stage died without a word; the last line of {log}: {last.strip()}"


def _newest_log(folder: StageDir) -> Path | None:
    logs = sorted(folder.log.glob("*.out"), key=lambda p: p.stat().st_mtime)
    return logs[-1] if logs else None


# -- one driver at a time ----------------------------------------------------------------------


def _become_driver(run: RunDir, digest: str, watcher: Watcher) -> None:
    """Wait, watching, while another `kimi-eagle run` drives this run; take over when it is gone.

    RunError where the other one follows another recipe.
    """
    watch, me = liveness.Watch(), {**liveness.identity(), "recipe": digest}
    while not files.create_exclusive(run.driver, files.to_json(me)):
        who = files.read_json(run.driver)
        if not isinstance(who, dict) or watch.alive("driver", who) is False:
            run.driver.unlink(missing_ok=True)
            continue
        if who.get("recipe") != digest:
            raise RunError(
                f"another `run` is working here by another recipe (pid {who.get('pid')} on"
                f" {who.get('host')})",
                where=run.path,
                fix="wait for it or stop it, or choose another --run DIR",
            )
        running = next((v for s in STAGES if (v := view(run, s, watch)).workers), None)
        watcher([], running)
        time.sleep(POLL_SECONDS)


def _refuse_other_recipe(run: RunDir, digest: str) -> None:
    """A live worker of an earlier recipe would go on making what nobody wants any more."""
    for stage in STAGES:
        for worker in live_workers(run.stage(stage)):
            if worker.get("recipe") == digest:
                continue
            raise RunError(
                f"a worker of an earlier recipe is still running (pid {worker['pid']}"
                f" on {worker['host']})",
                where=stage,
                fix=f"wait for it, or let it leave after its unit: touch {run.stage(stage).stop}",
            )
