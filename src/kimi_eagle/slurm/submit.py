"""`kimi-eagle submit`: put the jobs that a run still needs into the queue, once.

Read top to bottom: one submit at a time, adopt what is already queued, refuse what cannot work,
then group by group an intent, sbatch, and Slurm's answer in the book. Each group waits for the
*live* jobs of the groups before it with afterany, which cannot lie: what really is done, the
stage's own gate decides from the records when the job starts (DESIGN promise 4).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kimi_eagle import files, liveness
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.recipe import Recipe
from kimi_eagle.rundir import RunDir, follow
from kimi_eagle.site import Site
from kimi_eagle.slurm import book, progress, queue, sbatch
from kimi_eagle.slurm.jobs import Job, more_workers, plan_jobs
from kimi_eagle.slurm.names import new_suffix
from kimi_eagle.stages.context import recipe_digest

LOCK_SECONDS = 120
ADOPT_SECONDS = 20
"""How long to look for a job whose sbatch got no answer, while the controller gives none either."""
SETTLED_SECONDS = 3


def submit(
    run: RunDir,
    recipe: Recipe,
    recipe_path: Path,
    site: Site,
    *,
    only: str | None = None,
    more: int = 0,
) -> dict[str, Any]:
    """Submit what is missing; {"submitted": [entries], "adopted": [...], "done": [stages]}.

    only: just this stage. more: this many further workers for the group that is under way.
    Raises UsageError and RunError before anything is queued, and RunError with Slurm's words when
    sbatch refuses; what this call had queued by then is taken back.
    """
    sbatch.words_for(run, None)
    run.slurm.make()
    with _lock(run):
        _refuse(run, recipe)
        entries = adopt(run)
        live = _live(entries)
        _refuse_other_recipe(recipe, entries, live)
        follow(run, recipe, recipe_path)
        files.write_atomic(run.slurm.host, sbatch.host_script().read_bytes())
        done = progress.done_stages(run, recipe)
        plan = _plan(run, recipe, site, only, more, live, done)
        fresh: list[dict[str, Any]] = []
        try:
            for jobs in plan:
                for stage in {s for job in jobs for s in job.stages}:
                    run.stage(stage).stop.unlink(missing_ok=True)  # of `cancel --after-unit`
                _submit_group(run, recipe, site, jobs, live, fresh)
        except BaseException:
            _take_back(run, fresh)
            raise
    adopted = [e for e in entries if e["job_id"] in {i for ids in live.values() for i in ids}]
    return {"submitted": fresh, "adopted": adopted, "done": sorted(done)}


def _plan(
    run: RunDir,
    recipe: Recipe,
    site: Site,
    only: str | None,
    more: int,
    live: dict[int, list[str]],
    done: set[str],
) -> list[list[Job]]:
    """Jobs to submit now, by group."""
    groups = recipe.slurm.groups
    if more:
        return [more_workers(recipe, site, _under_way(recipe, only, live, done), more)]
    if only:
        group = next(g for g, stages in enumerate(groups) if only in stages)
        if only in done or live.get(group):
            return []
        return plan_jobs(recipe, site, [group], only=only, proven=progress.proven(run, recipe))
    wanted = [g for g, stages in enumerate(groups) if not set(stages) <= done and not live.get(g)]
    return plan_jobs(recipe, site, wanted, proven=progress.proven(run, recipe))


def _under_way(recipe: Recipe, only: str | None, live: dict[int, list[str]], done: set[str]) -> int:
    """The group that --more means: the named stage's, else the first with live jobs or work."""
    groups = recipe.slurm.groups
    if only:
        return next(g for g, stages in enumerate(groups) if only in stages)
    open_groups = [g for g, stages in enumerate(groups) if live.get(g) or not set(stages) <= done]
    if not open_groups:
        raise UsageError("nothing is left to do, so no worker can help")
    return open_groups[0]


def _submit_group(
    run: RunDir,
    recipe: Recipe,
    site: Site,
    jobs: list[Job],
    live: dict[int, list[str]],
    fresh: list[dict[str, Any]],
) -> None:
    """Canary, others behind it, follow-up jobs behind those; all behind the groups before."""
    if not jobs:
        return
    group = jobs[0].group
    upstream = tuple(i for g in sorted(live) if g < group for i in live[g])
    canary: dict[str, Any] | None = None
    links: dict[int, list[str]] = {}
    for job in jobs:
        after = upstream
        if job.link:
            after = tuple(links[job.link - 1])
        elif canary is not None:
            after = (canary["job_id"],)
        entry = _sbatch(run, recipe, site, job, after)
        fresh.append(entry)
        links.setdefault(job.link, []).append(entry["job_id"])
        live.setdefault(group, []).append(entry["job_id"])
        if job.role == "canary":
            canary = entry
    if canary is not None:
        others = [i for i in links[0] if i != canary["job_id"]]
        path = run.slurm.jobs / f"{canary['suffix']}.others"
        files.write_atomic(path, "".join(f"{i}\n" for i in others))


def _sbatch(
    run: RunDir, recipe: Recipe, site: Site, job: Job, after: tuple[str, ...]
) -> dict[str, Any]:
    """One sbatch call, with an intent in the book before and the answer after it."""
    suffix = new_suffix()
    entry: dict[str, Any] = {
        "suffix": suffix,
        "name": f"{job.name}-{suffix}",
        "group": job.group,
        "role": job.role,
        "stages": list(job.stages),
        "tasks": job.tasks,
        "nodes": job.nodes,
        "gpus": job.gpus,
        "minutes": job.minutes,
        "recipe": recipe_digest(recipe),
        "link": job.link,
        "after": list(after),
        "created": time.time(),
        "job_id": None,
        "submitted": None,
        "site": site.name,
    }
    words = sbatch.words_for(run, suffix)
    made = sbatch.executor(job, recipe, site, words, folder=run.slurm.log, after=after)
    book.write(run, entry)
    try:
        with _clean_environ():
            job_id = made._submit_command(sbatch.command(job, recipe, site, words)).job_id
    except Exception as e:
        found = _look_for(suffix)
        if found is None:
            book.write(run, entry | {"withdrawn": str(e)[:500]})
            raise _refusal(e, site) from None
        job_id = found
    entry |= {"job_id": job_id, "submitted": time.time()}
    book.write(run, entry)
    return entry


@contextlib.contextmanager
def _clean_environ() -> Iterator[None]:
    """submitit calls sbatch in this process's environment, which it would pass on to the job."""
    before, clean = dict(os.environ), queue.clean_environment()
    os.environ.clear()
    os.environ.update(clean)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _look_for(suffix: str) -> str | None:
    """The id of a job by its suffix, over or not; None when it does not show up in time."""
    began = time.monotonic()
    while True:
        answered = False
        with contextlib.suppress(RunError):
            if found := queue.queued([suffix], ended=True):
                return found[0].array
            answered = True
        # A controller that answers has the job at once or never; one that does not may yet take it.
        if time.monotonic() - began > (SETTLED_SECONDS if answered else ADOPT_SECONDS):
            return None
        time.sleep(0.5)


def _refusal(error: Exception, site: Site) -> RunError:
    """Slurm's own words, and what to change."""
    from kimi_eagle.slurm.sitecheck import keys_for

    lines = [x.strip() for x in str(error).splitlines() if "error:" in x]
    words = "; ".join(x.split("error:", 1)[1].strip() for x in lines) or " ".join(
        str(error).split()
    )
    keys = " or ".join(f"`{key}`" for key in keys_for(words))
    fix = f"change {keys} in the site file, then try kimi-eagle site check" if keys else ""
    return RunError(f"sbatch refused: {words}", where=f"site {site.name}", fix=fix)


def _take_back(run: RunDir, fresh: list[dict[str, Any]]) -> None:
    """Cancel what this call had queued: half a run in the queue helps nobody."""
    if not fresh:
        return
    with contextlib.suppress(RunError):
        queue.call(["scancel", *[e["job_id"] for e in fresh]])
    for entry in fresh:
        book.write(run, entry | {"withdrawn": "a later job of the same submit was refused"})


# -- before anything is queued -------------------------------------------------------------------


@contextlib.contextmanager
def _lock(run: RunDir) -> Iterator[None]:
    """One submit at a time; a second one waits for the first, then finds its jobs queued."""
    watch, deadline = liveness.Watch(), time.monotonic() + LOCK_SECONDS
    lock, me = run.slurm.lock, files.to_json(liveness.identity())
    while not files.create_exclusive(lock, me):
        who = files.read_json(lock)
        if not isinstance(who, dict) or watch.alive("submit", who) is False:
            lock.unlink(missing_ok=True)
            continue
        if time.monotonic() > deadline:
            raise RunError(
                f"another submit holds the lock (pid {who.get('pid')} on {who.get('host')})",
                where=lock,
                fix="wait for it; where that machine is gone, remove the file",
            )
        time.sleep(0.1)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def _refuse(run: RunDir, recipe: Recipe) -> None:
    """What a person has to decide first."""
    driver = files.read_json(run.driver)
    if isinstance(driver, dict) and liveness.is_alive_here(driver):
        raise RunError(
            f"a `kimi-eagle run` is working here (pid {driver['pid']})",
            where=run.path,
            fix="stop it first; what it has done stays",
        )
    for path in (run.held, *(run.stage(s).held for g in recipe.slurm.groups for s in g)):
        if path.is_file():
            raise RunError(
                f"held: {path.read_text(errors='replace').strip()}",
                where=path,
                fix=f"mend the cause, then kimi-eagle retry {run.path}, then submit",
            )


def adopt(run: RunDir) -> list[dict[str, Any]]:
    """The book, with the ids of jobs that were taken although nobody heard the answer."""
    entries = book.read_book(run)
    unheard = [e for e in entries if e["job_id"] is None and not e.get("withdrawn")]
    for entry in unheard:
        found = _look_for(entry["suffix"])
        if found is None:
            entry["withdrawn"] = "never reached the queue"
        else:
            entry |= {"job_id": found, "submitted": entry["created"]}
        book.write(run, entry)
    return entries


def _live(entries: list[dict[str, Any]]) -> dict[int, list[str]]:
    """{group: ids of jobs that are not over}."""
    by_suffix = {e["suffix"]: e for e in entries}
    live: dict[int, list[str]] = {}
    for job in queue.queued(by_suffix):
        ids = live.setdefault(by_suffix[job.suffix]["group"], [])
        if job.array not in ids:
            ids.append(job.array)
    return live


def _refuse_other_recipe(
    recipe: Recipe, entries: list[dict[str, Any]], live: dict[int, list[str]]
) -> None:
    """Live jobs would go on making what nobody wants any more."""
    digest = recipe_digest(recipe)
    ids = {i for found in live.values() for i in found}
    for entry in entries:
        if entry["job_id"] in ids and entry["recipe"] != digest:
            raise RunError(
                f"job {entry['job_id']} works by an earlier recipe",
                fix="kimi-eagle cancel RUN, then submit again",
            )
