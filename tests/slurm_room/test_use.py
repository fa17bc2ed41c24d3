"""GPU hours, waiting and wall time: measured by the jobs themselves, without accounting."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from small_jobs import clean, kill_processes, make_run, submit, wait  # noqa: E402

from kimi_eagle.report.page import ReportData, render  # noqa: E402
from kimi_eagle.rundir import RunDir  # noqa: E402
from kimi_eagle.slurm import use  # noqa: E402
from kimi_eagle.summary import job_use  # noqa: E402


@pytest.fixture
def bed(bare_testbed: Any) -> Iterator[Any]:
    yield from clean(bare_testbed)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


def start(run: RunDir, name: str, **words: object) -> None:
    text = {"gpus": 8, "end": 0, "why": "running", "node": "n1", "job": "1", **words}
    line = " ".join(f"{k}={v}" for k, v in text.items())
    (run.slurm.use / name).write_text(line + "\n")


def test_every_start_counts_until_its_end_or_last_sign(run: RunDir) -> None:
    book = [{"suffix": "aa", "submitted": 1000.0}, {"suffix": "bb", "created": 1000.0}]
    # A killed start, its requeue after 100 s, then the next stage in the same start.
    start(run, "aa.0.0.extract.txt", stage="extract", start=1100, now=4700)
    start(run, "aa.0.1.extract.txt", stage="extract", start=4800, now=8400, end=8400, why="done")
    start(run, "aa.0.1.vocab.txt", stage="vocab", start=8401, now=9000, end=10201, why="done")
    start(run, "bb.3.0.extract.txt", stage="extract", start=1600, now=3400, end=3400, why="limit")
    (run.slurm.use / "cc.0.0.extract.txt").write_text("start=1 now")  # cut short
    workers = {"extract": [{"cpu_seconds": 50, "peak_gib": 3.5}, {"cpu_seconds": 20}, {}]}
    found = use.by_stage(use.read_starts(run), book, workers)
    assert found["extract"] == {
        "gpu_hours": 20.0, "waiting_s": 100 + 100 + 600, "wall_s": 7300, "starts": 3,
        "cpu_seconds": 70, "peak_gib": 3.5,
    }  # fmt: skip
    assert found["vocab"]["gpu_hours"] == 4.0 and found["vocab"]["waiting_s"] == 0
    assert found["all"]["gpu_hours"] == 24.0 and found["all"]["wall_s"] == 10201 - 1100
    assert found["all"]["starts"] == 4 and list(found) == ["extract", "vocab", "all"]
    assert use.by_stage([], book, {}) == {}


def test_the_report_shows_use_and_accepted_losses(run: RunDir, tmp_path: Path) -> None:
    start(run, "aa.0.0.extract.txt", stage="extract", start=0.5, now=5400, end=5400.5)
    entry = {"stage": "extract", "share": 0.01, "reason": "<b>bad</b> node", "time": 0}
    page = render(ReportData(name="x", use=job_use(run), accepted=[entry]), tmp_path)
    assert "GPU hours" in page and "12.00" in page and "1 h 30 min" in page
    assert "Accepted losses" in page and "&lt;b&gt;bad&lt;/b&gt; node" in page
    empty = render(ReportData(name="x"), tmp_path)
    assert "CPU hours" not in empty and "Accepted losses" not in empty


def test_real_jobs_are_counted_over_all_their_starts(bed: Any, run: RunDir, eagle) -> None:
    entry = submit(bed, run)
    wait(lambda: list(run.slurm.use.glob("*.txt")))
    time.sleep(6)  # a tick of the supervisor
    kill_processes(entry["job_id"])
    wait(lambda: bed.run("squeue", "--noheader") == "")
    second = submit(bed, run)
    (run.path / "go").touch()
    wait(lambda: bed.run("squeue", "--noheader") == "")
    found = json.loads(eagle("status", run.path, "--json", env=bed.env).stdout)[str(run.path)]
    used = found["use"]["extract"]
    assert used["starts"] == 2 and used["peak_gib"] > 0
    files = list(run.slurm.use.glob("*.txt"))
    assert {p.name.split(".")[0] for p in files} == {entry["suffix"], second["suffix"]}
    starts = use.read_starts(run)
    assert [s.why for s in starts] == ["running", "done"] and starts[0].end == 0
    assert starts[0].until - starts[0].start >= 4
    seconds = sum(s.until - s.start for s in starts)
    assert used["gpu_hours"] == pytest.approx(8 * seconds / 3600, abs=1e-3)
    stage = next(s for s in found["stages"] if s["name"] == "extract")
    assert stage["gpu_hours"] == used["gpu_hours"] and stage["wall_s"] == used["wall_s"]
    assert "GPU h in 2 starts" in eagle("status", run.path, env=bed.env).stdout
