"""submit --here: the nodes of an allocation do the work, nothing is submitted."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from campaign import Case, records  # noqa: E402


def test_a_worker_on_each_node(case: Case) -> None:
    """Two nodes hold a unit at once; the batch script is a user's own."""
    case.open(1, 4, 8)
    words = [sys.executable, "-m", "kimi_eagle", "submit", case.recipe, "--site", case.site]
    words += ["--run", case.run, "--here", "--only", "extract"]
    script = f"export KIMI_EAGLE_TEST_HOLD=2; exec {shlex.join(map(str, words))}"
    job = case.bed.sbatch(
        script, "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=4",
        "--mem=4G",
    )  # fmt: skip
    state = case.bed.wait_state(job, "COMPLETED", "FAILED", seconds=180)
    assert state == "COMPLETED", case.bed.output(job)
    case.whole()
    mine = [r["worker"] for r in records(case.run, "extract") if r["worker"].startswith(f"j{job}.")]
    assert {w.split("-")[0] for w in mine} == {f"j{job}.0", f"j{job}.1"}
    assert list((case.run / "slurm/jobs").glob("*.json")) == []
    used = [p.read_text() for p in (case.run / "slurm/use").glob("*.txt")]
    assert len(used) == 2 and all("gpus=8 " in text for text in used)


def test_outside_an_allocation(case: Case) -> None:
    case.open(1)
    command = ("submit", case.recipe, "--site", case.site, "--run", case.run, "--here")
    done = case.eagle(*command, check=False)
    assert done.returncode == 2 and "allocation" in done.stderr
