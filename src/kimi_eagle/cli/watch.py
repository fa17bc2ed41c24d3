"""Commands that look at a run and end its jobs: `status`, `logs`, `cancel`, `accept`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kimi_eagle.cli.options import PATH, json_option, print_json

if TYPE_CHECKING:
    from kimi_eagle.slurm.status import Look

WATCH_SECONDS = 2.0
"""Between two looks of `status --watch`: a finished unit shows within this."""

SURE_LOOKS = 2
"""Looks in a row that must find a run at its end before a watch believes it: a submit or a requeue
may be under way."""


@click.command()
@click.argument("run_path", metavar="[RUN]", required=False, type=PATH)
@click.option(
    "--watch",
    is_flag=False,
    flag_value=str(WATCH_SECONDS),
    metavar="[SECONDS]",
    help=f"Look again every SECONDS [{WATCH_SECONDS:g}] until the run is finished or stuck.",
)
@json_option
def status(run_path: str | None, watch: str | None, as_json: bool) -> None:
    """How far a run is (all runs under runs/ when none is named), and why it waits.

    Reads the run's records and asks squeue; works without accounting. --watch ends with exit code 0
    when the run is finished, 1 when it cannot go on by itself. --json: an object for each run, its
    keys as in kimi_eagle/slurm/status.py (Look.as_json); with --watch one line a look.

    \b
    Examples:
      kimi-eagle status runs/kimi-k2.5
      kimi-eagle status runs/kimi-k2.5 --watch
      kimi-eagle status runs/kimi-k2.5 --json | jq '.[].stages[] | {name, state, done, left}'
    """
    from pathlib import Path

    from kimi_eagle.display import status_lines
    from kimi_eagle.errors import UsageError
    from kimi_eagle.rundir import open_run

    seconds, run_path = _watch_seconds(watch, run_path)
    paths = (
        [run_path] if run_path else sorted(str(p.parent) for p in Path("runs").glob("*/run.json"))
    )
    runs = {path: open_run(path) for path in paths}
    if seconds is not None:
        if len(runs) != 1:
            raise UsageError("--watch looks at one run", fix="kimi-eagle status RUN --watch")
        click.get_current_context().exit(_watch(*runs.values(), seconds, as_json))
    looks = {path: _look(run) for path, run in runs.items()}
    if as_json:
        print_json({path: found.as_json() for path, found in looks.items()})
    elif not looks:
        click.echo("no runs under runs/")
    else:
        for found in looks.values():
            click.echo("\n".join(status_lines(found)))


def _watch_seconds(watch: str | None, run_path: str | None) -> tuple[float | None, str | None]:
    """Seconds and run: `--watch RUN` means the run, for that is what people type."""
    from kimi_eagle.errors import UsageError

    if watch is None:
        return None, run_path
    try:
        seconds = float(watch)
    except ValueError:
        if run_path is None:
            return WATCH_SECONDS, watch
        seconds = 0.0
    if not 0.1 <= seconds < float("inf"):
        raise UsageError(f"--watch {watch}", expected="seconds, at least 0.1")
    return seconds, run_path


def _look(run: Any, watch: Any = None) -> Look:
    from kimi_eagle.slurm.status import look
    from kimi_eagle.summary import headline

    found = look(run, watch)
    if found.stages[-1]["state"] == "done":
        found.result = headline(run)
    return found


def _watch(run: Any, seconds: float, as_json: bool) -> int:
    """Look until the run is at its end; draws on a terminal, elsewhere prints what changed."""
    import sys
    import time

    from kimi_eagle import liveness
    from kimi_eagle.display import PLAIN_SECONDS, status_lines

    memory, at_end = liveness.Watch(), 0
    said, seen, when = [], None, 0.0
    live = None
    if sys.stdout.isatty() and not as_json:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        live = Live(console=Console(), auto_refresh=False, vertical_overflow="visible")
        live.start()
    try:
        while True:
            found = _look(run, memory)
            at_end = 0 if found.goes_on else at_end + 1
            if as_json:
                import json

                click.echo(json.dumps(found.as_json(), sort_keys=True, default=str))
            elif live:
                live.update(Text("\n".join(status_lines(found)), no_wrap=False), refresh=True)
            elif (news := found.news()) != seen or time.monotonic() - when >= PLAIN_SECONDS:
                lines, seen, when = status_lines(found), news, time.monotonic()
                for line in [x for x in lines if x not in said]:
                    click.echo(line)
                said = lines
            if found.state == "finished" or at_end >= SURE_LOOKS:
                return 0 if found.state == "finished" else 1
            time.sleep(seconds)
    finally:
        if live:
            live.stop()


@click.command()
@click.argument("run_path", metavar="RUN", type=PATH)
@click.argument("stage", metavar="[STAGE]", required=False)
@click.option("-f", "--follow", is_flag=True, help="Show what is added until the run ends.")
@click.option("--job", "job_id", metavar="ID", help="Only logs of this job (123, or 123_4).")
@click.option("-n", "--lines", default=40, show_default=True, type=click.IntRange(min=0))
@click.option("--list", "only_list", is_flag=True, help="Only the names of the logs, newest last.")
def logs(
    run_path: str, stage: str | None, follow: bool, job_id: str | None, lines: int, only_list: bool
) -> None:
    """The end of the newest log of a run, or of one of its stages.

    While no stage has written one: what the jobs themselves said (RUN/slurm/log). -f goes on with
    the log of a worker that starts later, and ends when the run is finished or cannot go on.

    \b
    Examples:
      kimi-eagle logs runs/kimi-k2.5 extract
      kimi-eagle logs runs/kimi-k2.5 -f
      kimi-eagle logs runs/kimi-k2.5 --job 1234_2 -n 200
    """
    from kimi_eagle.display import printable
    from kimi_eagle.errors import RunError
    from kimi_eagle.rundir import open_run
    from kimi_eagle.slurm import control

    run = open_run(run_path)
    if stage:
        run.stage(stage)
    found = control.log_files(run, stage, job_id)
    if only_list:
        for path in found:
            click.echo(printable(str(path)))
        return
    if not found and not follow:
        what = f"job {job_id}" if job_id else stage or "the run"
        raise RunError(
            f"no log of {what} yet", where=run.path, fix="kimi-eagle status says what it waits for"
        )
    if not follow:
        click.echo(f"==> {printable(str(found[-1]))} <==", err=True)
        text = control.tail(found[-1], lines)[0]
        _write(text)
        if lines and not text:
            click.echo("(nothing written to it)", err=True)
        return
    # Files come and go, so each round lists again.
    for piece in control.follow(
        lambda: control.log_files(run, stage, job_id), lines, _ended(run).__next__
    ):
        if isinstance(piece, bytes):
            _write(piece)
        else:
            click.echo(f"==> {printable(str(piece))} <==", err=True)


def _write(data: bytes) -> None:
    import sys

    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _ended(run: Any) -> Any:
    """False, False, ... then True for ever when the run is at its end; looks every 2 s."""
    import time

    from kimi_eagle import liveness
    from kimi_eagle.slurm.status import look

    memory, at_end, next_look = liveness.Watch(), 0, 0.0
    while True:
        if time.monotonic() >= next_look:
            found = look(run, memory)
            at_end = 0 if found.goes_on else at_end + 1
            next_look = time.monotonic() + WATCH_SECONDS
        yield at_end >= SURE_LOOKS


@click.command()
@click.argument("run_path", metavar="RUN", type=PATH)
@click.option("--after-unit", is_flag=True, help="Let each worker end the unit it works on.")
@click.option("--job", "job_id", metavar="ID", help="Only this job (123), or array task (123_4).")
@json_option
def cancel(run_path: str, after_unit: bool, job_id: str | None, as_json: bool) -> None:
    """End a run's jobs; what is done stays done, and the same submit goes on later.

    \b
    Examples:
      kimi-eagle cancel runs/kimi-k2.5
      kimi-eagle cancel runs/kimi-k2.5 --after-unit      no work is thrown away
      kimi-eagle cancel runs/kimi-k2.5 --job 1234_2
    """
    from kimi_eagle.rundir import open_run
    from kimi_eagle.slurm import control

    run = open_run(run_path)
    found = control.cancel(run, job_id=job_id, after_unit=after_unit)
    if as_json:
        print_json(found)
        return
    for name, words in (("cancelled", "cancelled"), ("asked", "asked to leave after the unit")):
        for ident in found[name]:
            click.echo(f"job {ident} {words}")
    if found["by_hand"]:
        click.echo(f"left alone, submitted by hand: scancel {' '.join(found['by_hand'])}")
    if not any(found.values()):
        click.echo("nothing to cancel: no job of this run is in the queue")


@click.command()
@click.argument("run_path", metavar="RUN", type=PATH)
@click.argument("stage", metavar="[STAGE]", required=False)
@click.option("--share", type=float, help="Lost samples that are fine, 0 to 1.")
@click.option("--image", "image_file", type=PATH, help="Go on in this pinned image.")
@click.option("--reason", required=True, help="Why; kept in the run and shown in its report.")
@json_option
def accept(
    run_path: str,
    stage: str | None,
    share: float | None,
    image_file: str | None,
    reason: str,
    as_json: bool,
) -> None:
    """Go on with a run although something is not as it was meant; who, when and why is recorded.

    With STAGE and --share: a stage rejected or lost more samples than allow_rejected allows; the
    gate after it opens while at most this share is rejected or in failed units. With --image: jobs
    run in another image from the next submit on. Both are appended to RUN/accepted.jsonl.

    \b
    Examples:
      kimi-eagle accept runs/kimi-k2.5 extract --share 0.01 --reason "one bad node, 3 units"
      kimi-eagle accept runs/kimi-k2.5 --image /shared/new.sif --reason "driver 580 needs it"
    """
    from kimi_eagle.errors import UsageError
    from kimi_eagle.rundir import open_run

    run = open_run(run_path)
    if not reason.strip():
        raise UsageError("--reason is empty", expected="why this is fine, for the report")
    if image_file is not None:
        if stage is not None or share is not None:
            raise UsageError("--image goes with no stage and no --share")
        _accept_image(run, image_file, " ".join(reason.split()), as_json)
    elif stage is None or share is None:
        raise UsageError("what is accepted?", expected="STAGE with --share, or --image FILE")
    else:
        _accept_loss(run, stage, share, " ".join(reason.split()), as_json)


def _accept_loss(run: Any, stage: str, share: float, reason: str, as_json: bool) -> None:
    from kimi_eagle import accepted
    from kimi_eagle.errors import UsageError
    from kimi_eagle.survey import view

    seen = view(run, run.stage(stage).path.name)
    if not 0 <= share <= 1:  # also refuses nan
        raise UsageError(f"--share is {share:g}", expected="a share from 0 to 1, such as 0.01")
    if not seen.lost:
        raise UsageError(
            f"{stage} has lost nothing: no failed unit, no rejected sample",
            where=run.path,
            fix="kimi-eagle status says what the run waits for",
        )
    entry = accepted.add(run, stage, share, reason, lost=seen.lost, samples=seen.samples)
    now = seen.lost / max(1, seen.samples)
    if as_json:
        print_json(entry)
    elif now > share:
        click.echo(
            f"recorded, but the gate stays shut: {seen.lost} of {seen.samples} samples ({now:.2%}) "
            f"are lost, more than {share:.2%}"
        )
    else:
        click.echo(
            f"recorded: the gate after {stage} opens with {seen.lost} of {seen.samples} samples "
            f"({now:.2%}) lost; now the same submit or run again"
        )


def _accept_image(run: Any, image_file: str, reason: str, as_json: bool) -> None:
    """Prove the image, note the decision, then pin the run to it."""
    import contextlib

    from kimi_eagle import accepted
    from kimi_eagle.errors import RunError, UsageError
    from kimi_eagle.images import pins
    from kimi_eagle.lock import runlock
    from kimi_eagle.turns import turn

    image = pins.verified(image_file)
    # A submit that is under way has looked at the image already.
    with turn(run.slurm.lock) if run.slurm.path.is_dir() else contextlib.nullcontext():
        try:
            before = runlock.pinned(run)
            old = f"sha256:{before.sha256}" if before else None
        except RunError:  # image.json is not whole: this is the way to mend it
            before, old = None, "unknown"
        if before is not None and before.sha256 == image.sha256:
            raise UsageError(
                f"is the run's image already (sha256:{image.sha256[:12]})", where=image.path
            )
        # The reason first: a change without one must not be possible.
        entry = accepted.add_image(run, f"sha256:{image.sha256}", old, reason)
        runlock.replace_image(run, image)
        runlock.write(run, by="accept")
    if as_json:
        print_json(entry)
    else:
        was = f" instead of {old[:19]}" if old else ""
        click.echo(
            f"recorded: the run goes on in sha256:{image.sha256[:12]}{was}; jobs in the queue keep "
            "the old one until the next submit (or run)"
        )
