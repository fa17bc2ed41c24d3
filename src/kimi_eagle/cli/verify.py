"""`verify`: are a run's results, above all its hidden states, still what was written?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kimi_eagle.cli.options import PATH, json_option, print_json

if TYPE_CHECKING:
    from kimi_eagle.proof import Report

SHOWN = 50
"""Faults that are printed; --json has all."""


@click.command()
@click.argument("run_path", metavar="RUN", type=PATH)
@click.argument("stage", metavar="[STAGE]", required=False)
@click.option("--deep", is_flag=True, help="Read every byte and compare it with what was written.")
@click.option("--threads", type=click.IntRange(1, 256), help="Files read at once [default: 4].")
@json_option
def verify(
    run_path: str, stage: str | None, deep: bool, threads: int | None, as_json: bool
) -> None:
    """Check that all results of a run, or all shards of a folder, are as they were written.

    Without --deep: records, sizes, and of hidden states index, header, layers, verifier and probe;
    no sample is read. With --deep: every byte, every state finite, token ids and loss masks those
    of prepare; damaged samples are named. What is damaged is marked: no stage reads it, and `retry`
    opens exactly these units again. Units that are open, or whose states `clean --hidden` freed,
    are not damaged, and live workers are not disturbed. What cannot be looked at (no right to, an
    ill mount) is told and not marked. Exit code 1 where anything is damaged or not looked at.

    A folder of shards that belongs to no run is held against its shards.json (`shards convert`
    writes it), or against its indexes alone; nothing is marked there.

    --json: run, deep, ok, stages, damage, unread, strays, marked, whole_again, not_marked (see
    kimi_eagle/proof/report.py).

    \b
    Examples:
      kimi-eagle verify runs/kimi-k2.5
      kimi-eagle verify runs/kimi-k2.5 --deep
      kimi-eagle verify runs/kimi-k2.5 extract --deep --threads 16
      kimi-eagle verify runs/kimi-k2.5 --deep --json | jq '.damage[] | {unit, sample_id, what}'
      kimi-eagle verify states-small --deep
    """
    from pathlib import Path

    from rich.console import Console

    from kimi_eagle import proof
    from kimi_eagle.containers.start import enter
    from kimi_eagle.errors import UsageError
    from kimi_eagle.stages.context import open_context

    if proof.holds_shards(Path(run_path)):
        if stage:
            raise UsageError(f"a folder of shards has no stage {stage}", where=run_path)
        with _Bar(Console(stderr=True), shown=deep and not as_json) as bar:
            report = proof.verify_folder(
                Path(run_path).resolve(), deep=deep, threads=threads, on_bytes=bar
            )
        _tell(report, as_json, f"remove {run_path}'s damaged shards, then the same shards convert")
        return
    ctx = open_context(run_path)
    words = ["verify", str(ctx.run.path), *([stage] if stage else [])]
    words += ["--deep"] if deep else []
    words += [*(["--threads", str(threads)] if threads else []), *(["--json"] if as_json else [])]
    enter(ctx.run, words)
    with _Bar(Console(stderr=True), shown=deep and not as_json) as bar:
        report = proof.verify(ctx, stage=stage, deep=deep, threads=threads, on_bytes=bar)
    _tell(report, as_json, f"kimi-eagle retry {ctx.run.path}")


def _tell(report: Report, as_json: bool, fix: str) -> None:
    """Print, and end with exit code 1 where not all is well."""
    if as_json:
        print_json(report.as_json())
    else:
        _print(report, fix)
    if not report.ok:
        click.get_current_context().exit(1)


def _print(report: Report, fix: str) -> None:
    from rich.console import Console

    from kimi_eagle.display import printable
    from kimi_eagle.record import RIGHTS

    Console().print(_table(report))
    for word, faults in (("damaged", report.damage), ("not looked at", report.unread)):
        for fault in faults[:SHOWN]:
            where = [fault.stage, fault.unit, fault.file or "its record"]
            where += [f"sample {fault.sample_id}"] if fault.sample_id else []
            click.echo(printable(f"{word}: {'  '.join(x for x in where if x)}: {fault.what}"))
        if len(faults) > SHOWN:
            click.echo(f"and {len(faults) - SHOWN} more: see --json")
    for name in report.whole_again:
        click.echo(f"{name} was marked as damaged; every byte of it is right now: mark removed")
    alone = [row for row in report.rows if row.stage == "shards"]  # a folder, no run
    for row in report.rows:
        if row.reason and row.state not in ("skipped", "waiting"):
            click.echo(printable(f"{row.stage}: {row.reason}"))
    if report.strays:
        gc = "" if alone else f": kimi-eagle gc {report.run}"
        click.echo(f"{report.strays} leftovers that no record names{gc}")
    if report.not_marked:
        click.echo(
            f"the run cannot be written ({report.not_marked}): nothing is marked, so `retry` will "
            "find only what is missing or cut short"
        )
    if report.damage:
        click.echo(f"fix: {fix}")
    if report.unread:
        click.echo(f"fix: {RIGHTS}")
    elif not report.damage and not report.deep:
        click.echo("no sample was read: --deep compares every byte")


def _table(report: Report) -> Any:
    from rich import box
    from rich.table import Table

    counted = ("units", "files", "bytes", "ok", "damaged", "open", "freed", "failed", "unread")
    rare = {"failed", "unread"}
    names = [n for n in counted if n not in rare or any(getattr(r, n) for r in report.rows)]
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("stage", "state", *names):
        left = name in ("stage", "state")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in report.rows:
        cells = [f"{getattr(row, n):,}" if getattr(row, n) else "" for n in names]
        table.add_row(row.stage, row.state, *cells)
    return table


class _Bar:
    """Bytes read so far: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, console: Any, *, shown: bool):
        self._console, self._shown = console, shown
        self._progress: Any = None
        self._said = 0.0

    def __enter__(self) -> _Bar:
        if self._shown and self._console.is_terminal:
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.start()
            self._task = self._progress.add_task("", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total)
        elif self._shown:
            import time

            from kimi_eagle.display import PLAIN_SECONDS

            self._said = self._said or time.monotonic()
            if time.monotonic() - self._said >= PLAIN_SECONDS:
                self._said = time.monotonic()
                share = done / max(1, total)
                click.echo(f"{share:4.0%}  {done / 1e9:,.1f} of {total / 1e9:,.1f} GB", err=True)
