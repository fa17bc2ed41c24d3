"""Which jobs of a run are missing in the queue: the difference between wanted and serving.

For each group: the stages that are not done, how many workers they want, and how many tasks in the
queue serve all of them. A job of `--only STAGE` serves a group only where that stage is all that is
left of it. Follow-up jobs (chain) are replacements, not further workers.
"""

from __future__ import annotations

from kimi_eagle.errors import UsageError
from kimi_eagle.recipe import Recipe
from kimi_eagle.rundir import RunDir
from kimi_eagle.site import Site
from kimi_eagle.slurm import progress
from kimi_eagle.slurm.jobs import (
    SHARED_STAGES,
    Job,
    more_workers,
    too_many,
    wanted_workers,
    whole_group,
)
from kimi_eagle.slurm.live import Live
from kimi_eagle.stages import UPSTREAM


def missing_jobs(
    run: RunDir,
    recipe: Recipe,
    site: Site,
    live: list[Live],
    done: set[str],
    *,
    only: str | None = None,
    more: int = 0,
) -> list[list[Job]]:
    """Jobs to submit now, by group, upstream first."""
    if more:
        planned = [_more(recipe, site, live, done, only, more)]
        return _within(site, live, planned, fixed=True)
    if only and only not in done:
        _needs_upstream(recipe, live, done, only)
    planned = []
    for group, stages in enumerate(recipe.slurm.groups):
        needed = tuple(s for s in stages if s not in done and only in (None, s))
        if needed:
            planned.append(_group(run, recipe, site, live, group, needed))
    return _within(site, live, planned)


def _group(
    run: RunDir, recipe: Recipe, site: Site, live: list[Live], group: int, needed: tuple[str, ...]
) -> list[Job]:
    serving = [x for x in live if x.serving and set(needed) <= set(x.entry["stages"])]
    proven = progress.proven(run, recipe, needed)
    if not serving:
        return whole_group(recipe, site, group, needed, proven=proven)
    first = min(x.entry["link"] for x in serving)
    have = sum(x.serving for x in serving if x.entry["link"] == first)
    lack = wanted_workers(recipe, needed) - have
    return more_workers(recipe, site, group, needed, lack) if lack > 0 else []


def _more(
    recipe: Recipe, site: Site, live: list[Live], done: set[str], only: str | None, count: int
) -> list[Job]:
    """Further workers for the group of the named stage, else for the first with work for them."""
    for group, stages in enumerate(recipe.slurm.groups):
        needed = tuple(s for s in stages if s not in done)
        if SHARED_STAGES & set(needed) and only in (None, *needed):
            return more_workers(recipe, site, group, needed, count)
    what = f"{only} has" if only else "no stage has"
    raise UsageError(
        f"{what} work for more workers",
        where="--more",
        expected=f"one of {', '.join(sorted(SHARED_STAGES))} that is not done",
    )


def _needs_upstream(recipe: Recipe, live: list[Live], done: set[str], only: str) -> None:
    """A job whose gate nobody will open would only fail, at the price of its start."""
    at_work = {s for x in live for s in x.entry["stages"]}
    todo = [s for s in UPSTREAM[only] if s not in done | at_work]
    if todo:
        raise UsageError(
            f"{only} reads {', '.join(todo)}, which is not done, and no job of it is queued",
            where="--only",
            fix=f"submit --only {todo[0]} first, or leave --only out",
        )


def _within(
    site: Site, live: list[Live], planned: list[list[Job]], *, fixed: bool = False
) -> list[list[Job]]:
    """Fewer workers where the site's max_jobs leaves no room; UsageError where that is not enough.

    fixed: the number was typed by a person.
    """
    room = None if site.max_jobs is None else site.max_jobs - sum(len(x.tasks) for x in live)
    while room is not None and (total := _tasks(planned)) > room:
        largest = max((job for jobs in planned for job in jobs), key=lambda job: job.tasks)
        if fixed or largest.tasks == 1:
            raise too_many(site.max_jobs - room + total, site)
        fewer = max(1, largest.tasks - (total - room))
        planned = [[j.resized(fewer) if j is largest else j for j in jobs] for jobs in planned]
    return planned


def _tasks(planned: list[list[Job]]) -> int:
    return sum(job.tasks for jobs in planned for job in jobs)
