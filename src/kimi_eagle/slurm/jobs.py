"""Which jobs a recipe needs on a site: groups, canary first, arrays, chains. No Slurm is asked.

A group with regenerate or extract in it and more than one worker becomes a canary and arrays of
the others; any other group is one job. What is here depends on recipe and site alone, so that
--dry-run, --emit, `site check` and the real submit speak of the same jobs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kimi_eagle.errors import UsageError
from kimi_eagle.recipe import STAGES, Recipe
from kimi_eagle.site import Site, minutes
from kimi_eagle.slurm.names import waiting_name

SHARED_STAGES = frozenset({"regenerate", "extract"})
"""Stages of many units, which several workers do side by side."""

LOADS_IN_A_JOB = 3
"""A job shorter than this many engine loads would spend its time loading."""

SLURM_MAX_ARRAY = 1001
"""Slurm's default MaxArraySize (slurm.conf, 22.05), used where the site file names none."""


@dataclass(frozen=True)
class Job:
    """One sbatch call: a job, or an array of `tasks` equal ones."""

    group: int
    role: str
    """canary, workers or single; host.sh and the stage read it."""
    stages: tuple[str, ...]
    name: str
    tasks: int
    nodes: int
    gpus: int
    """GPUs a node; 0 for a job on CPUs."""
    minutes: int
    grace: int
    """Seconds before the time limit at which host.sh is told."""
    link: int = 0
    """0, or the number of a follow-up job that takes over what its predecessor left."""
    final: bool = False
    """Whether the run is finished when this job is done."""

    @property
    def file_name(self) -> str:
        """`1-regenerate.canary.sbatch`: for --emit."""
        role = "" if self.role == "single" else f".{self.role}"
        link = f".{self.link}" if self.link else ""
        return f"{self.group + 1}-{self.stages[0]}{role}{link}.sbatch"


def plan_jobs(
    recipe: Recipe,
    site: Site,
    groups: list[int],
    *,
    only: str | None = None,
    proven: frozenset[int] = frozenset(),
) -> list[list[Job]]:
    """The jobs of these groups, upstream first, each in the order in which they are submitted.

    only: one stage instead of its whole group. proven: groups whose first unit is done, which need
    no canary. Raises UsageError where a time limit is too short, and lowers the number of workers
    to what the site's max_jobs leaves room for.
    """
    count = recipe.slurm.workers
    while True:
        planned = [_group(recipe, site, g, count, only, g in proven) for g in groups]
        total = sum(job.tasks for jobs in planned for job in jobs)
        if site.max_jobs is None or total <= site.max_jobs or count == 1:
            break
        count -= 1
    if site.max_jobs is not None and total > site.max_jobs:
        raise UsageError(
            f"{total} jobs are needed at least",
            where=f"site {site.name}: max_jobs = {site.max_jobs}",
            fix="lower chain, or submit with --only STAGE",
        )
    return planned


def more_workers(recipe: Recipe, site: Site, group: int, count: int) -> list[Job]:
    """Jobs for `count` further workers of a group that is under way."""
    stages = recipe.slurm.groups[group]
    return _arrays(_job(recipe, site, group, "workers", stages), count, site)


def _group(
    recipe: Recipe, site: Site, group: int, workers: int, only: str | None, proven: bool
) -> list[Job]:
    stages = (only,) if only else recipe.slurm.groups[group]
    if workers == 1 or not SHARED_STAGES & set(stages):
        single = _job(recipe, site, group, "single", stages)
        return [_link(single, n) for n in range(site.chain + 1)]
    worker = _job(recipe, site, group, "workers", stages)
    if proven:
        jobs = _arrays(worker, workers, site)
    else:
        jobs = [_job(recipe, site, group, "canary", stages)]
        jobs += _arrays(worker, workers - 1, site)
    for link in range(1, site.chain + 1):
        jobs += _arrays(_link(worker, link), workers, site)
    return jobs


def _link(job: Job, link: int) -> Job:
    return replace(job, link=link)


def _arrays(job: Job, count: int, site: Site) -> list[Job]:
    """As few arrays as MaxArraySize allows; an array of one is a plain job."""
    most = site.max_array or SLURM_MAX_ARRAY  # indices run from 0 to MaxArraySize - 1
    sizes = [min(most, count - start) for start in range(0, count, most)]
    return [replace(job, tasks=size) for size in sizes]


def _job(recipe: Recipe, site: Site, group: int, role: str, stages: tuple[str, ...]) -> Job:
    section = recipe.slurm
    limit = max(minutes(site.times.get(s, site.time)) for s in stages)
    loads = LOADS_IN_A_JOB * section.engine_load_minutes
    if limit < loads and not set(stages) <= {"prepare", "vocab"}:
        raise UsageError(
            f"a time limit of {limit} minutes for {', '.join(stages)}",
            where=f"site {site.name}: time",
            expected=f"at least {LOADS_IN_A_JOB} engine loads of"
            f" {section.engine_load_minutes:g} minutes (slurm.engine_load_minutes)",
        )
    return Job(
        group=group,
        role=role,
        stages=stages,
        name=waiting_name(stages[0], recipe.name),
        tasks=1,
        nodes=max(section.nodes.get(s, 1) for s in stages),
        gpus=0 if set(stages) <= set(section.cpu_stages) else section.gpus,
        minutes=limit,
        grace=max(1, min(site.grace_seconds, limit * 60 // 4)),
        final=stages[-1] == STAGES[-1],
    )
