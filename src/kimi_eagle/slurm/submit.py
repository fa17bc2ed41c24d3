"""`kimi-eagle submit`: put the jobs that a run still needs into the queue, once.

Read top to bottom: one submit at a time, adopt what is already queued, refuse what cannot work,
then group by group an intent, sbatch, and Slurm's answer in the book. Each group waits for the
*live* jobs of the groups before it with afterany, which cannot lie: what really is done, the
stage's own gate decides from the records when the job starts (DESIGN promise 4). Jobs that were
queued before learn of the new ones ahead of them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kimi_eagle import files
from kimi_eagle.errors import RunError
from kimi_eagle.recipe import Recipe
from kimi_eagle.rundir import RunDir, follow
from kimi_eagle.site import Site
from kimi_eagle.slurm import book, guard, progress, queue, sbatch
from kimi_eagle.slurm.jobs import Job
from kimi_eagle.slurm.live import Live, live_jobs
from kimi_eagle.slurm.lock import one_at_a_time
from kimi_eagle.slurm.missing import missing_jobs
from kimi_eagle.slurm.names import new_suffix
from kimi_eagle.stages.context import recipe_digest


def submit(
    run: RunDir,
    recipe: Recipe,
    recipe_path: Path,
    site: Site,
    *,
    site_source: str = "",
    only: str | None = None,
    more: int = 0,
) -> dict[str, Any]:
    """Submit what is missing; {"submitted": [entries], "adopted": [...], "done": [stages]}.

    only: just this stage. more: this many further workers for the group that is under way.
    site_source: what to type for the site. Raises UsageError and RunError before anything is
    queued, and RunError with Slurm's words when sbatch refuses; what this call had queued by then
    is taken back.
    """
    sbatch.words_for(run, None)
    run.slurm.make()
    with one_at_a_time(run):
        done = progress.done_stages(run, recipe)
        guard.refuse_held(run, recipe, done)
        entries = book.adopt(run)
        live = live_jobs(run, entries)
        guard.refuse_other_recipe(recipe, live)
        plan = missing_jobs(run, recipe, site, live, done, only=only, more=more)
        follow(run, recipe, recipe_path)
        files.write_atomic(run.slurm.host, sbatch.host_script().read_bytes())
        with contextlib.suppress(OSError):
            run.slurm.ended.rmdir()
        queued = _Queue(run, recipe, site, site_source or site.name, live)
        try:
            for jobs in plan:
                for stage in {s for job in jobs for s in job.stages}:
                    run.stage(stage).stop.unlink(missing_ok=True)  # of `cancel --after-unit`
                queued.add_group(jobs)
            queued.put_behind()
        except BaseException:
            queued.take_back()
            raise
    adopted = [x.entry | {"leaving": x.leaving, "live": len(x.tasks)} for x in live]
    return {"submitted": queued.fresh, "adopted": adopted, "done": sorted(done)}


class _Queue:
    """What is in the queue for the run, while this submit adds to it."""

    def __init__(self, run: RunDir, recipe: Recipe, site: Site, source: str, live: list[Live]):
        self._run, self._recipe, self._site, self._source = run, recipe, site, source
        self._live = live
        self.fresh: list[dict[str, Any]] = []

    def _before(self, group: int) -> list[str]:
        """Ids of everything in the queue that works for an earlier group."""
        live = [x.entry for x in self._live] + self.fresh
        return [e["job_id"] for e in live if e["group"] < group]

    def _canary(self, group: int) -> dict[str, Any] | None:
        """The canary of a group whose first unit is not done yet."""
        live = [x.entry for x in self._live if x.serving] + self.fresh
        found = [e for e in live if e["group"] == group and e["role"] == "canary"]
        proven = found and progress.proven(self._run, self._recipe, tuple(found[-1]["stages"]))
        return found[-1] if found and not proven else None

    def add_group(self, jobs: list[Job]) -> None:
        """Canary, others behind it, follow-up jobs behind those; all behind the groups before."""
        links: dict[int, list[str]] = {}
        for job in jobs:
            after, canary = self._before(job.group), self._canary(job.group)
            if job.link:
                after = links[job.link - 1]
            elif canary is not None:
                after = [canary["job_id"]]
            entry = self._sbatch(job, tuple(after))
            self.fresh.append(entry)
            links.setdefault(job.link, []).append(entry["job_id"])
            if canary is not None and not job.link:
                self._tell_canary(canary)

    def _tell_canary(self, canary: dict[str, Any]) -> None:
        """Whom it may let start after its first unit: everybody who waits for it alone."""
        live = [x.entry for x in self._live] + self.fresh
        waiting = [e["job_id"] for e in live if e["after"] == [canary["job_id"]] and not e["link"]]
        path = self._run.slurm.jobs / f"{canary['suffix']}.others"
        files.write_atomic(path, "".join(f"{i}\n" for i in waiting))

    def put_behind(self) -> None:
        """Jobs queued earlier wait also for what was put ahead of them now.

        A job that Slurm starts in this very moment is not lost: its gate says not yet.
        """
        fresh = {e["job_id"] for e in self.fresh}
        for x in self._live:
            group, role = x.entry["group"], x.entry["role"]
            canary = self._canary(group) if role == "workers" else None
            ids = [canary["job_id"]] if canary else self._before(group)
            if x.pending and not x.entry["link"] and (set(ids) - set(x.entry["after"])) & fresh:
                self._wait_for(x, ids)

    def _wait_for(self, x: Live, ids: list[str]) -> None:
        words = f"Dependency=afterany:{':'.join(ids)}"
        done = queue.call(["scontrol", "update", f"JobId={x.job_id}", words])
        if not done.returncode:
            x.entry["after"] = ids
            book.write(self._run, x.entry)

    def take_back(self) -> None:
        """Cancel what this call had queued: half a run in the queue helps nobody."""
        if not self.fresh:
            return
        with contextlib.suppress(RunError):
            queue.call(["scancel", *[e["job_id"] for e in self.fresh]])
        for entry in self.fresh:
            reason = "a later job of the same submit was not taken"
            book.write(self._run, entry | {"withdrawn": reason})

    def _sbatch(self, job: Job, after: tuple[str, ...]) -> dict[str, Any]:
        """One sbatch call, with an intent in the book before and the answer after it."""
        suffix = new_suffix(self._run.path)
        entry: dict[str, Any] = {
            "suffix": suffix,
            "name": f"{job.name}-{suffix}",
            "run": str(self._run.path),
            "group": job.group,
            "role": job.role,
            "stages": list(job.stages),
            "tasks": job.tasks,
            "nodes": job.nodes,
            "gpus": job.gpus,
            "minutes": job.minutes,
            "recipe": recipe_digest(self._recipe),
            "link": job.link,
            "after": list(after),
            "created": time.time(),
            "host": socket.gethostname(),
            "job_id": None,
            "submitted": None,
            "site": self._source,
        }
        words = sbatch.words_for(self._run, suffix, entry["recipe"])
        context = (job, self._recipe, self._site, words)
        made = sbatch.executor(*context, folder=self._run.slurm.log, after=after)
        book.write(self._run, entry)
        try:
            with _clean_environ():
                job_id = made._submit_command(sbatch.command(*context)).job_id
        except Exception as e:
            found = book.look_for(suffix)
            if found is None:
                book.write(self._run, entry | {"withdrawn": str(e)[:500]})
                raise _refusal(e, self._site) from None
            job_id = found
        entry |= {"job_id": job_id, "submitted": time.time()}
        book.write(self._run, entry)
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


def _refusal(error: Exception, site: Site) -> Exception:
    """Slurm's own words, and what to change."""
    from kimi_eagle.slurm.sitecheck import keys_for

    if isinstance(error, OSError):
        return error
    lines = [x.strip() for x in str(error).splitlines() if "error:" in x]
    words = "; ".join(x.split("error:", 1)[1].strip() for x in lines)
    words = words or " ".join(str(error).split())
    keys = " or ".join(f"`{key}`" for key in keys_for(words))
    fix = f"change {keys} in the site file, then try kimi-eagle site check" if keys else ""
    return RunError(f"sbatch refused: {words}", where=f"site {site.name}", fix=fix)
