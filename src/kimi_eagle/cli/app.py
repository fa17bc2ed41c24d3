"""The command line. Every command imports its room inside the function: `--help` stays quick.

Exit codes: 0 done, 1 a check or a run failed, 2 wrong use, 130 stopped by Ctrl-C. Errors are one
line on standard error; `--debug` shows the traceback.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from kimi_eagle import __version__
from kimi_eagle.cli import (
    benchmark,
    check,
    export,
    image,
    lock,
    report,
    selftest,
    shards,
    site,
    submit,
    tools,
    verify,
    watch,
)
from kimi_eagle.cli.options import PATH as _PATH
from kimi_eagle.cli.options import json_option, print_json


class _Group(click.Group):
    """Turns our errors into one line and an exit code; suggests the nearest command."""

    def invoke(self, ctx: click.Context) -> Any:
        from kimi_eagle.errors import KimiEagleError

        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:  # `kimi-eagle logs RUN | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("stopped; type the same command again to go on", err=True)
            ctx.exit(130)
        except Exception as e:
            ours = isinstance(e, KimiEagleError)
            # A stage's log is read by whoever mends the fault: there a traceback is wanted.
            if ctx.params.get("debug") or (ctx.invoked_subcommand == "stage" and not ours):
                raise
            click.echo(f"error: {_line(e)}", err=True)
            ctx.exit(e.exit_code if ours else 1)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"no such command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)


def _line(error: Exception) -> str:
    """One line about any error."""
    from kimi_eagle.errors import KimiEagleError

    if isinstance(error, KimiEagleError):
        return error.line()
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text}; a fault of kimi-eagle: --debug shows where"


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kimi-eagle")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(debug: bool) -> None:
    """Train and benchmark an EAGLE-3 draft model for a local verifier.

    \b
    Examples:
      kimi-eagle run jobs/smollm2.toml          all stages on this machine
      kimi-eagle submit jobs/kimi-k2.5.toml --site mycluster
                                                all stages as Slurm jobs
      kimi-eagle status runs/smollm2            how far it is
      kimi-eagle explain runs/smollm2           what would be done again, and why
      kimi-eagle benchmark jobs/smollm2.toml --draft DIR
    """


# -- doing -------------------------------------------------------------------------------------


@main.command()
@click.argument("recipe", type=_PATH)
@click.option("--run", "run_path", type=_PATH, help="Run directory [default: runs/NAME].")
@click.option("--until", help="Stop after this stage.")
@click.option("--image", type=_PATH, help="Work in this pinned image (Apptainer).")
@click.option("--quiet", is_flag=True, help="No progress, only the result.")
@json_option
def run(
    recipe: str,
    run_path: str | None,
    until: str | None,
    image: str | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Do all stages on this machine; type it again to go on after any interruption.

    \b
    Examples:
      kimi-eagle run jobs/smollm2.toml
      kimi-eagle run jobs/smollm2.toml --run /scratch/me/try1 --until extract
      kimi-eagle run jobs/smollm2.toml --image /shared/images/kimi-eagle-cpu.sif
    """
    from pathlib import Path

    from rich.console import Console

    from kimi_eagle import begin, display, local
    from kimi_eagle import recipe as recipes
    from kimi_eagle.containers import start
    from kimi_eagle.errors import UsageError
    from kimi_eagle.rundir import create_run
    from kimi_eagle.stages.context import Context
    from kimi_eagle.summary import headline, stage_rows

    if until and until not in recipes.STAGES:
        raise UsageError(f"unknown stage {until!r}", expected=f"one of {recipes.STAGES}")
    if image == "":
        raise UsageError("an empty name (an unset variable?)", where="--image")
    loaded = recipes.load(recipe)
    target = Path("runs") / loaded.name if run_path is None else Path(run_path)
    opened = create_run(target)
    if not start.inside() and (found := begin.use_image(opened, loaded, image)):
        start.write(opened, loaded, None, found)
        for warning in begin.warnings(opened, found):
            click.echo(f"warning: {warning}", err=True)
        path = Path(recipe).resolve()
        words = ["run", str(path), "--run", str(opened.path)]
        words += ["--until", until] if until else []
        words += [*(["--quiet"] if quiet else []), *(["--json"] if as_json else [])]
        start.enter(opened, words, see=path, recipe=loaded)
    console = Console(stderr=as_json)
    with display.Bars(console, quiet=quiet or as_json) as bars:
        local.run_stages(opened, loaded, Path(recipe), until, bars)
    rows = stage_rows(Context(opened, loaded))
    done = rows[-1]["state"] == "done"
    result = headline(opened) if done else None
    if as_json:
        print_json({"run": str(opened.path), "stages": rows, "result": result})
        return
    console.print(display.table(rows))
    if result:
        speed = result["tokens_per_second"]
        console.print(
            f"acceptance length {result['acceptance_length']:.2f} at k={result['k']}, "
            f"outputs identical: {result['identical_outputs']}, "
            f"{speed['baseline']:.1f} -> {speed['draft']:.1f} tok/s\n"
            f"draft   {target / 'draft'}\nreport  {target / 'report.html'}",
            highlight=False,
            soft_wrap=True,
        )


@main.command()
@click.argument("stage_name", metavar="STAGE")
@click.option("--run", "run_path", type=_PATH, required=True, help="Run directory.")
def stage(stage_name: str, run_path: str) -> None:
    """Work on one stage of a run: what a job executes inside the container."""
    # OpenMP reads this once, when torch is loaded. Threads that spin at barriers starve each other
    # as soon as anything else runs on the cores: 11 tok/s instead of 139 was seen; alone no change.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from kimi_eagle.stages.session import run_stage

    sys.exit(run_stage(run_path, stage_name))


# -- looking -----------------------------------------------------------------------------------


@main.command()
@click.argument("run_path", metavar="RUN", type=_PATH)
@click.option("--recipe", type=_PATH, help="Recipe to compare with [default: the run's].")
@json_option
def explain(run_path: str, recipe: str | None, as_json: bool) -> None:
    """What `run` would do now, and which change makes it necessary."""
    from pathlib import Path

    from kimi_eagle import recipe as recipes
    from kimi_eagle.containers.start import enter
    from kimi_eagle.rundir import open_run
    from kimi_eagle.stages.context import Context
    from kimi_eagle.survey import explain as explain_run

    opened = open_run(run_path)
    own = opened.recipe_path()
    source = recipe or (own if own and own.is_file() else None)
    words = ["explain", str(opened.path), *(["--json"] if as_json else [])]
    path = Path(source).resolve() if source else None
    current = recipes.load(source) if source else opened.recipe()
    words += ["--recipe", str(path)] if path else []
    enter(opened, words, see=path, recipe=current)
    found = explain_run(Context(opened, current))
    if as_json:
        print_json(found)
        return
    for entry in found:
        text = entry["reason"] or f"{entry['units'] - entry['open']}/{entry['units']} units done"
        click.echo(f"{entry['stage']:<10} {entry['state']:<8} {text}")
        for change, count in entry.get("changes", {}).items():
            click.echo(f"{'':<12}{change}  ({count} unit{'s' if count > 1 else ''})")


# -- mending and tidying ------------------------------------------------------------------------


@main.command()
@click.argument("run_path", metavar="RUN", type=_PATH)
@json_option
def retry(run_path: str, as_json: bool) -> None:
    """Open failed and damaged units again; `run` then does only those.

    Damaged: what `verify` or a training found and marked, and files that are gone or cut short.
    """
    from kimi_eagle import housekeeping
    from kimi_eagle.containers.start import enter
    from kimi_eagle.stages.context import open_context

    ctx = open_context(run_path)
    enter(ctx.run, ["retry", str(ctx.run.path), *(["--json"] if as_json else [])])
    found = housekeeping.retry(ctx)
    if as_json:
        print_json(found)
    else:
        words = {"held": "hold lifted", "draft": "not as it was exported: put there anew by `run`"}
        warnings = found.pop("warnings", [])
        for name, count in found.items():
            what = words.get(name, f"{count} unit{'s'[: count > 1]} open again")
            click.echo(f"{name:<10} {what}")
        for text in warnings:
            click.echo(f"warning: {text}", err=True)
        click.echo("now: kimi-eagle run or submit" if found else "nothing failed, damaged or held")


@main.command()
@click.argument("run_path", metavar="RUN", type=_PATH)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
def gc(run_path: str, dry_run: bool, as_json: bool) -> None:
    """Remove what no current key needs: results of earlier recipes, leftovers of killed workers."""
    from kimi_eagle import housekeeping
    from kimi_eagle.containers.start import enter
    from kimi_eagle.stages.context import open_context

    ctx, switches = open_context(run_path), (("--dry-run", dry_run), ("--json", as_json))
    enter(ctx.run, ["gc", str(ctx.run.path), *(name for name, on in switches if on)])
    found = housekeeping.gc(ctx, dry_run=dry_run)
    if as_json:
        print_json(found)
    else:
        verb = "would remove" if dry_run else "removed"
        click.echo(f"{verb} {found['removed']} files, {found['bytes'] / 1e6:.1f} MB")


@main.command()
@click.argument("run_path", metavar="RUN", type=_PATH)
@click.option("--hidden", is_flag=True, required=True, help="The hidden states of a finished run.")
def clean(run_path: str, hidden: bool) -> None:
    """Free the disk space of a finished run's hidden states."""
    from kimi_eagle import housekeeping
    from kimi_eagle.containers.start import enter
    from kimi_eagle.stages.context import open_context

    ctx = open_context(run_path)
    enter(ctx.run, ["clean", str(ctx.run.path), "--hidden"])
    click.echo(f"freed {housekeeping.clean_hidden(ctx)['bytes'] / 1e6:.1f} MB")


for command in (
    check.check,
    submit.submit,
    watch.status,
    watch.logs,
    watch.cancel,
    watch.accept,
    verify.verify,
    lock.reproduce,
    lock.diff,
    export.export,
    benchmark.benchmark,
    report.report,
    image.image,
    site.site,
    selftest.selftest,
    tools.verifier,
    tools.vocab,
    shards.shards,
):
    main.add_command(command)


if __name__ == "__main__":
    main()
