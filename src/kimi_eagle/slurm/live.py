"""What of a run is in the queue now, and who still works for it.

A job that is ending, or was asked to leave (`cancel --after-unit`), is live: what comes behind it
waits for it. But it serves no more: another has to take its place.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kimi_eagle.errors import RunError
from kimi_eagle.rundir import RunDir
from kimi_eagle.slurm import book, jobview, queue
from kimi_eagle.slurm.names import is_of_run

SETTLE_SECONDS = 15
"""A job that ends or is requeued is COMPLETING for a moment; wait that long to see which."""


@dataclass
class Live:
    """One entry of the book with the tasks of it that are in the queue."""

    entry: dict[str, Any]
    tasks: list[queue.Queued] = field(default_factory=list)
    leaving: int = 0

    @property
    def job_id(self) -> str:
        return self.entry["job_id"]

    @property
    def stages(self) -> set[str]:
        return set(self.entry["stages"])

    @property
    def serving(self) -> int:
        """Tasks that work, or will."""
        return len(self.tasks) - self.leaving

    @property
    def pending(self) -> bool:
        return any(task.state == "PENDING" for task in self.tasks)


def live_jobs(run: RunDir, entries: list[dict[str, Any]]) -> list[Live]:
    """The jobs of these entries that are in the queue, oldest first.

    RunError where the queue holds jobs of this run that the book does not know.
    """
    by_suffix = {e["suffix"]: e for e in entries if not e.get("damaged")}
    found: dict[str, Live] = {}
    for job in _settled(run, by_suffix):
        if job.suffix not in by_suffix:
            raise RunError(
                f"job {job.id} ({job.name}) is of this run but not in its book: it was submitted"
                " by hand, or the book was removed",
                where=run.path,
                fix=f"wait for it, or scancel {job.array}, then submit",
            )
        entry = by_suffix[job.suffix]
        if entry["job_id"] is None:
            book.found(run, entry, job.array)
        live = found.setdefault(job.suffix, Live(entry))
        live.tasks.append(job)
        live.leaving += job.state == "COMPLETING" or asked_to_leave(run, job)
    return sorted(found.values(), key=lambda x: (x.entry["created"], x.entry["link"]))


def asked_to_leave(run: RunDir, job: queue.Queued) -> bool:
    """Did `cancel --after-unit` ask it? (host.sh writes an empty stop file, and comes back.)"""
    try:
        return (run.slurm.stop / f"{job.suffix}.{job.task}").stat().st_size > 0
    except OSError:
        return False


def _settled(run: RunDir, suffixes: Iterable[str]) -> list[queue.Queued]:
    known = set(suffixes)
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        mine = [
            job for job in queue.queued() if job.suffix in known or is_of_run(job.name, run.path)
        ]
        jobs = [job for job in mine if jobview.is_live(job)]
        ending = any(job.state == "COMPLETING" for job in jobs)
        if not ending or time.monotonic() > deadline:
            return jobs
        time.sleep(0.5)
