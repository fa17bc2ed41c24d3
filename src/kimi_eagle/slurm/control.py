"""Ending a run's jobs, and its logs. Only what the run's own book names is ever touched."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kimi_eagle import files
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.recipe import STAGES
from kimi_eagle.rundir import RunDir
from kimi_eagle.slurm import jobview, queue
from kimi_eagle.slurm.book import adopt, read_book
from kimi_eagle.slurm.names import is_of_run
from kimi_eagle.turns import turn

POLL_SECONDS = 0.5
_AT_ONCE = 200
"""Job ids a call of scancel: an argument list has a limit."""


def cancel(run: RunDir, *, job_id: str | None = None, after_unit: bool = False) -> dict[str, Any]:
    """End this run's jobs, or one of them; {"cancelled": ids, "asked": ids, "by_hand": ids}.

    by_hand: jobs that look like this run's but are not in its book; they are left alone.

    after_unit: jobs that run are asked to leave after their unit (their stop files); jobs that
    still wait hold no unit and are cancelled. RunError where Slurm does not do it.
    """
    if not run.slurm.path.exists():  # no job was ever submitted
        return {"cancelled": [], "asked": [], "by_hand": []}
    with turn(run.slurm.lock):  # a submit under way would queue the rest behind our back
        return _cancel(run, job_id, after_unit)


def _cancel(run: RunDir, job_id: str | None, after_unit: bool) -> dict[str, Any]:
    book = read_book(run)
    if not any(e.get("damaged") for e in book):  # a damaged entry still names its job's suffix
        book = adopt(run)
    if book and (owner := run.slurm.jobs.stat().st_uid) != os.getuid():
        raise RunError("the jobs are another user's", where=run.path, fix=f"ask uid {owner}")
    known = {e["suffix"] for e in book}
    queued = [j for j in queue.queued() if jobview.is_live(j)]
    jobs = [j for j in queued if j.suffix in known]
    strange = [j for j in queued if j.suffix not in known]
    by_hand = {j.array for j in strange if is_of_run(j.name, run.path)}
    if job_id is not None:
        ours = {str(e.get("job_id")) for e in book if e.get("job_id")} | {j.array for j in jobs}
        if job_id.partition("_")[0] not in ours:
            raise UsageError(
                f"job {job_id} is not of this run",
                where=run.path,
                expected=f"one of {', '.join(sorted(ours))}" if ours else "no job was submitted",
            )
    meant = [j for j in jobs if job_id is None or job_id in (j.id, j.array)]
    asked = [j for j in meant if after_unit and j.state != "PENDING"]
    doomed = [j for j in meant if j not in asked and j.state != "COMPLETING"]
    # Before the others: a job that is asked to leave must not be followed by one that waits.
    _scancel(sorted({_shortest(j, doomed, jobs) for j in doomed}))
    for job in asked:
        run.slurm.stop.mkdir(parents=True, exist_ok=True)
        files.write_atomic(run.slurm.stop / f"{job.suffix}.{job.task}", "cancel --after-unit\n")
    if asked and job_id is None:
        stages = {e["suffix"]: e.get("stages") or () for e in book}
        for name in {s for job in asked for s in stages.get(job.suffix, ())}:
            files.write_atomic(run.stage(name).make().stop, "cancel --after-unit\n")
    found = {"cancelled": [j.id for j in doomed], "asked": [j.id for j in asked]}
    return found | {"by_hand": sorted(by_hand)}


def _shortest(job: queue.Queued, doomed: list[queue.Queued], jobs: list[queue.Queued]) -> str:
    """The array's own id where all of its live tasks go: one word for 1,000 tasks."""
    gone = {j.id for j in doomed}
    return job.array if all(j.id in gone for j in jobs if j.array == job.array) else job.id


def _scancel(ids: list[str]) -> None:
    for start in range(0, len(ids), _AT_ONCE):
        done = queue.call(["scancel", *ids[start : start + _AT_ONCE]])
        words = queue.said(done)
        # A job that ended by itself in this moment is what was wanted.
        if done.returncode and "already completing" not in words and "Invalid job id" not in words:
            raise RunError(f"scancel: {words}", fix="type the same cancel again")


# -- logs --------------------------------------------------------------------------------------


def log_files(run: RunDir, stage: str | None = None, job_id: str | None = None) -> list[Path]:
    """The logs of a stage (of all when none is named), newest last.

    Where no stage has written any yet: what host.sh and Slurm said about the jobs.
    """
    names = [stage] if stage else STAGES
    found = [p for name in names for p in run.stage(name).log.glob("*.out")]
    found = [p for p in found if job_id is None or _is_of(p, job_id)]
    if not found:
        found = [p for p in run.slurm.log.glob("*.out") if job_id is None or _is_of(p, job_id)]
    # Times of one file system, compared with each other only.
    return sorted(found, key=lambda p: (_mtime(p), p.name))


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _is_of(path: Path, job_id: str) -> bool:
    """Is it a log of this job? `123` has the logs of all tasks of array 123."""
    return any(path.name.startswith(job_id + end) for end in (".", "_"))


def tail(path: Path, lines: int) -> tuple[bytes, int]:
    """The last lines of a file, and the offset after them; reads from the end, 64 KiB at a time."""
    with open(path, "rb") as f:
        end = at = f.seek(0, os.SEEK_END)
        data = b""
        while at > 0 and data.count(b"\n") <= lines:
            size = min(at, 1 << 16)
            at = f.seek(at - size)
            data = f.read(size) + data
    kept = data.splitlines(keepends=True)[-lines:] if lines else []
    return b"".join(kept), end


def follow(
    every: Callable[[], list[Path]], lines: int, over: Callable[[], bool]
) -> Iterator[Path | bytes]:
    """The end of the newest log and whatever is added to it; goes on with a file that appears.

    Files that were there before are not switched to: the workers of a stage write theirs at the
    same time. Yields a path where a file begins, then bytes; ends when `over` says so and all is
    shown. every: the logs, newest last.
    """
    known: set[Path] = set()
    path, offset = None, 0
    while True:
        last = over()
        found = every()
        if new := [p for p in found if p not in known]:
            if path is not None and (rest := _read_from(path, offset)):
                yield rest
            first, known = path is None, known | set(found)
            path, offset = new[-1], 0
            yield path
            if first:
                text, offset = tail(path, lines)
                yield text
        if path is not None and (more := _read_from(path, offset)):
            offset += len(more)
            yield more
        if last:
            return
        time.sleep(POLL_SECONDS)


def _read_from(path: Path, offset: int) -> bytes:
    try:
        with open(path, "rb") as f:
            f.seek(offset)
            return f.read()
    except FileNotFoundError:
        return b""
