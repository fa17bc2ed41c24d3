"""What is downstream of a failure: its gate says no, with the reason, and nothing hangs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from campaign import UNITS, Case, records, wait  # noqa: E402


@pytest.mark.campaign
def test_a_cancelled_upstream(case: Case) -> None:
    """train waits with afterany, starts when extract is cancelled, and leaves at its gate."""
    case.open(3, 4)
    extract, train = case.submit()
    case.wait_claims(1)
    assert train["after"] == [extract["job_id"]]
    case.bed.run("scancel", extract["job_id"])
    case.finish(60)
    assert "train ended with 78" in case.log(train)
    assert "2 units of extract are open and nobody works on them" in case.log(train)
    assert case.bed.squeue(train["job_id"], "%T") == "FAILED"
    assert records(case.run, "train") == [] and case.claims() == {}
    # The same command finishes what is left; train is not wanted here.
    case.extract(hold=False)
    case.finish()
    case.whole()


@pytest.mark.campaign
def test_a_purged_failed_upstream(case: Case) -> None:
    """Slurm runs a job that waits for one it has forgotten (22.05): the gate still refuses."""
    case.bed.up("--min-job-age", "2")
    try:
        case.configure(site={"preamble": ["exit 3"]})
        case.open(3)
        (failed,) = case.extract()
        case.finish()
        wait(lambda: not case.bed.squeue(failed["job_id"]), 120, "the failed job forgotten")
        case.configure()
        script = (case.run / f"slurm/log/{failed['job_id']}_submission.sh").read_text()
        assert "exit 3" in script
        host = f"exec bash {case.run}/slurm/host.sh --run {case.run} --stages train --gpus 8"
        job = case.bed.sbatch(
            f"{host} -- {sys.executable} -m kimi_eagle stage @STAGE@ --run {case.run}",
            f"--dependency=afterany:{failed['job_id']}", "--kill-on-invalid-dep=yes",
        )  # fmt: skip
        wait(lambda: "1 units of extract are open" in case.bed.output(job), 60, "the gate's answer")
        wait(lambda: case.bed.squeue(job) in ("FAILED", ""), 30, "the end of the job")
    finally:
        case.bed.up("--min-job-age", "300")


def test_others_go_on_when_the_canary_is_cancelled(case: Case) -> None:
    """The first of the others makes the first unit; those after it wait for that, and come back."""
    case.configure("workers = 3")
    case.open(*range(UNITS))
    canary, others = case.extract(hold=False)
    assert (canary["role"], others["role"], others["tasks"]) == ("canary", "workers", 2)
    case.wait_state(canary["job_id"], "RUNNING")
    wait(lambda: list((case.run / "extract/workers").glob("*.json")), 60, "the canary at work")
    case.bed.run("scancel", canary["job_id"])
    case.finish()
    case.whole()
    made = {r["worker"].partition("-")[0] for r in records(case.run, "extract")}
    assert made <= {f"j{others['job_id']}_{task}" for task in (0, 1)}
