"""The jobs of a run, one row a job or array task, in words a person understands.

Put together from the book (what was submitted), squeue (what Slurm still has) and the use files
(what host.sh last said). A job that left the queue is shown by its last words; sacct is not asked.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kimi_eagle.slurm.queue import Queued
from kimi_eagle.slurm.use import Start

REASONS = {
    "Resources": "waits for free nodes",
    "Priority": "others are ahead of it in the queue",
    "Dependency": "waits for the job before it",
    "DependencyNeverSatisfied": "can never start: cancel it and submit again",
    "BeginTime": "waits for its start time (a requeued job waits about 2 minutes)",
    "Cleaning": "Slurm is still tidying up its last start",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "NodeDown": "a node that it needs is down",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs now",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows",
    "PartitionTimeLimit": "it asks for more time than the partition allows",
    "Reservation": "waits for its reservation",
    "Licenses": "waits for a licence",
    "JobArrayTaskLimit": "as many tasks of this array run as are allowed at once",
    "MaxRequeueExceeded": "Slurm put it back too often and holds it",
    "launch_failed_requeued_held": "it could not be started on its node and is held",
    "None": "Slurm has not looked at it yet",
}
"""Slurm's reasons, those that are seen; another one is shown as Slurm says it."""

HELD = ("JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue", "MaxRequeueExceeded", "held")
"""What the reason of a job that somebody must release holds."""

ENDED = {
    "done": "ended: nothing was left for it",
    "limit": "ended at its time limit",
    "waiting": "left: its gate was not open yet",
    "canary": "left after its first unit, so that the others may start",
    "stopped": "left because it was asked to",
    "term": "ended by scancel or preemption",
    "cancelled": "cancelled",
    "preempted": "preempted",
    "failed": "failed",
    "refused": "refused to work: see its log",
    "held": "stopped: the stage is held",
}
"""What host.sh's last word means."""

NOT_LIVE = frozenset({"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED",
                      "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "REVOKED"})  # fmt: skip
"""States of jobs that squeue may still list for a moment though they are over."""


def is_live(job: Queued) -> bool:
    """Will this job still do something?"""
    return job.state not in NOT_LIVE


def is_held(job: Queued) -> bool:
    """Does it wait for somebody to release it?"""
    return job.state in ("PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT") and (
        job.state != "PENDING" or any(word in job.reason for word in HELD)
    )


def rows(
    book: Iterable[Mapping[str, Any]],
    queue: Sequence[Queued] | None,
    starts: Iterable[Start],
    working: Mapping[str, tuple[str, Mapping[str, Any]]],
    last_words: Callable[[str], str] = lambda _job_id: "",
) -> list[dict[str, Any]]:
    """One row a job or array task, oldest submission first; keys in `status.Look.as_json`.

    queue: None where Slurm was not asked or did not answer. working: job id -> (stage, worker).
    last_words: the last line that a job or array task wrote to its own output.
    """
    last: dict[tuple[str, int], Start] = {}
    for start in starts:
        last[start.suffix, start.task] = start
    by_suffix: dict[str, list[Queued]] = {}
    for job in queue or ():
        by_suffix.setdefault(job.suffix, []).append(job)
    found: list[dict[str, Any]] = []
    for entry in book:
        jobs = by_suffix.get(entry["suffix"], [])
        in_queue = {job.task for job in jobs}
        for job in sorted(jobs, key=lambda j: j.task):
            found.append(_live_row(entry, job, last.get((entry["suffix"], job.task)), working))
        if entry.get("damaged") and not jobs:
            words = f"its entry in the book cannot be read: {entry['damaged']}"
            found.append(_row(entry, None, None) | {"state": "INTENT", "words": words})
        elif entry.get("withdrawn") and not jobs:
            words = " ".join(str(entry["withdrawn"]).split())
            found.append(_row(entry, None, None) | {"state": "WITHDRAWN", "words": words})
        elif entry.get("job_id") is None and queue is not None:
            if not jobs:
                words = "not known whether Slurm took it: the same submit again finds out"
                found.append(_row(entry, None, None) | {"state": "INTENT", "words": words})
        else:
            gone = [t for t in range(entry.get("tasks", 1)) if t not in in_queue]
            for task in gone:
                start = last.get((entry["suffix"], task))
                row = _gone_row(entry, task, start, queue)
                if start is None and queue is not None and (said := last_words(row["id"] or "")):
                    row["words"] = f"ended before it began to work: {said}"
                found.append(row)
    return found


def _row(entry: Mapping[str, Any], task: int | None, start: Start | None) -> dict[str, Any]:
    ident = entry.get("job_id")
    if ident and task is not None and (entry.get("tasks") or 1) > 1:
        ident = f"{ident}_{task}"
    return {
        "id": ident,
        "name": entry.get("name", ""),
        "suffix": entry["suffix"],
        "task": task,
        "group": entry.get("group"),
        "role": entry.get("role"),
        "stages": list(entry.get("stages") or ()),
        "state": "ENDED",
        "reason": "",
        "words": "",
        "node": start.node if start else "",
        "stage": start.stage if start else None,
        "unit": None,
        "fraction": None,
        "restarts": start.restart if start else 0,
        "seen": start.until if start else None,
        "live": False,
        "held": False,
    }


def _live_row(
    entry: Mapping[str, Any],
    job: Queued,
    start: Start | None,
    working: Mapping[str, tuple[str, Mapping[str, Any]]],
) -> dict[str, Any]:
    row = _row(entry, job.task, start)
    held = is_held(job)
    row |= {"id": job.id, "name": job.name, "state": job.state, "reason": job.reason}
    row |= {"live": is_live(job), "held": held, "node": job.nodes or ""}
    if job.id in working:
        stage, worker = working[job.id]
        row |= {"stage": stage, "unit": worker.get("unit"), "fraction": worker.get("fraction")}
    elif job.state == "PENDING" or (start and start.end):
        row["stage"] = None
    row["words"] = _words(job, held, row["restarts"] if start else None)
    return row


def _words(job: Queued, held: bool, restarts: int | None) -> str:
    again = "requeued; " if job.state == "PENDING" and restarts is not None else ""
    if held and "Admin" in job.reason:
        return f"{again}held by an administrator: ask them to release it"
    if held:
        return f"{again}held: scontrol release {shlex.quote(job.id)}"
    if job.state == "PENDING":
        return again + reason_words(job.reason)
    if job.state == "SUSPENDED":
        return f"suspended: scontrol resume {shlex.quote(job.id)} lets it go on"
    return "ending" if job.state == "COMPLETING" else ""


def reason_words(reason: str) -> str:
    """Slurm's reason for waiting, for people."""
    reason = reason.strip("()")
    word = re.split(r"[,:( ]", reason)[0]
    if word in REASONS:
        return f"{REASONS[word]} ({reason})"
    if re.match(r"(QOS|Assoc|Association|AccountLimit|Max)", word):
        return f"a limit of your account or QOS is reached ({reason})"
    return f"Slurm says: {reason}"


def _gone_row(
    entry: Mapping[str, Any], task: int, start: Start | None, queue: Sequence[Queued] | None
) -> dict[str, Any]:
    """A job that squeue does not list; where squeue did not answer, what was last seen of it."""
    row = _row(entry, task, start)
    if queue is None:
        row["state"] = "SUBMITTED" if start is None else "ENDED" if start.end else "STARTED"
        sign = f"last sign {_ago(start.until)}" if start else "not seen to start yet"
        row["words"] = ENDED.get(start.why, start.why) if start and start.end else sign
    elif start is None:
        row["words"] = "left the queue before it started (cancelled, or refused by its node)"
    elif start.end:
        row["words"] = ENDED.get(start.why, start.why)
    else:
        row["words"] = f"ended without a word (killed, or its node was lost), {_ago(start.now)}"
    return row


def _ago(when: float) -> str:
    """`3 min ago`, by this machine's clock: only shown, never compared."""
    seconds = max(0.0, time.time() - when)
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
