"""Which jobs of a run are missing in the queue: the difference between wanted and serving.

For each group: the stages that are not done, how many workers they want, and how many tasks in the
queue serve them. What counts is which stages a job does, not which group it was submitted for: jobs
of `--only STAGE`, and those of an earlier grouping, serve as well. Follow-up jobs (chain) are
replacements, not further workers.
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
) -> list[Job]:
    """Jobs to submit now, upstream first."""
    if more:
        planned = _more(run, recipe, site, live, done, only, more)
        return _within(site, live, planned, fixed=True)
    if only and only not in done:
        _needs_upstream(live, done, only)
    planned = []
    for group, stages in enumerate(recipe.slurm.groups):
        needed = tuple(s for s in stages if s not in done and only in (None, s))
        if needed:
            planned += _group(run, recipe, site, live, group, needed)
    return _within(site, live, planned)


def _group(
    run: RunDir, recipe: Recipe, site: Site, live: list[Live], group: int, needed: tuple[str, ...]
) -> list[Job]:
    main = SHARED_STAGES & set(needed) or set(needed)
    serving = [x for x in live if x.serving and main <= x.stages]
    proven = progress.proven(run, recipe, needed)
    if not serving:
        return whole_group(recipe, site, group, needed, proven=proven)
    first = min(x.entry["link"] for x in serving)
    have = sum(x.serving for x in serving if x.entry["link"] == first)
    wanted = wanted_workers(recipe, needed)
    if have < wanted:
        led = proven or any(x.entry["role"] == "canary" for x in serving)
        jobs = [] if led else whole_group(recipe, site, group, needed)[:1]
        if rest := wanted - have - len(jobs):
            jobs += more_workers(recipe, site, group, needed, rest)
        return jobs
    covered = {s for x in live if x.serving for s in x.stages}
    rest_stages = tuple(s for s in needed if s not in covered)
    return whole_group(recipe, site, group, rest_stages) if rest_stages else []


def _more(
    run: RunDir,
    recipe: Recipe,
    site: Site,
    live: list[Live],
    done: set[str],
    only: str | None,
    count: int,
) -> list[Job]:
    """Further workers for the group of the named stage, else for the first with work for them."""
    for group, stages in enumerate(recipe.slurm.groups):
        needed = tuple(s for s in stages if s not in done)
        main = SHARED_STAGES & set(needed)
        if main and only in (None, *needed):
            at_work = any(main <= x.stages for x in live)
            if not at_work and not progress.proven(run, recipe, needed):
                raise UsageError(
                    f"{', '.join(main)} has no job in the queue that others could join",
                    where="--more",
                    fix="submit first, or set slurm.workers in the recipe",
                )
            return more_workers(recipe, site, group, needed, count)
    what = f"{only} has" if only else "no stage has"
    raise UsageError(
        f"{what} work for more workers",
        where="--more",
        expected=f"one of {', '.join(sorted(SHARED_STAGES))} that is not done",
    )


def _needs_upstream(live: list[Live], done: set[str], only: str) -> None:
    """A job whose gate nobody will open would only fail, at the price of its start."""
    at_work = {s for x in live for s in x.stages}
    todo = [s for s in UPSTREAM[only] if s not in done | at_work]
    if todo:
        raise UsageError(
            f"{only} reads {', '.join(todo)}, which is not done, and no job of it is queued",
            where="--only",
            fix=f"submit --only {todo[0]} first, or leave --only out",
        )


def _within(site: Site, live: list[Live], planned: list[Job], *, fixed: bool = False) -> list[Job]:
    """Fewer workers, or none beside those at work, where the site's max_jobs leaves no room.

    UsageError where a job without which its stage stands still does not fit, or where the number
    was typed by a person (fixed).
    """
    if site.max_jobs is None:
        return planned
    room = site.max_jobs - sum(len(x.tasks) for x in live)
    while (over := sum(job.tasks for job in planned) - room) > 0:
        workers = [job for job in planned if job.role == "workers"]
        if fixed or not workers:
            raise too_many(site.max_jobs + over, site)
        largest = max(workers, key=lambda job: job.tasks)
        fewer = max(0, largest.tasks - over)
        planned = [j.resized(fewer) if j is largest else j for j in planned]
        planned = [j for j in planned if j.tasks]
    return planned
