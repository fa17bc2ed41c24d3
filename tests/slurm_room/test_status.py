"""What status shows, on a real Slurm without accounting, with real jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from small_jobs import ROOT, at_work, clean, kill_processes, looker, make_run, submit, wait  # noqa: E402

from kimi_eagle.ledger import Ledger, Unit  # noqa: E402
from kimi_eagle.recipe import STAGES  # noqa: E402
from kimi_eagle.rundir import RunDir  # noqa: E402
from kimi_eagle.slurm import jobview  # noqa: E402
from kimi_eagle.worker import Worker  # noqa: E402


@pytest.fixture
def bed(bare_testbed: Any) -> Iterator[Any]:
    yield from clean(bare_testbed)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


@pytest.fixture
def look(bed: Any, eagle: Callable) -> Callable[..., dict[str, Any]]:
    return looker(bed, eagle)


def test_a_job_from_the_queue_to_the_end(bed: Any, run: RunDir, look, eagle) -> None:
    entry = submit(bed, run, "--hold")
    found = look(run)
    (job,) = found["jobs"]
    assert (job["id"], job["state"], job["reason"]) == (entry["job_id"], "PENDING", "JobHeldUser")
    assert job["held"] and f"scontrol release {entry['job_id']}" in job["words"]
    assert found["state"] == "held" and "scontrol release" in found["why"]
    assert found["extract"]["state"] == "waiting"  # for prepare
    assert found["slurm"] == "ok"

    bed.run("scontrol", "release", entry["job_id"])
    wait(at_work(run))
    found = look(run)
    (job,) = found["jobs"]
    assert (job["state"], job["stage"], job["unit"]) == ("RUNNING", "extract", "00000")
    assert job["node"].startswith("127.0.1.") and job["fraction"] == 0.5 and job["live"]
    assert found["state"] == "running" and found["extract"]["state"] == "running"
    assert found["extract"] | {"units": 2, "done": 0, "running": 1, "left": 2} == found["extract"]

    (run.path / "go-00000").touch()
    wait(at_work(run, "00001"))
    began = time.monotonic()
    assert look(run)["extract"]["done"] == 1 and time.monotonic() - began < 2
    time.sleep(1)
    stage = look(run)["extract"]
    assert stage["tokens_per_second"] > 0 and stage["eta_seconds"] is not None
    assert stage["rejected"] == 2 and stage["tokens_total"] == 200
    text = eagle("status", run.path, env=bed.env).stdout
    assert "extract    running" in text and "1/2 units" in text and "2 samples rejected" in text
    assert f"job {entry['job_id']}  ext-tiny  RUNNING  127.0.1." in text and "extract 00001" in text

    (run.path / "go").touch()
    wait(lambda: bed.run("squeue", "--noheader") == "")
    found = look(run)
    (job,) = found["jobs"]
    assert job["state"] == "ENDED" and job["words"] == "ended: nothing was left for it"
    assert found["extract"]["done"] == 2 and found["extract"]["left"] == 0
    assert not any("UNKNOWN" in str(j) for j in found["jobs"])


def test_a_short_job_is_seen_finished_within_five_seconds(bed: Any, tmp_path: Path, look) -> None:
    run = make_run(tmp_path / "run", allow_rejected=0.5)
    submit(bed, run, units=1)
    wait(at_work(run))
    (run.path / "go").touch()
    wait(lambda: list(run.stage("extract").records.glob("*.json")))
    began = time.monotonic()
    wait(
        lambda: (
            (found := look(run))["extract"]["state"] == "done" and found["jobs"][0]["live"] is False
        )
    )
    assert time.monotonic() - began < 5
    assert look(run)["state"] == "stopped"  # five stages are left, and nothing is queued for them


def test_a_dead_worker_of_another_machine_is_dead_at_once(bed: Any, run: RunDir, look, eagle):
    entry = submit(bed, run, host="far-away")
    wait(at_work(run))
    assert look(run)["extract"]["workers"][0]["host"] == "far-away"
    assert look(run)["extract"]["workers"][0]["sure"]
    kill_processes(entry["job_id"])
    wait(lambda: bed.run("squeue", "--noheader") == "")
    found = look(run)
    assert found["extract"]["workers"] == [] and found["extract"]["running"] == 0
    (job,) = found["jobs"]
    assert job["state"] == "ENDED" and "without a word" in job["words"]
    assert found["state"] == "stopped" and "type the same submit again" in found["why"]
    assert "kimi-eagle submit /r/tiny.toml --site test" in found["why"]
    done = eagle("status", run.path, "--watch", "0.2", env=bed.env, timeout=60)
    assert done.returncode == 1 and "type the same submit again" in done.stdout


def test_a_requeued_job_has_no_live_worker_of_its_first_start(bed: Any, run: RunDir, look) -> None:
    entry = submit(bed, run, "--requeue", host="far-away")
    wait(at_work(run))
    bed.run("scontrol", "requeue", entry["job_id"])
    wait(lambda: bed.squeue(entry["job_id"]) == "PENDING")
    found = look(run)
    (job,) = found["jobs"]
    assert job["state"] == "PENDING" and "requeued; " in job["words"]
    assert found["extract"]["workers"] == [] and found["state"] == "queued"
    bed.run("scontrol", "update", f"JobId={entry['job_id']}", "StartTime=now")
    wait(lambda: len(list(run.stage("extract").workers.glob("*.json"))) == 2)
    wait(lambda: look(run)["jobs"][0]["unit"])
    found = look(run)
    assert len(found["extract"]["workers"]) == 1 and found["jobs"][0]["restarts"] == 1
    assert found["use"]["extract"]["starts"] == 2


def test_suspended_and_held_by_hand_after_a_requeue(bed: Any, run: RunDir, look) -> None:
    entry = submit(bed, run, "--requeue", host="far-away")
    wait(at_work(run))
    bed.run("scontrol", "suspend", entry["job_id"])
    found = look(run)
    assert found["jobs"][0]["state"] == "SUSPENDED" and found["extract"]["state"] == "running"
    assert "scontrol resume" in found["extract"]["why"]
    bed.run("scontrol", "resume", entry["job_id"])
    bed.run("scontrol", "requeuehold", entry["job_id"])
    wait(lambda: bed.squeue(entry["job_id"]) == "PENDING")
    found = look(run)
    assert found["jobs"][0]["held"] and "scontrol release" in found["jobs"][0]["words"]
    assert found["state"] == "held"


def test_array_tasks_that_wait_alike_are_one_line(bed: Any, run: RunDir, look, eagle) -> None:
    entry = submit(bed, run, "--hold", tasks=5)
    found = look(run)
    assert [j["id"] for j in found["jobs"]] == [f"{entry['job_id']}_{i}" for i in range(5)]
    text = eagle("status", run.path, env=bed.env).stdout
    assert f"job {entry['job_id']}_0 and 4 more  ext-tiny  PENDING" in text
    bed.run("scancel", entry["job_id"])
    wait(lambda: bed.run("squeue", "--noheader") == "")
    assert "before it started" in look(run)["jobs"][0]["words"]


def test_four_workers_at_once_are_all_shown(bed: Any, run: RunDir, look) -> None:
    entry = submit(bed, run, tasks=4, units=6, host="far-away")
    wait(lambda: all(at_work(run, f"{i:05d}")() for i in range(4)))
    found = look(run)
    assert found["extract"]["running"] == 4 and len(found["extract"]["workers"]) == 4
    assert {j["unit"] for j in found["jobs"]} == {f"{i:05d}" for i in range(4)}
    assert {j["id"] for j in found["jobs"]} == {f"{entry['job_id']}_{i}" for i in range(4)}
    assert len({j["node"] for j in found["jobs"]}) == 4


def test_without_an_answer_of_slurm_the_records_are_shown(
    bed: Any, run: RunDir, tmp_path: Path, look, eagle
) -> None:
    submit(bed, run)
    wait(at_work(run))
    lines = Path(bed.env["SLURM_CONF"]).read_text().splitlines()
    # Nobody listens on port 1.
    changed = ["SlurmctldPort=1" if x.startswith("SlurmctldPort") else x for x in lines]
    dead = tmp_path / "dead.conf"
    dead.write_text("\n".join(changed) + "\n")
    found = look(run, SLURM_CONF=str(dead))
    assert "squeue" in found["slurm"] and found["extract"]["units"] == 2
    assert found["jobs"][0]["state"] == "STARTED" and "last sign" in found["jobs"][0]["words"]
    done = eagle("status", run.path, env={**bed.env, "SLURM_CONF": str(dead)})
    assert done.returncode == 0 and "shown is what the records say" in done.stdout


def test_an_intent_is_told_from_a_job_that_was_taken(bed: Any, run: RunDir, look) -> None:
    entry = submit(bed, run, "--hold", written=False)
    assert look(run)["jobs"][0]["id"] == entry["job_id"]
    bed.run("scancel", entry["job_id"])
    wait(lambda: bed.run("squeue", "--noheader") == "")
    (job,) = look(run)["jobs"]
    assert job["state"] == "INTENT" and "not known whether" in job["words"]
    file = run.slurm.jobs / f"{entry['suffix']}.json"
    refused = {**entry, "job_id": None, "withdrawn": "sbatch: error:\n no such partition"}
    file.write_text(json.dumps(refused))
    (job,) = look(run)["jobs"]
    assert job["state"] == "WITHDRAWN" and job["words"] == "sbatch: error: no such partition"


def test_a_job_that_was_submitted_by_hand_is_shown(bed: Any, run: RunDir, look) -> None:
    job_id = submit(bed, run, name="my-own", host="far-away")["job_id"]
    wait(at_work(run))
    (job,) = look(run)["jobs"]
    assert (job["id"], job["role"], job["unit"]) == (job_id, "by hand", "00000")
    kill_processes(job_id)
    wait(lambda: bed.run("squeue", "--noheader") == "")
    found = look(run)
    assert found["extract"]["workers"] == [] and found["jobs"] == []
    assert "died without a word" in found["extract"]["error"] and found["state"] == "stopped"


def test_a_changed_recipe_with_queued_jobs_is_not_finished(bed: Any, tmp_path: Path, look) -> None:
    from kimi_eagle.recipe import load
    from kimi_eagle.rundir import follow
    from kimi_eagle.stages.context import recipe_digest

    run = make_run(tmp_path / "run")
    recipe = load(ROOT / "tests/recipes/tiny.toml")
    follow(run, recipe, ROOT / "tests/recipes/tiny.toml")
    submit(bed, run, "--hold")
    for digest, state in ((recipe_digest(recipe), "finished"), ("earlier", "held")):
        for name in STAGES:
            units = [Unit("all", {})]
            with Worker(run.stage(name), recipe_digest=digest) as worker:
                worker.ledger.write_plan(units)
                for attempt in worker.attempts(units):
                    with attempt:
                        attempt.commit([], counts={"samples": 1})
        assert look(run)["state"] == state


def test_a_watch_ends_when_the_run_does(bed: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", allow_rejected=0.5)
    for name in set(STAGES) - {"extract"}:
        units = [Unit("all", {})]
        with Worker(run.stage(name)) as worker:
            worker.ledger.write_plan(units)
            for attempt in worker.attempts(units):
                with attempt:
                    attempt.commit([], counts={"samples": 1})
    submit(bed, run)
    watch = subprocess.Popen(
        [sys.executable, "-m", "kimi_eagle", "status", "--watch", "0.2", str(run.path)],
        env={**os.environ, **bed.env}, cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait(at_work(run))
    (run.path / "go").touch()
    lines = watch.communicate(timeout=60)[0].splitlines()
    assert watch.returncode == 0, lines
    assert len(set(lines)) > 3 and any("2/2 units" in x for x in lines)
    assert lines.count(next(x for x in lines if "vocab" in x)) == 1  # only what changed


def test_silence_tells_about_a_worker_without_a_job(run: RunDir, eagle) -> None:
    with Worker(run.stage("extract")) as worker:
        worker.ledger.write_plan([Unit("00000", {})])
        path = run.stage("extract").workers / f"{worker.id}.json"
        state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "host": "elsewhere", "beat_seconds": 0.2}))
    assert "not sure that the worker on elsewhere lives" in eagle("status", run.path).stdout
    done = eagle("status", run.path, "--watch", "0.3", timeout=60)
    assert done.returncode == 1 and "died without a word (pid" in done.stdout.splitlines()[-1]


def test_settings_of_the_user_change_nothing(bed: Any, run: RunDir, look) -> None:
    submit(bed, run, "--hold")
    plain = bed.run("squeue")
    found = look(
        run, SQUEUE_FORMAT="%i", SQUEUE_STATES="RUNNING", SLURM_JOB_ID="1", SQUEUE_SORT="x"
    )
    assert found["jobs"][0]["state"] == "PENDING"
    assert bed.run("squeue") == plain and "ext-tiny" in plain


def test_held_stages_and_runs_say_why(bed: Any, run: RunDir, look) -> None:
    Ledger(run.stage("regenerate").make()).write_plan([Unit("00000", {})])
    run.stage("regenerate").held.write_text("died 3 times before any unit on n1: no GPU\n")
    found = look(run)
    assert found["state"] == "held" and "no GPU" in found["why"] and "retry" in found["why"]
    run.held.write_text("max_gpu_hours = 3 reached\n")
    assert look(run)["held"] == "max_gpu_hours = 3 reached"


def test_reasons_of_slurm_in_words() -> None:
    assert jobview.reason_words("Resources") == "waits for free nodes (Resources)"
    assert "limit of your account" in jobview.reason_words("QOSMaxGRESPerUser")
    assert "down, drained" in jobview.reason_words("ReqNodeNotAvail, UnavailableNodes:n[1-2]")
    assert "Slurm says: SomethingNew" in jobview.reason_words("SomethingNew")
