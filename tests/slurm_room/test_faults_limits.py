"""The end of a job's time and preemption: the unit ends or is dropped, the job comes back, once."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from campaign import OWN_HOST, UNITS, Case, records, wait  # noqa: E402
from places import IN_IMAGE  # noqa: E402


def by_task(case: Case) -> dict[str, int]:
    """Array task -> starts."""
    return {slot.partition(".")[2]: n for slot, n in case.starts().items()}


@IN_IMAGE
def test_a_unit_that_outlasts_the_time_limit_is_dropped(case: Case) -> None:
    """One task of an array reaches its limit in mid-unit: it alone comes back, with its number."""
    case.configure("workers = 2", site={"time": "10", "grace_seconds": 16})
    case.open(1, 2, 3)
    begun = time.monotonic()
    case.extract()
    claimed = case.wait_claims(2)
    unit = sorted(claimed)[0]
    short, other = claimed[unit]["job"], claimed[sorted(claimed)[1]]["job"]
    # A limit that is past already would end the job at once, without the signal before it.
    minutes = int(time.monotonic() - begun) // 60 + 2
    case.scontrol("update", f"JobId={short}", f"TimeLimit={minutes}")
    wait(lambda: case.state(short) == "PENDING", 200, "the job requeued")
    assert "USR2" in case.logs() and unit not in case.claims()
    assert case.state(other) == "RUNNING"
    case.release()
    case.finish()
    case.whole()
    assert by_task(case)[short.partition("_")[2]] == 2
    assert by_task(case)[other.partition("_")[2]] == 1


@pytest.mark.campaign
@IN_IMAGE
def test_a_unit_that_ends_before_the_time_limit_is_committed(case: Case) -> None:
    """A job of one minute, 15 s of them to leave: the next job goes on with the next unit."""
    case.configure(site={"time": "1", "grace_seconds": 300})
    case.open(1, 2, 3)
    (entry,) = case.extract()
    ((unit, worker),) = case.wait_claims(1).items()
    wait(lambda: "USR2" in case.logs(), 60, "the signal before the limit")
    case.release()
    wait(lambda: case.state(entry["job_id"]) == "PENDING", 30, "the job requeued")
    made = {r["unit"]: r["worker"] for r in records(case.run, "extract")}
    assert made[unit] == worker["id"] and len(made) == UNITS - 2
    case.finish()
    case.whole()
    assert list(case.starts().values()) == [2] and "extract ended with 75" in case.log(entry)


@pytest.mark.campaign
def test_a_job_that_may_not_requeue_leaves_the_rest_to_its_follow_up(case: Case) -> None:
    """No scontrol on the nodes: chained jobs go on; the canary leaves so that the others start."""
    tools = case.folder / "bin"
    tools.mkdir()
    for folder in (Path("/usr/bin"), Path("/bin")):
        for path in folder.iterdir():
            if path.name != "scontrol" and not (tools / path.name).exists():
                (tools / path.name).symlink_to(path)
    site = {"preamble": [OWN_HOST, f"export PATH={tools}"], "requeue": False, "chain": 2}
    case.configure("workers = 2", site=site | {"time": "1", "squeue_updates": True})
    case.open(*range(UNITS))
    entries = case.extract()
    assert [(e["role"], e["link"], e["tasks"]) for e in entries] == [
        ("canary", 0, 1), ("workers", 0, 1), ("workers", 1, 2), ("workers", 2, 2)
    ]  # fmt: skip
    canary, other, *_ = (e["job_id"] for e in entries)
    wait(lambda: "first unit done" in case.logs(), 60, "the canary's first unit")
    assert case.jobs()[other] == "PENDING Dependency"
    case.wait_claims(1)  # its second unit, which it ends before it leaves
    case.release()
    wait(lambda: case.state(other) == "RUNNING", 60, "the other worker")
    assert case.state(canary) == "" and len(records(case.run, "extract")) == 2
    case.finish()
    case.whole()


SLOW = pytest.mark.campaign


@IN_IMAGE
@pytest.mark.parametrize(
    ("grace", "signal"),
    [
        pytest.param(0, False, marks=SLOW),
        pytest.param(10, False, marks=SLOW),
        pytest.param(0, True, marks=SLOW),
        pytest.param(10, True, marks=SLOW),
    ],
)
def test_preemption(case: Case, grace: int, signal: bool) -> None:
    """A job of a higher partition takes the node in mid-unit; the worker comes back after it."""
    case.bed.up("--grace-time", str(grace), "--preempt-signal" if signal else "--no-preempt-signal")
    try:
        case.configure(site={"partition": "low"})
        case.open(5, 6)
        (entry,) = case.extract()
        ((unit, worker),) = case.wait_claims(1).items()
        high = case.bed.sbatch("sleep 1", "-phigh", "-N4", "--exclusive")
        if signal and grace:
            wait(lambda: "USR2" in case.log(entry), 30, "the user's signal")
            case.release()
        case.bed.wait_state(high, "COMPLETED", seconds=60)
        case.release()
        case.finish()
        case.whole()
        assert list(case.starts().values()) == [2]
        made = {r["unit"]: r["worker"] for r in records(case.run, "extract")}
        assert (made[unit] == worker["id"]) == (signal and grace > 0)
        assert not list((case.run / "extract/attempts").glob("*.died"))
    finally:
        case.bed.up("--grace-time", "0", "--no-preempt-signal")


@pytest.mark.campaign
def test_preemption_while_the_preamble_runs(case: Case) -> None:
    """A signal before the supervisor is there must not end the job for good."""
    case.bed.up("--grace-time", "10", "--preempt-signal")
    try:
        site = {"partition": "low", "preamble": ["touch $TEST_FOLDER/began; sleep 5", OWN_HOST]}
        case.configure(site=site)
        case.open(5)
        (entry,) = case.extract(hold=False, TEST_FOLDER=str(case.folder))
        wait(lambda: (case.folder / "began").exists(), 30, "the preamble")
        high = case.bed.sbatch("sleep 1", "-phigh", "-N4", "--exclusive")
        case.bed.wait_state(high, "COMPLETED", seconds=60)
        case.finish()
        case.whole()
    finally:
        case.bed.up("--grace-time", "0", "--no-preempt-signal")


@pytest.mark.campaign
def test_max_gpu_hours_hold_the_run(case: Case) -> None:
    """8 GPUs for some 10 s are 0.02 hours: the worker ends its unit and leaves; nobody starts."""
    case.configure("max_gpu_hours = 0.02")
    case.open(*range(4))
    extract, train = case.submit()
    case.wait_claims(1)
    wait(lambda: (case.run / "held").exists(), 90, "the run held")
    time.sleep(6)  # host.sh looks every 5 s
    case.release()
    case.finish()
    assert (case.run / "held").read_text() == "max_gpu_hours = 0.02 reached\n"
    assert len(records(case.run, "extract")) == UNITS - 3  # the unit it was in
    assert "train starts" not in case.log(train) and "max_gpu_hours" in case.log(train)
    done = case.eagle("submit", case.recipe, "--site", case.site, "--run", case.run, check=False)
    assert done.returncode == 1 and "max_gpu_hours" in done.stderr
    case.configure("max_gpu_hours = 5")
    case.eagle("retry", case.run)
    case.extract()
    case.finish()
    case.whole()


@pytest.mark.campaign
def test_too_many_starts_hold_the_stage(case: Case) -> None:
    """A job that is requeued again and again must not do so for ever."""
    case.configure("max_attempts = 2")
    case.open(1)
    (entry,) = case.extract()
    for count in (1, 2):
        case.wait_claims(1)
        case.scontrol("requeue", entry["job_id"])
        wait(lambda: case.claims() == {}, 30, "the unit dropped")
        wait(lambda n=count: list(case.starts().values()) == [n + 1], 60, "the next start")
    case.finish()
    assert "started 2 times" in (case.run / "extract/held").read_text()
    case.eagle("retry", case.run)
    case.configure()
    case.extract(hold=False)
    case.finish()
    case.whole()
