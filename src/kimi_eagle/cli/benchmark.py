"""`kimi-eagle benchmark`: any draft on a recipe's held-out prompts, without a run."""

from __future__ import annotations

import click

from kimi_eagle.cli.options import PATH, json_option, print_json


@click.command()
@click.argument("recipe", type=PATH)
@click.option("--draft", required=True, type=PATH, help="Directory of a draft that vLLM loads.")
@click.option(
    "--out", type=PATH, help="Where results go [default: bench-NAME; of runs/a/draft bench-a]."
)
@click.option("--dry-run", is_flag=True, help="Say what would be loaded and measured, and stop.")
@json_option
def benchmark(recipe: str, draft: str, out: str | None, dry_run: bool, as_json: bool) -> None:
    """Measure any draft that vLLM loads on the recipe's held-out prompts.

    The drafts of [benchmark] against come beside it. Measurements that were done are not made
    again: the same command goes on after a stop.

    \b
    Examples:
      kimi-eagle benchmark jobs/smollm2.toml --draft runs/smollm2/draft --dry-run
      kimi-eagle benchmark jobs/smollm2.toml --draft runs/smollm2/draft
    """
    from pathlib import Path

    from kimi_eagle import recipe as recipes
    from kimi_eagle.bench import plan, run_benchmark, telling
    from kimi_eagle.bench.workload import load_workload
    from kimi_eagle.data.template import ChatTemplate
    from kimi_eagle.verifier import open_verifier

    loaded = recipes.load(recipe)
    verifier = open_verifier(
        loaded.verifier.path, trust_remote_code=loaded.verifier.trust_remote_code
    )
    own = Path(draft).resolve()
    folder = Path(out or default_out(draft)).resolve()
    workload = load_workload(loaded, ChatTemplate(verifier, loaded.template))
    if dry_run:
        loads = plan.make_loads(loaded, verifier, plan.open_drafts(loaded, verifier, own), workload)
        if as_json:
            print_json(plan.as_data(loads, folder / "measurements"))
        else:
            click.echo("\n".join(plan.told(loads, folder / "measurements")))
        return
    results = run_benchmark(
        loaded,
        verifier,
        own,
        folder,
        workload=workload,
        results=folder / "results.json",
        on_plan=lambda lines: click.echo("\n".join(lines), err=True),
    )
    if as_json:
        print_json(results)
    else:
        click.echo("\n".join([*telling.summary(results), str(folder / "results.json")]))


def default_out(draft: str) -> str:
    """`runs/a/draft` -> `bench-a`: drafts of several runs do not share results.json."""
    import os

    from kimi_eagle.recipe_benchmark import name_of_draft

    return f"bench-{name_of_draft(os.path.abspath(draft))}"
