"""`kimi-eagle submit`: the whole run, or a part of it, as Slurm jobs."""

from __future__ import annotations

from typing import Any

import click

from kimi_eagle.cli_options import PATH as _PATH
from kimi_eagle.cli_options import json_option, print_json


@click.command()
@click.argument("recipe", type=_PATH)
@click.option("--site", "site_name", required=True, help="Site file, or the name of a known site.")
@click.option("--run", "run_path", type=_PATH, help="Run directory [default: runs/NAME].")
@click.option("--only", metavar="STAGE", help="Only the job of this stage.")
@click.option("--more", type=click.IntRange(1, 10_000), default=None, help="Add N workers.")
@click.option("--dry-run", is_flag=True, help="Print the jobs and their sbatch files; do nothing.")
@click.option(
    "--emit", type=_PATH, metavar="DIR", help="Write the sbatch files, to submit by hand."
)
@click.option("--here", is_flag=True, help="Inside an allocation: work here, submit nothing.")
@json_option
def submit(
    recipe: str,
    site_name: str,
    run_path: str | None,
    only: str | None,
    more: int | None,
    dry_run: bool,
    emit: str | None,
    here: bool,
    as_json: bool,
) -> None:
    """Submit the jobs that a run still needs; type it again to go on after anything.

    \b
    Examples:
      kimi-eagle submit jobs/kimi-k2.5.toml --site mycluster
      kimi-eagle submit jobs/kimi-k2.5.toml --site mycluster --dry-run
      kimi-eagle submit jobs/kimi-k2.5.toml --site mycluster --only extract
      kimi-eagle submit jobs/kimi-k2.5.toml --site mycluster --more 4
      salloc -N4 --gpus-per-node=8 kimi-eagle submit jobs/kimi-k2.5.toml --site mycluster --here
    """
    from pathlib import Path

    from kimi_eagle import recipe as recipes
    from kimi_eagle.errors import UsageError
    from kimi_eagle.rundir import RunDir, create_run, follow
    from kimi_eagle.site import load_site
    from kimi_eagle.slurm import emit as emitting
    from kimi_eagle.slurm import here as allocation
    from kimi_eagle.slurm.submit import submit as submit_run

    if sum(map(bool, (dry_run, emit, here))) > 1 or (more and (dry_run or emit or here)):
        raise UsageError("--dry-run, --emit, --here and --more exclude each other")
    if only and only not in recipes.STAGES:
        raise UsageError(f"unknown stage {only!r}", expected=f"one of {', '.join(recipes.STAGES)}")
    loaded, site = recipes.load(recipe), load_site(site_name)
    target = Path("runs") / loaded.name if run_path is None else Path(run_path)
    if dry_run:
        click.echo(emitting.dry_run(RunDir(target.resolve()), loaded, site, only=only))
        return
    run = create_run(target)
    if emit:
        follow(run, loaded, Path(recipe))
        for path in emitting.emit(run, loaded, site, Path(emit), only=only):
            click.echo(path)
        click.echo(f"now: bash {Path(emit) / 'submit.sh'} {target}")
        return
    recipes.check_inputs(loaded)
    if here:
        allocation.work_here(run, loaded, Path(recipe), site, only=only)
        return
    found = submit_run(run, loaded, Path(recipe), site, only=only, more=more or 0)
    if as_json:
        print_json({"run": str(run.path), **found})
    else:
        _tell(found, target)


def _tell(found: dict[str, Any], target: Any) -> None:
    """One line a job, then what to type next."""
    for word, entries in (("submitted", found["submitted"]), ("in the queue", found["adopted"])):
        for entry in entries:
            count = f" x {entry['tasks']}" if entry["tasks"] > 1 else ""
            after = f" after {', '.join(entry['after'])}" if entry["after"] else ""
            click.echo(
                f"{word:<12} {entry['job_id']:<8} {', '.join(entry['stages'])}"
                f" ({entry['role']}{count}){after}"
            )
    if not found["submitted"] and not found["adopted"]:
        click.echo("nothing is left to do")
    click.echo(f"kimi-eagle status {target} --watch    kimi-eagle logs {target} -f")
