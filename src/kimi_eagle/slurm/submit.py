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
import re
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kimi_eagle import begin, files
from kimi_eagle.errors import RunError
from kimi_eagle.lock import runlock
from kimi_eagle.recipe import Recipe
from kimi_eagle.rundir import RunDir
from kimi_eagle.site import Site
from kimi_eagle.slurm import book, guard, progress, queue, sbatch
from kimi_eagle.slurm.jobs import SHARED_STAGES, Job
from kimi_eagle.slurm.live import Live, live_jobs
from kimi_eagle.slurm.missing import missing_jobs
from kimi_eagle.slurm.names import new_suffix
from kimi_eagle.stages import upstream_of
from kimi_eagle.stages.context import recipe_digest
from kimi_eagle.turns import turn

_NO_ANSWER = re.compile(r"timed? ?out|contact|communication|try again|unavailable", re.I)
"""Words of an sbatch that does not know whether its job was taken."""


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
    with turn(run.slurm.lock):
        done = progress.done_stages(run, recipe)
        guard.refuse_held(run, recipe, done)
        entries = book.adopt(run)
        live = live_jobs(run, entries)
        guard.refuse_other_recipe(recipe, live)
        plan = missing_jobs(run, recipe, site, live, done, only=only, more=more)
        image = begin.begin(run, recipe, recipe_path, site)
        files.write_atomic(run.slurm.host, sbatch.host_script().read_bytes())
        with contextlib.suppress(OSError):
            run.slurm.ended.rmdir()
        queued = _Queue(run, recipe, site, site_source or site.name, live)
        try:
            for job in plan:
                for stage in job.stages:
                    run.stage(stage).stop.unlink(missing_ok=True)  # of `cancel --after-unit`
                queued.add(job)
            queued.put_in_order()
        except BaseException:
            queued.take_back()
            raise
        runlock.write(run)  # the jobs' site and partition
    adopted = [x.entry | {"leaving": x.leaving, "live": len(x.tasks)} for x in live]
    return {
        "submitted": queued.fresh,
        "adopted": adopted,
        "done": sorted(done),
        "warnings": queued.warnings + begin.warnings(run, image),
    }


class _Queue:
    """What is in the queue for the run, while this submit adds to it."""

    def __init__(self, run: RunDir, recipe: Recipe, site: Site, source: str, live: list[Live]):
        self._run, self._recipe, self._site, self._source = run, recipe, site, source
        self._live = live
        self.fresh: list[dict[str, Any]] = []
        self.warnings: list[str] = []

    def _entries(self) -> list[dict[str, Any]]:
        return [x.entry for x in self._live] + self.fresh

    def _behind(self, stages: Iterable[str], role: str, link: int) -> list[str]:
        """Ids of the jobs that a job has to wait for.

        A follow-up job waits for those before it; a worker for the canary, which waits for all
        else itself; any other for everything in the queue that its stages stand on.
        """
        stages = set(stages)
        peers = [e for e in self._entries() if stages & set(e["stages"])]
        if link and (lower := [e for e in peers if e["link"] < link]):
            nearest = max(e["link"] for e in lower)
            return [e["job_id"] for e in lower if e["link"] == nearest]
        if role == "workers" and (canary := self._canary(stages)):
            return [canary["job_id"]]
        ahead = {u for s in stages for u in upstream_of(s)} - stages
        return [e["job_id"] for e in self._entries() if ahead & set(e["stages"])]

    def _canary(self, stages: set[str]) -> dict[str, Any] | None:
        """The newest canary of these stages, as long as their first unit is not done."""
        if progress.proven(self._run, self._recipe, tuple(stages)):
            return None
        serving = [x.entry for x in self._live if x.serving] + self.fresh
        main = SHARED_STAGES & stages
        found = [e for e in serving if e["role"] == "canary" and main <= set(e["stages"])]
        return found[-1] if found else None

    def add(self, job: Job) -> None:
        """Submit one job behind those that it has to wait for."""
        after = self._behind(job.stages, job.role, job.link)
        self.fresh.append(self._sbatch(job, tuple(after)))

    def put_in_order(self) -> None:
        """Jobs queued earlier wait also for what was put ahead of them now, or by a submit that
        did not get this far; each canary learns whom it may let start.

        A job that Slurm starts in this very moment is not lost: its gate says not yet.
        """
        for x in self._live:
            entry = x.entry
            ids = self._behind(entry["stages"], entry["role"], entry["link"])
            if x.pending and not set(ids) <= set(entry["after"]):
                self._wait_for(entry, ids)
        for canary in [e for e in self._entries() if e["role"] == "canary"]:
            waiting = [e for e in self._entries() if e["after"] == [canary["job_id"]]]
            ids = [e["job_id"] for e in waiting if not e["link"]]
            path = self._run.slurm.jobs / f"{canary['suffix']}.others"
            files.write_atomic(path, "".join(f"{i}\n" for i in ids))

    def _wait_for(self, entry: dict[str, Any], ids: list[str]) -> None:
        words = f"Dependency=afterany:{':'.join(ids)}"
        done = queue.call(["scontrol", "update", f"JobId={entry['job_id']}", words])
        if done.returncode:
            self.warnings.append(
                f"job {entry['job_id']} could not be put behind {', '.join(ids)}:"
                f" {queue.said(done)}; the same submit again tries it again"
            )
            return
        entry["after"] = ids
        book.write(self._run, entry)

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
        while (self._run.slurm.jobs / f"{suffix}.json").exists():
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
            slow = _NO_ANSWER.search(str(e))
            found = book.look_for(suffix, book.ANSWER_SECONDS if slow else book.SETTLED_SECONDS)
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
