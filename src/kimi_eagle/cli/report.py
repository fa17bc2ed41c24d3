"""`kimi-eagle report`: a run, or several, on one page."""

from __future__ import annotations

import click

from kimi_eagle.cli.options import PATH


@click.command()
@click.argument("run_paths", metavar="RUN...", type=PATH, nargs=-1, required=True)
@click.option("--out", metavar="FILE", type=PATH, help="The page of several [runs-compared.html].")
def report(run_paths: tuple[str, ...], out: str | None) -> None:
    """Write RUN/report.html from what there is so far; of several runs, one page beside each other.

    \b
    Examples:
      kimi-eagle report runs/kimi-k2.5
      kimi-eagle report runs/a runs/b runs/c --out abc.html
    """
    from pathlib import Path

    from kimi_eagle.errors import UsageError
    from kimi_eagle.summary import write_comparison, write_report

    if len(run_paths) > 1:
        page = Path(out or "runs-compared.html").absolute()
        write_comparison(run_paths, page)
        click.echo(page)
        return
    if out is not None:
        raise UsageError(
            "--out is for several runs", expected="RUN RUN..., or no --out: RUN/report.html"
        )
    from kimi_eagle.containers.start import enter
    from kimi_eagle.stages.context import open_context

    ctx = open_context(run_paths[0])
    enter(ctx.run, ["report", str(ctx.run.path)])
    write_report(ctx)
    click.echo(ctx.run.report)
