"""`kimi-eagle submit`: the whole run, or a part of it, as Slurm jobs."""

from __future__ import annotations

from typing import Any

import click

from kimi_eagle.cli.options import PATH as _PATH
from kimi_eagle.cli.options import json_option, print_json


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
    import shlex
    import signal
    from pathlib import Path

    from kimi_eagle import recipe as recipes
    from kimi_eagle.begin import begin, broken_rules
    from kimi_eagle.errors import UsageError
    from kimi_eagle.rundir import RunDir, create_run
    from kimi_eagle.site import load_site
    from kimi_eagle.slurm import emit as emitting
    from kimi_eagle.slurm import guard
    from kimi_eagle.slurm import here as allocation
    from kimi_eagle.slurm.submit import submit as submit_run

    modes = [dry_run, emit is not None, here, more is not None]
    if sum(modes) > 1:
        raise UsageError("--dry-run, --emit, --here and --more exclude each other")
    for option, value in (("--emit", emit), ("--run", run_path), ("--site", site_name)):
        if value == "":
            raise UsageError("an empty name (an unset variable?)", where=option)
    if only is not None and only not in recipes.STAGES:
        raise UsageError(f"unknown stage {only!r}", expected=f"one of {', '.join(recipes.STAGES)}")
    loaded, site = recipes.load(recipe), load_site(site_name)
    target = Path("runs") / loaded.name if run_path is None else Path(run_path)
    if dry_run:
        jobs = emitting.dry_run(RunDir(target.resolve()), loaded, site, only=only)
        if as_json:
            print_json(jobs)
        else:
            click.echo("\n".join(f"# {j['file']}: {j['what']}\n{j['text']}" for j in jobs))
        return
    run = create_run(target)
    if emit is not None:
        guard.before_following(run, loaded)
        for line in broken_rules(loaded, site):
            click.echo(f"warning: {line}", err=True)
        begin(run, loaded, Path(recipe), site, judged=False)
        written = emitting.emit(run, loaded, site, Path(emit), only=only)
        if as_json:
            print_json({"run": str(run.path), "files": written})
        else:
            click.echo("\n".join(map(str, written)))
            click.echo("now: " + shlex.join(["bash", str(Path(emit) / "submit.sh"), str(target)]))
        return
    recipes.check_inputs(loaded)
    if here:
        allocation.work_here(run, loaded, Path(recipe), site, only=only)
        return
    # A lost connection takes back what was queued, as Ctrl-C does.
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    source = str(Path(site_name).resolve()) if Path(site_name).is_file() else site_name
    found = submit_run(
        run, loaded, Path(recipe), site, site_source=source, only=only, more=more or 0
    )
    for warning in found["warnings"]:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        print_json({"run": str(run.path), **found})
    else:
        _tell(found, target)


def _tell(found: dict[str, Any], target: Any) -> None:
    """One line a job, then what to type next."""
    import shlex

    for word, entries in (("submitted", found["submitted"]), ("in the queue", found["adopted"])):
        for entry in entries:
            tasks = entry.get("live", entry["tasks"])
            count = f" x {tasks}" if tasks > 1 else ""
            after = f" after {', '.join(entry['after'])}" if entry["after"] else ""
            leaving = f"; {entry['leaving']} leaving" if entry.get("leaving") else ""
            click.echo(
                f"{word:<12} {entry['job_id']:<8} {', '.join(entry['stages'])}"
                f" ({entry['role']}{count}){after}{leaving}"
            )
    if not found["submitted"] and not found["adopted"]:
        click.echo("nothing is left to do")
    path = shlex.quote(str(target))
    click.echo(f"kimi-eagle status {path} --watch    kimi-eagle logs {path} -f")
