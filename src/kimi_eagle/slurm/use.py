"""What the jobs of a run have used, measured in the jobs themselves: no accounting is asked.

`host.sh` writes one small file a stage and start (RUN/slurm/use/SUFFIX.TASK.RESTART.STAGE.txt) at
every tick, so a job that was killed counts until its last tick, a few seconds before its end. sacct
would know the end to the second, but many clusters have none, or purge it. CPU seconds and memory
come from the workers' files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_eagle.recipe import STAGES
from kimi_eagle.rundir import RunDir


@dataclass(frozen=True)
class Start:
    """One stage in one start of one worker slot. Times are the node's, in seconds since 1970."""

    suffix: str
    task: int
    restart: int
    stage: str
    start: float
    now: float
    """The last tick."""
    end: float
    """0 while it runs, and for ever where host.sh was killed."""
    gpus: int
    """On all nodes of the job together."""
    node: str
    job: str
    why: str
    """How it ended, in one word of host.sh; `running` until then."""

    @property
    def until(self) -> float:
        return self.end or self.now

    @property
    def gpu_hours(self) -> float:
        return max(0.0, self.until - self.start) * self.gpus / 3600


def read_starts(run: RunDir) -> list[Start]:
    """Every start of every job, oldest first; files that are not whole are left out."""
    found = []
    for path in run.slurm.use.glob("*.txt"):
        try:
            words = dict(w.partition("=")[::2] for w in path.read_text().split())
            suffix, task, restart, *_ = path.name.split(".")
            start = Start(
                suffix=suffix,
                task=int(task),
                restart=int(restart),
                stage=words["stage"],
                start=float(words["start"]),
                now=float(words["now"]),
                end=float(words.get("end", 0)),
                gpus=int(words["gpus"]),
                node=words.get("node", ""),
                job=words.get("job", ""),
                why=words["why"],
            )
        except (OSError, ValueError, KeyError):
            continue
        found.append(start)
    return sorted(found, key=lambda s: (s.start, s.suffix, s.task, s.restart))


def by_stage(
    starts: Iterable[Start],
    book: Iterable[Mapping[str, Any]],
    workers: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[str, dict[str, float]]:
    """For each stage that ran in a job, over all starts:

    gpu_hours; waiting_s (in the queue, from submission or the end of the start before, dependencies
    included; all workers added up); wall_s (first start to last sign); starts; cpu_seconds (all
    workers added up); peak_gib (most that one process held). `all` holds the sums.
    workers: the contents of every worker file of a stage.
    """
    submitted = {e["suffix"]: e.get("submitted") or e.get("created") or 0 for e in book}
    found: dict[str, dict[str, float]] = {}
    spans: dict[str, list[Start]] = {}
    before: dict[tuple[str, int], Start] = {}
    for start in sorted(starts, key=lambda s: (s.restart, s.start)):
        slot = (start.suffix, start.task)
        last = before.get(slot)
        since = last.until if last else submitted.get(start.suffix, 0)
        # The second stage of one start did not wait.
        waited = max(0.0, start.start - since) if since else 0.0
        if last and last.restart == start.restart:
            waited = 0.0
        before[slot] = start
        spans.setdefault(start.stage, []).append(start)
        row = found.setdefault(start.stage, {"gpu_hours": 0.0, "waiting_s": 0.0})
        row["gpu_hours"] += start.gpu_hours
        row["waiting_s"] += waited
    for stage, row in found.items():
        row |= _span(spans[stage]) | _measured(workers.get(stage, ()))
    if found:
        found = {s: found[s] for s in STAGES if s in found}
        every = {k: sum(r[k] for r in found.values()) for k in ("gpu_hours", "waiting_s", "starts")}
        every["cpu_seconds"] = sum(r["cpu_seconds"] for r in found.values())
        every["peak_gib"] = max(r["peak_gib"] for r in found.values())
        every["wall_s"] = _span([s for ss in spans.values() for s in ss])["wall_s"]
        found["all"] = every
    return {name: {k: round(v, 4) for k, v in row.items()} for name, row in found.items()}


def _span(starts: Sequence[Start]) -> dict[str, float]:
    first, last = min(s.start for s in starts), max(s.until for s in starts)
    return {"wall_s": last - first, "starts": len(starts)}


def _measured(workers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {
        "cpu_seconds": sum(float(w.get("cpu_seconds") or 0) for w in workers),
        "peak_gib": max((float(w.get("peak_gib") or 0) for w in workers), default=0.0),
    }
