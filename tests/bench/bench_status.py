"""`kimi-eagle status` of a stage with many units, beside a plain listing of its records.

    python tests/bench/bench_status.py [--units 100,1000,10000] [--runs 11]

The records are made by the ledger itself (one in a hundred with rejected samples, one in a thousand
failed), with the parts and provenance that real ones carry. Every figure is the whole command in a
process of its own. The limit is `os.scandir` and a count in an empty interpreter. Where squeue
answers (SLURM_CONF of the testbed), the run also has a book with one job, so that squeue is asked.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from kimi_eagle import files
from kimi_eagle.ledger import Ledger, Unit
from kimi_eagle.provenance import provenance
from kimi_eagle.rundir import StageDir, open_run
from kimi_eagle.slurm import queue
from kimi_eagle.worker import Worker

GOAL_SECONDS = 0.5
GOAL_UNITS = 10_000
LISTING = "import os, sys; print(sum(e.name.endswith('.json') for e in os.scandir(sys.argv[1])))"


def make_run(path: Path, count: int, job: bool) -> None:
    """A run whose extract stage has `count` units, 1 in 50 still open."""
    path.mkdir()
    files.write_atomic(path / "run.json", '{"format":"run/1","recipe":{"allow_rejected":0.01}}')
    stage = StageDir(path / "extract").make()
    ledger, about = Ledger(stage), provenance()
    units = []
    for i in range(count):
        parts = {
            "format": "shard/1", "verifier": "ab" * 16, "layers": [2, 30, 58, 61], "probe": 0.9,
            "samples": f"{i:032x}", "engine": {"dtype": "bfloat16", "tp": 8, "vllm": "0.31.0"},
        }  # fmt: skip
        units.append(Unit(f"{i:05d}", parts, tokens=4_000_000, samples=2000))
    with Worker(stage) as worker:
        ledger.write_plan(units)
        for i, unit in enumerate(units):
            if i % 50 == 49:
                continue
            entries = [{"name": f"{unit.name}.a1.{x}", "bytes": 9, "xxh3": "cd" * 16} for x in "si"]
            counts = {"samples": 2000, "rejected": i % 100 == 7, "tokens": 4_000_000}
            record = {
                "format": "record/1", "stage": "extract", "unit": unit.name, "key": unit.key,
                "parts": unit.parts, "state": "failed" if i % 1000 == 3 else "done",
                "files": entries, "counts": {k: int(v) for k, v in counts.items()},
                "info": {"probe": {"agreement": 0.99, "positions": 64}}, "attempt": 1,
                "started": 1.0, "ended": 2.0, "worker": worker.id, "provenance": about,
            }  # fmt: skip
            assert ledger.create_record(unit, record)
    if job:
        entry = {
            "suffix": "00000be0c4", "name": "ext-bench-00000be0c4", "group": 0, "role": "single",
            "stages": ["extract"], "tasks": 1, "link": 0, "created": 1.0, "submitted": 1.0,
            "job_id": "999999", "site": "bench",
        }  # fmt: skip
        run = open_run(path)
        run.slurm.make()
        files.write_atomic(run.slurm.jobs / "00000be0c4.json", files.to_json(entry))


def median_seconds(command: list[str], runs: int) -> float:
    """Median wall time of a command, after one to warm the file cache."""
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def squeue_answers() -> bool:
    try:
        queue.queued()
    except Exception:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", default="100,1000,10000")
    parser.add_argument("--runs", type=int, default=11)
    args = parser.parse_args()
    job = squeue_answers()
    script = str(Path(sys.executable).with_name("kimi-eagle"))
    print(f"squeue is {'asked' if job else 'not asked'}; medians of {args.runs} runs")
    print(f"{'units':>8} {'status s':>9} {'scandir s':>10} {'ratio':>6}")
    found = {}
    for count in map(int, args.units.split(",")):
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            # Making them durable would take most of the time, and is not what is measured.
            stack.enter_context(mock.patch.object(os, "fsync", lambda fd: None))
            run = Path(folder, "run")
            make_run(run, count, job)
            ours = median_seconds([script, "status", str(run)], args.runs)
            listing = [sys.executable, "-c", LISTING, str(run / "extract/records")]
            plain = median_seconds(listing, args.runs)
        found[count] = ours
        print(f"{count:8,} {ours:9.3f} {plain:10.3f} {ours / plain:6.1f}")
    most, least = max(found), min(found)
    more = (found[most] - found[least]) / max(1, most - least) * 1000
    print(
        f"each further 1,000 units: {1000 * more:.1f} ms; goal {GOAL_SECONDS} s at {GOAL_UNITS:,}"
    )
    return 0 if found.get(GOAL_UNITS, 0) <= GOAL_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
