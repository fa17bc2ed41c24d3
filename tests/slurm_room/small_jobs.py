"""Small real jobs for the tests of status, logs and cancel: the supervisor, workers and ledgers are
the real ones, only the stage's work is replaced by waiting for a file."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kimi_eagle import files
from kimi_eagle.rundir import RunDir, open_run
from kimi_eagle.slurm.names import new_suffix

ROOT = Path(__file__).resolve().parents[2]

WORK = """
import os, socket, sys, time
from pathlib import Path
host = os.environ.get("TEST_HOST")
if host:
    socket.gethostname = lambda: host  # as if the node were another machine
from kimi_eagle.ledger import Unit
from kimi_eagle.rundir import open_run
from kimi_eagle.worker import Stopped, Worker

stage, run, count, rejected = sys.argv[1], open_run(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
units = [Unit(f"{i:05d}", {"i": i}, tokens=100, samples=10) for i in range(count)]
try:
    with Worker(run.stage(stage)) as worker:
        worker.ledger.write_plan(units)
        for attempt in worker.attempts(units):
            name = attempt.unit.name
            with attempt, worker.phase("work"):
                print("unit", name, flush=True)
                worker.progress(0.5, worker.tokens + 50)
                worker._write()
                while not (run.path / f"go-{name}").exists() and not (run.path / "go").exists():
                    time.sleep(0.05)
                worker.tokens += 100
                worker.progress(1.0, worker.tokens)
                if name in rejected:
                    raise ValueError("no good")
                attempt.commit([], counts={"samples": 8, "rejected": 2})
except Stopped:
    sys.exit(75)
"""


def make_run(path: Path, **recipe: Any) -> RunDir:
    """A run directory; what it holds of a recipe is what status looks at."""
    path.mkdir(parents=True)
    spec = {"format": "run/1", "recipe": {"name": "tiny", **recipe}, "recipe_path": "/r/tiny.toml"}
    (path / "run.json").write_text(json.dumps(spec))
    run = open_run(path)
    run.slurm.make()
    files.write_atomic(run.slurm.host, (ROOT / "slurm/host.sh").read_bytes())
    return run


def submit(
    bed: Any,
    run: RunDir,
    *options: str,
    units: int = 2,
    stage: str = "extract",
    tasks: int = 1,
    rejected: str = "",
    host: str = "",
    written: bool = True,
    name: str = "",
) -> dict[str, Any]:
    """sbatch of one job (or array) as the launcher makes it, and its entry in the book.

    host: the name that the worker takes its machine to have. written=False: only the intent. name:
    submitted by hand under this name, so that the book knows nothing.
    """  # fmt: skip
    suffix = new_suffix(run.path)
    entry = {
        "suffix": suffix, "name": f"ext-tiny-{suffix}", "run": str(run.path),
        "group": 1, "role": "workers", "stages": [stage], "tasks": tasks, "nodes": 1, "gpus": 8,
        "minutes": 10, "recipe": "x", "link": 0, "after": [], "created": time.time(),
        "job_id": None, "submitted": None, "site": "test",
    }  # fmt: skip
    file = run.slurm.jobs / f"{suffix}.json"
    if not name:
        file.write_text(json.dumps(entry))
    work = run.path / "work.py"
    work.write_text(WORK)
    command = [sys.executable, str(work), "@STAGE@", str(run.path), str(units), *rejected.split()]
    words = ["bash", str(run.slurm.host), "--run", str(run.path), "--suffix", suffix]
    words += ["--stages", stage, "--gpus", "8", "--", *command]
    script = f"export TEST_HOST={host} PYTHONPATH={ROOT}/src; exec {shlex.join(words)}"
    if tasks > 1:
        options = (*options, f"--array=0-{tasks - 1}")
    log = str(run.slurm.log).replace("%", "%%")
    job_id = bed.sbatch(
        script, f"--job-name={name or entry['name']}", "--gpus-per-node=8", "--time=10",
        f"--output={log}/%j_0_log.out", *options,
    )  # fmt: skip
    entry |= {"job_id": job_id, "submitted": time.time()}
    if written and not name:
        file.write_text(json.dumps(entry))
    return entry


def kill_processes(job_id: str) -> None:
    """SIGKILL for everything that a job has started, as a lost node or the OOM killer would."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"SLURM_JOB_ID={job_id}\0".encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


def clean(bed: Any) -> Iterator[Any]:
    """A testbed for one test: its jobs are gone afterwards."""
    yield bed
    bed.clear()


def looker(bed: Any, eagle: Callable) -> Callable[..., dict[str, Any]]:
    """`status --json` of a run, from a process of its own; `extract` is that stage."""

    def call(run: RunDir, **env: str) -> dict[str, Any]:
        done = eagle("status", run.path, "--json", env={**bed.env, **env}, cwd=run.path)
        assert done.returncode == 0, done.stderr
        (found,) = json.loads(done.stdout).values()
        return found | {"extract": next(s for s in found["stages"] if s["name"] == "extract")}

    return call


def wait(what: Callable[[], Any], seconds: float = 40) -> Any:
    """Until `what()` is true; what it gave."""
    deadline = time.monotonic() + seconds
    while not (got := what()):
        assert time.monotonic() < deadline, "not seen in time"
        time.sleep(0.1)
    return got


def at_work(run: RunDir, unit: str = "00000", stage: str = "extract") -> Callable[[], bool]:
    """Is a unit claimed and half done?"""

    def seen() -> bool:
        workers = [files.read_json(p) or {} for p in run.stage(stage).workers.glob("*.json")]
        return any(w.get("unit") == unit and w.get("fraction") for w in workers)

    return seen
