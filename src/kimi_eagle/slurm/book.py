"""The book of a run's jobs: RUN/slurm/jobs/SUFFIX.json, one entry a submitted job or array.

An entry is written before sbatch is called (an intent: job_id is null) and again with Slurm's
answer. A submit that died in between, or whose sbatch timed out although the job was taken, left an
intent; its suffix is part of the job's name in Slurm, so the next look finds the job and adopts it
(DESIGN promise 10).
"""

from __future__ import annotations

from typing import Any

from kimi_eagle import files
from kimi_eagle.rundir import RunDir


def read_book(run: RunDir) -> list[dict[str, Any]]:
    """Every entry, oldest first."""
    found = [files.read_json(p) for p in run.slurm.jobs.glob("*.json")]
    entries = [e for e in found if isinstance(e, dict) and "suffix" in e]
    return sorted(entries, key=lambda e: (e["created"], e["link"], e["suffix"]))


def write(run: RunDir, entry: dict[str, Any]) -> None:
    """Create or replace the entry of one job."""
    files.write_atomic(run.slurm.jobs / f"{entry['suffix']}.json", files.to_json(entry) + "\n")
