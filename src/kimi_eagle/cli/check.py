"""`check`: everything that can be known to be wrong before a GPU is used."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from kimi_eagle.cli.options import PATH, json_option, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from kimi_eagle.contracts import Verdict

NAMED = 12
"""Rules that run later are named up to this many with the same reason; --all has a line each."""


@click.command()
@click.argument("recipe", type=PATH)
@click.option("--site", help="Site file or name: memory, time limits and GPUs are judged by it.")
@click.option("--run", "run_path", type=PATH, help="A run of this recipe [default: runs/NAME].")
@click.option("--draft", type=PATH, help="Judge this draft directory against the recipe.")
@click.option("--full", is_flag=True, help="Also rules that import torch, transformers or vLLM.")
@click.option("--all", "show_all", is_flag=True, help="A line for every rule.")
@json_option
def check(
    recipe: str,
    site: str | None,
    run_path: str | None,
    draft: str | None,
    full: bool,
    show_all: bool,
    as_json: bool,
) -> None:
    """Judge every rule of a recipe, its verifier, its site and its run that can be judged here.

    A rule is ok, a problem, or runs later (the stage that will judge it is named). Exit code 1
    where there is a problem. What each rule is for: kimi_eagle/contracts/RULES.md.

    \b
    Examples:
      kimi-eagle check jobs/kimi-k2.5.toml --site mycluster
      kimi-eagle check jobs/smollm2.toml --full
      kimi-eagle check jobs/kimi-k2.5.toml --draft runs/kimi-k2.5/draft
      kimi-eagle check jobs/kimi-k2.5.toml --json | jq '.rules[] | select(.state == "problem")'
    """
    from pathlib import Path

    from rich.console import Console

    from kimi_eagle import contracts
    from kimi_eagle import recipe as recipes
    from kimi_eagle.errors import UsageError
    from kimi_eagle.rundir import RunDir
    from kimi_eagle.site import load_site

    loaded = recipes.load(recipe)
    folder = Path("runs") / loaded.name if run_path is None else Path(run_path)
    run = RunDir(folder.resolve())
    if run_path is not None and not run.spec.is_file():
        raise UsageError("not a run directory (no run.json)", where=folder)
    if draft is not None and not Path(draft).is_dir():
        raise UsageError("no such directory", where=draft, expected="a draft directory")
    facts = contracts.Facts(
        loaded,
        site=load_site(site) if site else None,
        run=run if run.spec.is_file() else None,
        draft=Path(draft).resolve() if draft else None,
        heavy=full,
    )
    verdicts = contracts.judge(facts, contracts.rules().values())
    if as_json:
        counts = {s: sum(v.state == s for v in verdicts) for s in {v.state for v in verdicts}}
        print_json({"recipe": loaded.name, "counts": counts, "rules": [v.data() for v in verdicts]})
    else:
        # In a file or a pipe a path that is broken over lines can be neither copied nor searched.
        wide = None if sys.stdout.isatty() else 240
        Console(width=wide, soft_wrap=False).print(_table(verdicts, show_all))
        click.echo(_last_line(verdicts))
    if any(v.state == "problem" for v in verdicts):
        raise SystemExit(1)


def _table(verdicts: list[Verdict], show_all: bool) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("rule", "state", ""):
        table.add_column(column, overflow="fold")
    styles = {"ok": "green", "problem": "bold red", "accepted": "yellow"}
    later: dict[str, list[str]] = {}
    for v in verdicts:
        if v.state == "later" and not show_all:
            later.setdefault(v.text, []).append(v.rule.id)
        elif show_all or v.problems or (v.state == "ok" and v.text):
            lines = [_line(p.what, p.where, p.expected, p.fix or v.rule.fix) for p in v.problems]
            body = "\n".join(lines) or v.text
            table.add_row(v.rule.id, Text(v.state, styles.get(v.state, "dim")), Text(body))
    for text, ids in later.items():
        rules = ids[0] if len(ids) == 1 else f"{len(ids)} rules"
        names = f": {', '.join(ids)}" if 1 < len(ids) <= NAMED else ""
        table.add_row(rules, Text("later", "dim"), Text(text + names))
    return table


def _line(what: str, where: str, expected: str, fix: str) -> str:
    from kimi_eagle.errors import KimiEagleError

    return KimiEagleError(what, where=where, expected=expected, fix=fix).line()


def _last_line(verdicts: list[Verdict]) -> str:
    names = {
        "ok": "hold",
        "problem": "broken",
        "accepted": "accepted",
        "later": "judged later",
        "not concerned": "do not concern this recipe",
    }
    counts = {s: sum(v.state == s for v in verdicts) for s in names}
    return ", ".join(f"{counts[s]} {words}" for s, words in names.items() if counts[s])
