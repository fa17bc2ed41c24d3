"""The book of a run's jobs: RUN/slurm/jobs/SUFFIX.json, one entry a submitted job or array.

An entry is written before sbatch is called (an intent: job_id is null) and again with Slurm's
answer. A submit that died in between, or whose sbatch timed out although the job was taken, left an
intent; its suffix is part of the job's name in Slurm, so the next look finds the job and adopts it
(DESIGN promise 10).
"""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path
from typing import Any

from kimi_eagle import files
from kimi_eagle.errors import RunError
from kimi_eagle.rundir import RunDir
from kimi_eagle.slurm import queue

SETTLED_SECONDS = 3.0
"""A controller that answers knows of a job this long after its sbatch ended, or never will."""
ANSWER_SECONDS = 20.0
"""How long to look for a job while the controller gives no answer."""
FLIGHT_SECONDS = 60.0
"""How long the sbatch of a killed submit may still be on its way."""

KINDS: dict[str, type | tuple[type, ...]] = {
    "suffix": str, "name": str, "run": str, "group": int, "role": str, "stages": list,
    "tasks": int, "link": int, "after": list, "recipe": str, "created": (int, float),
}  # fmt: skip
"""What every entry holds; see `submit._sbatch` for all of it."""


def read_book(run: RunDir) -> list[dict[str, Any]]:
    """Every entry of this run directory, oldest first.

    Entries of another directory (the run was copied or moved) are left out: their jobs work, or
    die, elsewhere. One that cannot be read is {"suffix", "damaged": its path}, and comes first.
    """
    found = []
    for path in run.slurm.jobs.glob("*.json"):
        entry = files.read_json(path)
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(key), kind) for key, kind in KINDS.items()
        ):
            found.append({"suffix": path.stem, "damaged": str(path), "created": 0, "link": 0})
        elif entry["run"] == str(run.path):
            found.append(entry)
    return sorted(found, key=lambda e: (e["created"], e["link"], e["suffix"]))


def write(run: RunDir, entry: dict[str, Any]) -> None:
    """Create or replace the entry of one job."""
    files.write_atomic(run.slurm.jobs / f"{entry['suffix']}.json", files.to_json(entry) + "\n")


def adopt(run: RunDir) -> list[dict[str, Any]]:
    """The book, with the ids of jobs that were taken although nobody heard the answer.

    RunError for an entry that cannot be read, or where Slurm does not answer: what it stood for
    may be in the queue.
    """
    entries = read_book(run)
    for entry in entries:
        if "damaged" in entry:
            raise RunError(
                "not a whole entry of the book",
                where=entry["damaged"],
                fix=f"see whether squeue has a job whose name ends with {entry['suffix']}, cancel"
                " it, then remove the file",
            )
        if entry["job_id"] is None and not entry.get("withdrawn"):
            _wait_for_sbatch(run, entry)
            if job_id := look_for(entry["suffix"]):
                found(run, entry, job_id)
            else:
                entry["withdrawn"] = "never reached the queue"
                write(run, entry)
    return entries


def found(run: RunDir, entry: dict[str, Any], job_id: str) -> None:
    """A job whose sbatch nobody heard of is in the queue after all."""
    entry.pop("withdrawn", None)
    entry |= {"job_id": job_id, "submitted": entry["created"]}
    write(run, entry)


def look_for(suffix: str, seconds: float = SETTLED_SECONDS) -> str | None:
    """The id of a job by its suffix, over or not; None when it does not show up in time.

    RunError where Slurm gives no answer: then nobody knows.
    """
    began = time.monotonic()
    while True:
        try:
            if jobs := queue.queued([suffix], ended=True):
                return jobs[0].array
            failed = None
        except RunError as e:
            failed = e
        if time.monotonic() - began > (ANSWER_SECONDS if failed else seconds):
            if failed:
                raise RunError(
                    f"a job may be in the queue that nobody heard of ({failed.what})",
                    where=f"job name ...-{suffix}",
                    fix="type the same again when Slurm answers: it will be found",
                )
            return None
        time.sleep(0.5)


def _wait_for_sbatch(run: RunDir, entry: dict[str, Any]) -> None:
    """A submit was killed, its sbatch perhaps not: wait until it has ended.

    On another machine it cannot be seen; there the time that an sbatch may take is waited for.
    """
    deadline = time.monotonic() + FLIGHT_SECONDS
    here = entry.get("host") == socket.gethostname()
    if not here and time.time() - entry["created"] > 10 * FLIGHT_SECONDS:
        return
    while time.monotonic() < deadline and (not here or _sbatch_runs(run)):
        time.sleep(0.5)


def _sbatch_runs(run: RunDir) -> bool:
    script = str(run.slurm.log / ".submission_file_").encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if script in path.read_bytes():
                return True
    return False
