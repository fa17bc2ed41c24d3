"""Workers that are cancelled or die: their unit is done by somebody, once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from campaign import UNITS, Case, records, wait  # noqa: E402


@pytest.mark.parametrize(
    "case",
    [pytest.param(p, marks=pytest.mark.campaign) for p in ("host", "user", "newer")],
    indirect=True,
)
def test_scancel_of_one_array_task(case: Case) -> None:
    case.configure("workers = 2")
    case.open(3, 7, 9)
    (entry,) = case.extract()
    assert entry["tasks"] == 2 and entry["role"] == "workers"
    claimed = case.wait_claims(2)
    lost, other = sorted(claimed, key=lambda unit: claimed[unit]["job"])
    case.bed.run("scancel", claimed[lost]["job"])
    wait(lambda: lost not in case.claims(), 20, "the claim of the cancelled task given up")
    assert case.state(claimed[other]["job"]) == "RUNNING"
    case.release()
    case.finish()
    case.whole()
    by_unit = {r["unit"]: r["worker"] for r in records(case.run, "extract")}
    assert {by_unit[f"{u:05d}"] for u in (3, 7, 9)} == {claimed[other]["id"]}


def test_a_killed_worker_is_started_again_in_its_job(case: Case) -> None:
    case.open(4, 5)
    (entry,) = case.extract()
    ((unit, worker),) = case.wait_claims(1).items()
    case.kill(worker)
    wait(lambda: case.claims().get(unit, worker)["id"] != worker["id"], 60, "the unit taken up")
    case.release()
    case.finish()
    case.whole()
    assert list(case.starts().values()) == [2]
    assert (case.run / f"extract/attempts/{unit}.died").read_text().count("\n") == 1
    assert "extract ended with 137 after 0 units" in case.log(entry)


@pytest.mark.campaign
def test_a_killed_supervisor(case: Case) -> None:
    """The same submit goes on. With ProctrackType=proctrack/linuxproc Slurm does not find what the
    supervisor had started: that worker ends its units and leaves, beside the one of the new job."""
    case.open(4, 5)
    (entry,) = case.extract()
    ((_, worker),) = case.wait_claims(1).items()
    case.kill_host(entry)
    wait(lambda: case.jobs() == {}, 60, "the end of the job")
    (again,) = case.extract()
    assert again["job_id"] != entry["job_id"]
    case.wait_state(again["job_id"], "RUNNING")
    case.release()
    case.finish()
    wait(lambda: not case.alive(worker), 60, "the end of the first worker")
    case.whole()


@pytest.mark.campaign
def test_a_unit_that_kills_its_worker_three_times_is_given_up(case: Case) -> None:
    case.open(4, 5, 6)
    case.extract()
    seen = {""}
    for _ in range(3):
        wait(lambda: case.holder("00004") not in seen, 60, "a worker in unit 00004")
        worker = case.claims()["00004"]
        seen.add(worker["id"])
        case.kill(worker)
    case.release()
    case.finish()
    case.nothing_left("extract")
    made = {r["unit"]: r for r in records(case.run, "extract")}
    assert len(made) == UNITS
    assert [u for u, r in made.items() if r["state"] != "done"] == ["00004"]
    assert made["00004"]["info"]["reasons"] == [
        f"its worker died ({worker['job']} exit 137)" for _ in range(3)
    ]
    assert not (case.run / "extract/held").exists()
    # What a person does about it.
    case.eagle("retry", case.run)
    case.extract(hold=False)
    case.finish()
    case.whole()


@pytest.mark.campaign
def test_three_deaths_before_any_unit_hold_the_stage(case: Case) -> None:
    case.configure("workers = 2", site={"preamble": ["ulimit -v 3000000"]})
    case.open(*range(UNITS))
    canary, others, train = case.submit(hold=False)
    case.finish()
    held = (case.run / "extract/held").read_text()
    assert held.startswith("died 3 times before any unit on 127.0.1."), held
    assert "did not load the verifier" in held and "Cannot allocate memory" in held
    assert records(case.run, "extract") == []
    # The others start behind the canary and leave at once; train's gate says why it is shut.
    assert "extract starts" not in case.log(others)
    assert "train ended with 78" in case.log(train) and held.strip() in case.log(train)
    done = case.eagle("submit", case.recipe, "--site", case.site, "--run", case.run, check=False)
    assert done.returncode == 1 and held.strip() in done.stderr and "retry" in done.stderr
    case.configure("workers = 2")
    case.eagle("retry", case.run)
    case.extract(hold=False)
    case.finish()
    case.whole()
