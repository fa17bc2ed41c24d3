"""One stage in one process, from the gate to an exit code: what a job runs.

The exit code is all that the supervisor (slurm/host.sh) needs to know: DONE, nothing is left for
this process; STOPPED, it was asked to leave; NOT_YET, somebody upstream is still at work; REFUSED,
trying again would change nothing. Any other code is a death, which is worth another try.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import click

from kimi_eagle import contracts, files
from kimi_eagle.errors import RunError
from kimi_eagle.ledger import Unit
from kimi_eagle.lock import runlock
from kimi_eagle.provenance import image_digest
from kimi_eagle.stages import UPSTREAM, module, upstream_of
from kimi_eagle.stages.context import Context, GateShut, Waiting, open_context, recipe_digest
from kimi_eagle.survey import live_workers
from kimi_eagle.training import nodes
from kimi_eagle.worker import Stopped, Worker

DONE, STOPPED, NOT_YET, REFUSED = 0, 75, 76, 78

CANARY = Unit(".canary", {})
"""Claimed by the worker that makes a stage's first unit, beside its claim on the unit itself."""


class NotYet(RunError):
    """Somebody else has to come first, and is at it."""


def run_stage(run_path: str | Path, stage: str) -> int:
    """Work on a stage until nothing is left for this process; returns the exit code.

    Faults of the stage itself are raised.
    """
    ctx = open_context(run_path)
    ctx.reading = UPSTREAM.get(stage, ())
    folder = ctx.run.stage(stage)
    if nodes.rank() > 0:
        return nodes.follow(folder)
    try:
        _refuse_outside(ctx)
        _refuse_held(ctx, stage)
        _refuse_other_recipe(ctx)
        _refuse_broken_rules(ctx, stage)
        if stage == ctx.recipe.slurm.groups[0][0] and "KIMI_EAGLE_JOB" in os.environ:
            ctx.preflight()
        with Worker(folder, recipe_digest=recipe_digest(ctx.recipe), on_look=_beacon(ctx)) as w:
            try:
                _canary_first(ctx, stage, w)
                module(stage).work(ctx, w)
            except Waiting as e:
                raise _who_is_at_it(ctx, e) from None
            finally:
                with contextlib.suppress(OSError):
                    w.ledger.release(CANARY.name, w.id)
    except NotYet as e:
        click.echo(f"{stage}: not yet: {e}", err=True)
        return NOT_YET
    except Stopped as e:
        click.echo(f"{stage}: stopped ({e})", err=True)
        return STOPPED if str(e) == "stop file" else 128 + 15
    except GateShut as e:
        click.echo(f"error: {e.line()}", err=True)
        return REFUSED
    finally:
        nodes.close(folder)
        runlock.write(ctx.run, by="stage")
    return DONE


def _refuse_held(ctx: Context, stage: str) -> None:
    """A stage in which workers died one after the other waits for a person."""
    for path in (ctx.run.held, ctx.run.stage(stage).held):
        if path.is_file():
            raise GateShut(
                f"held: {path.read_text(errors='replace').strip()}",
                where=stage,
                fix=f"mend the cause, then kimi-eagle retry {ctx.run.path}",
            )


def _refuse_outside(ctx: Context) -> None:
    """The image is the code: a run that has one has no stage outside of it."""
    if image_digest() is None and runlock.pinned(ctx.run) is not None:
        raise GateShut(
            "the run works in an image, and this process does not",
            where=ctx.run.image,
            fix=f"bash {ctx.run.start} stage STAGE --run {ctx.run.path}",
        )


def _refuse_other_recipe(ctx: Context) -> None:
    """A job works for the recipe that it was submitted for, or not at all."""
    digest = os.environ.get("KIMI_EAGLE_RECIPE")
    if digest and digest != recipe_digest(ctx.recipe):
        raise GateShut(
            "this job was submitted for an earlier recipe of the run",
            where=ctx.run.path,
            fix="submit the recipe again",
        )


def _refuse_broken_rules(ctx: Context, stage: str) -> None:
    """The rules that open this stage, against the libraries of this very environment."""
    facts = contracts.Facts(ctx.recipe, run=ctx.run, heavy=True)
    try:
        contracts.open_stage(facts, stage)
    except RunError as e:
        raise GateShut(e.what, where=e.where, expected=e.expected, fix=e.fix) from None


def _who_is_at_it(ctx: Context, gate: Waiting) -> RunError:
    """The gate's second and third answer: not yet while a worker lives upstream, else failed."""
    upstream = ctx.run.stage(gate.stage)
    ahead = (gate.stage, *upstream_of(gate.stage))
    if at_work := [w for s in ahead for w in live_workers(ctx.run.stage(s))]:
        _come_after({w["job"].partition(".")[0] for w in at_work if w.get("job")})
        return NotYet(gate.line())
    if gate.stage in os.environ.get("KIMI_EAGLE_STAGES", "").split(","):
        # This job did that stage until nothing was left for it: another worker has the rest.
        return NotYet(gate.line())
    held = next((p.read_text() for p in (ctx.run.held, upstream.held) if p.is_file()), "")
    reason = f" (held: {' '.join(held.split())})" if held else ""
    return GateShut(
        f"{gate.open_units} units of {gate.stage} are open and nobody works on them{reason}",
        where=f"gate after {gate.stage}",
        fix=f"see kimi-eagle status {ctx.run.path}, then submit (or run) the recipe again",
    )


def _come_after(jobs: set[str]) -> None:
    """Tell the supervisor behind which jobs to put this one."""
    path = os.environ.get("KIMI_EAGLE_BEACON")
    if path and jobs:
        files.write_atomic(Path(f"{path}.after"), f"afterany:{':'.join(sorted(jobs))}\n")


def _canary_first(ctx: Context, stage: str, worker: Worker) -> None:
    """Others of a stage start behind its first unit, which has passed the stage's own checks.

    Whoever comes first makes it: where the job meant for it is gone (cancelled, lost) or late
    (preempted), the first of the others takes its place.
    """
    if os.environ.get("KIMI_EAGLE_ROLE") not in ("canary", "workers"):
        return
    units, ledger = module(stage).plan(ctx), worker.ledger
    while len(units) > 1 and len(ledger.open_units(units)) == len(units):
        if ledger.claim(CANARY, worker.id):
            return
        holder = ledger.claimed_by(CANARY.name)
        if holder in {w["id"] for w in live_workers(ctx.run.stage(stage))}:
            raise NotYet("the first unit is still being made")
        if holder is not None:
            ledger.release(CANARY.name, holder)


def _beacon(ctx: Context) -> Callable[[Worker], None] | None:
    """Writes how far the stage is where the supervisor looks; None outside a job."""
    path = os.environ.get("KIMI_EAGLE_BEACON")
    if not path:
        return None
    from kimi_eagle.slurm.beacon import write

    return lambda worker: write(Path(path), ctx.run, worker)
