"""Slurm itself fails or interferes: nodes, daemons, requeue, hold, suspend."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from campaign import Case, records, wait  # noqa: E402


def node_of(case: Case, job: str) -> int:
    return int(case.bed.squeue(job, "%N").rpartition(".")[2])


def test_a_node_goes_down(case: Case) -> None:
    """Its job starts on another node; the claim of the lost worker does not stop anybody."""
    case.configure("workers = 2")
    case.open(3, 4, 5)
    case.extract()
    claimed = case.wait_claims(2)
    lost = sorted(claimed)[0]
    job = claimed[lost]["job"]
    node = node_of(case, job)
    case.bed.kill_node(node, seen=True)
    case.release()
    wait(lambda: case.holder(lost) != claimed[lost]["id"], 60, "the lost unit taken over")
    case.finish()
    case.whole()
    assert not list((case.run / "extract/attempts").glob("*.died"))
    text = "\n".join(p.read_text() for p in (case.run / "slurm/starts").glob("*.txt"))
    nodes = [line.split()[2] for line in text.splitlines() if line.startswith(f"{job} ")]
    assert len(nodes) == 2 and nodes[0] == f"127.0.1.{node}" != nodes[1]


@pytest.mark.campaign
def test_scontrol_requeue(case: Case) -> None:
    """Of one array task in mid-unit: it alone starts again."""
    case.configure("workers = 2")
    case.open(3, 4, 5)
    case.extract()
    claimed = case.wait_claims(2)
    jobs = {w["job"]: unit for unit, w in claimed.items()}
    job, other = sorted(jobs)
    case.scontrol("requeue", job)
    wait(lambda: case.state(job) == "PENDING", 30, "the task requeued")
    assert case.state(other) == "RUNNING"
    case.release()
    case.finish()
    case.whole()
    starts = {slot.partition(".")[2]: n for slot, n in case.starts().items()}
    assert starts == {job.partition("_")[2]: 2, other.partition("_")[2]: 1}


@pytest.mark.campaign
def test_requeuehold_and_release(case: Case) -> None:
    """Nothing happens until a person lets the job go; a second submit adopts it."""
    case.open(3, 4)
    (entry,) = case.extract()
    case.wait_claims(1)
    case.scontrol("requeuehold", entry["job_id"])
    wait(lambda: case.state(entry["job_id"]) == "PENDING", 30, "the job held")
    assert case.claims() == {}
    case.release()
    assert case.extract() == []
    case.scontrol("release", entry["job_id"])
    case.finish()
    case.whole()
    # A job that is over, once more: it finds nothing to do.
    case.scontrol("requeue", entry["job_id"])
    case.finish()
    case.whole()
    assert list(case.starts().values()) == [3]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may suspend")
@pytest.mark.campaign
def test_suspend_and_resume(case: Case) -> None:
    """Another worker takes over the unit of a silent one; the first record wins when it wakes."""
    case.configure("workers = 2")
    case.open(3, 4, 5)
    case.extract()
    claimed = case.wait_claims(2)
    unit, other = sorted(claimed)
    asleep = claimed[unit]
    case.scontrol("suspend", asleep["job"])
    case.release()
    wait(lambda: len(records(case.run, "extract")) == 12, 60, "the other worker did it all")
    made = {r["unit"]: r["worker"] for r in records(case.run, "extract")}
    assert made[unit] == claimed[other]["id"]
    assert case.state(asleep["job"]) == "SUSPENDED"
    case.scontrol("resume", asleep["job"])
    case.finish()
    case.whole()
    assert {r["unit"]: r["worker"] for r in records(case.run, "extract")} == made


@pytest.mark.campaign
def test_slurmctld_restarts_and_accounting_is_down(case: Case) -> None:
    """Submitted without slurmdbd; slurmctld is away while units end and comes back."""
    case.bed.testbed("stop-dbd")
    try:
        case.configure("workers = 2")
        case.open(3, 4, 5)
        case.extract()
        case.wait_claims(2)
        case.bed.testbed("stop-ctld")
        case.release()
        wait(lambda: len(records(case.run, "extract")) == 12, 60, "units done without slurmctld")
        case.bed.testbed("start-ctld")
        case.finish()
        case.whole()
        assert sorted(case.starts().values()) == [1, 1]
    finally:
        case.bed.up()


@pytest.mark.campaign
def test_a_lost_node_whose_worker_lives_on(case: Case) -> None:
    """slurmd is gone, its tasks are not: two workers of one job, and still one record a unit."""
    case.open(3, 4, 5)
    (entry,) = case.extract()
    ((unit, old),) = case.wait_claims(1).items()
    node = node_of(case, entry["job_id"])
    os.kill(case.bed.status()["daemons"][f"slurmd-127.0.1.{node}"]["pid"], signal.SIGKILL)
    case.scontrol("update", f"NodeName=127.0.1.{node}", "State=DOWN", "Reason=test")
    try:
        wait(lambda: case.holder(unit) not in ("", old["id"]), 90, "the second worker in the unit")
        assert Path(f"/proc/{old['pid']}").exists()
        case.release()
        case.finish()
        wait(lambda: not case.alive(old), 60, "the end of the first worker")
        case.whole()
        tries = [a.name for a in (case.run / "extract/attempts").glob(f"{unit}.*.json")]
        assert len(tries) == 2
    finally:
        case.bed.start_node(node)


@pytest.mark.campaign
@pytest.mark.parametrize("fault", ["requeue", "node"])
def test_downstream_waits_for_what_is_requeued(case: Case, fault: str) -> None:
    """afterany must not take a job that starts again for one that is over."""
    case.open(3, 4)
    extract, train = case.submit()
    ((unit, worker),) = case.wait_claims(1).items()
    if fault == "node":
        case.bed.kill_node(node_of(case, extract["job_id"]), seen=True)
    else:
        case.scontrol("requeue", extract["job_id"])
    wait(lambda: case.holder(unit) not in ("", worker["id"]), 90, "the second start")
    assert case.jobs()[train["job_id"]] == "PENDING Dependency"
    case.release()
    case.wait_state(train["job_id"], "RUNNING")
    assert len(records(case.run, "extract")) == 12
    wait(lambda: list((case.run / "train/workers").glob("*.json")), 60, "train at work")
    case.bed.run("scancel", train["job_id"])
    case.finish()
    case.whole()
