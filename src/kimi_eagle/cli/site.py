"""Commands for site files: `kimi-eagle site init`, `kimi-eagle site check`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from kimi_eagle.cli.options import PATH as _PATH
from kimi_eagle.cli.options import json_option, print_json

if TYPE_CHECKING:
    from kimi_eagle.slurm.sitetools import Check


@click.group()
def site() -> None:
    """Site files: where a run takes place."""


@site.command("init")
@click.option("--out", type=_PATH, help="File to write [default: a site of the cluster's name].")
@click.option("--partition", help="Partition to use [default: the one with most GPUs a node].")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@json_option
def site_init(out: str | None, partition: str | None, force: bool, as_json: bool) -> None:
    """Write a site file for the cluster that this machine belongs to.

    \b
    Examples:
      kimi-eagle site init
      kimi-eagle site init --partition gpu --out mycluster.toml
    """
    import shlex
    from pathlib import Path

    from kimi_eagle.slurm import siteinit

    target = Path(out).expanduser() if out else siteinit.default_path()
    path, seen = siteinit.write_site(target, partition, force=force)
    if as_json:
        print_json({"site": path, "partition": seen.partitions[0].name, "unknown": seen.unknown})
        return
    for note in seen.unknown:
        click.echo(f"not found out: {note}")
    click.echo(f"{path}\nnow: kimi-eagle site check {shlex.quote(str(path))}")


@site.command("check")
@click.argument("site_name", metavar="SITE", type=_PATH)
@click.argument("recipe", required=False, type=_PATH)
@click.option("--run", "run_path", type=_PATH, help="Run directory [default: runs/NAME].")
@json_option
def site_check(site_name: str, recipe: str | None, run_path: str | None, as_json: bool) -> None:
    """Ask Slurm whether it would take the jobs of RECIPE; look at space and limits.

    Nothing is queued. Without RECIPE a job of each kind is tried. Exit code 1 on a problem.

    \b
    Examples:
      kimi-eagle site check mycluster
      kimi-eagle site check ./mycluster.toml jobs/kimi-k2.5.toml
    """
    from pathlib import Path

    from kimi_eagle import recipe as recipes
    from kimi_eagle.site import load_site
    from kimi_eagle.slurm import sitecheck

    loaded = load_site(site_name)
    wanted = recipes.load(recipe) if recipe else None
    name = wanted.name if wanted else "site-check"
    run = Path(run_path or Path("runs") / name).expanduser().resolve()
    found = sitecheck.check_site(loaded, wanted, run)
    problems = [c for c in found if c.state == "problem"]
    if as_json:
        print_json(
            {
                "ok": not problems,
                "site": loaded.name,
                "recipe": recipe,
                "run": run,
                "checks": [c.__dict__ for c in found],
            }
        )
    else:
        _print_table(found)
    sys.exit(1 if problems else 0)


def _print_table(found: list[Check]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "problem": "bold red", "unknown": "yellow"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("", "check", "what was found", "to change"):
        table.add_column(title, overflow="fold")
    # What is said of several jobs alike is said once.
    names: dict[tuple[str, str, str], list[str]] = {}
    for check in found:
        names.setdefault((check.state, check.text, check.key), []).append(check.name)
    for (state, text, key), checks in names.items():
        # Text, not markup: Slurm's words may hold brackets.
        cells = [Text(c) for c in ("\n".join(checks), text, key)]
        table.add_row(Text(state, style=colours[state]), *cells)
    Console().print(table)
