"""Which jobs a recipe needs on a site: groups, canary first, arrays, chains. No Slurm is asked.

A group with regenerate or extract in it and more than one worker becomes a canary and arrays of
the others; any other group is one job. What is here depends on recipe and site alone, so that
--dry-run, --emit, `site check` and the real submit speak of the same jobs; which of them are
missing, missing.py finds out.
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

    def resized(self, tasks: int) -> Job:
        """The same with another number of tasks."""
        return replace(self, tasks=tasks)

    @property
    def file_name(self) -> str:
        """`1-regenerate.canary.sbatch`: for --emit."""
        role = "" if self.role == "single" else f".{self.role}"
        link = f".{self.link}" if self.link else ""
        return f"{self.group + 1}-{self.stages[0]}{role}{link}.sbatch"


def whole_group(
    recipe: Recipe,
    site: Site,
    group: int,
    stages: tuple[str, ...],
    *,
    proven: bool = False,
    workers: int | None = None,
) -> list[Job]:
    """Every job of a group that has none yet, in the order in which they are submitted.

    stages: those of the group that are meant. proven: a first unit is done, no canary is needed.
    workers: fewer than the recipe says. Raises UsageError where a time limit is too short.
    """
    count = wanted_workers(recipe, stages) if workers is None else workers
    if count == 1:
        single = _job(recipe, site, group, "single", stages)
        return [_link(single, n) for n in range(site.chain + 1)]
    worker = _job(recipe, site, group, "workers", stages)
    jobs = [] if proven else [_job(recipe, site, group, "canary", stages)]
    jobs += _arrays(worker, count - len(jobs), site)
    for link in range(1, site.chain + 1):
        jobs += _arrays(_link(worker, link), count, site)
    return jobs


def wanted_workers(recipe: Recipe, stages: tuple[str, ...]) -> int:
    """How many workers these stages of a group are to have."""
    return recipe.slurm.workers if SHARED_STAGES & set(stages) else 1


def more_workers(
    recipe: Recipe, site: Site, group: int, stages: tuple[str, ...], count: int
) -> list[Job]:
    """Jobs for `count` further workers of a group that has jobs already."""
    return _arrays(_job(recipe, site, group, "workers", stages), count, site)


def whole_run(recipe: Recipe, site: Site, only: str | None = None) -> list[list[Job]]:
    """The jobs of every group, as a first submit sends them; only: those of one stage."""
    named = [(g, (only,) if only else s) for g, s in enumerate(recipe.slurm.groups)]
    named = [(g, stages) for g, stages in named if set(stages) <= set(recipe.slurm.groups[g])]
    count = recipe.slurm.workers
    while True:
        planned = []
        for group, stages in named:
            few = min(count, wanted_workers(recipe, stages))
            planned.append(whole_group(recipe, site, group, stages, workers=few))
        total = sum(job.tasks for jobs in planned for job in jobs)
        if site.max_jobs is None or total <= site.max_jobs:
            return planned
        if count == 1:
            raise too_many(total, site)
        count -= 1


def too_many(total: int, site: Site) -> UsageError:
    """More jobs than the site lets one user have in the queue."""
    return UsageError(
        f"{total} jobs in the queue would be needed",
        where=f"site {site.name}: max_jobs = {site.max_jobs}",
        fix="lower chain or slurm.workers, or submit with --only STAGE",
    )


def _link(job: Job, link: int) -> Job:
    return replace(job, link=link)


def _arrays(job: Job, count: int, site: Site) -> list[Job]:
    """As few arrays as MaxArraySize allows; an array of one is a plain job."""
    most = site.max_array or SLURM_MAX_ARRAY  # indices run from 0 to MaxArraySize - 1
    sizes = [min(most, count - start) for start in range(0, count, most)]
    return [job.resized(size) for size in sizes]


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
