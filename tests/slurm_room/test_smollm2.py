"""The embedded default as Slurm jobs, whole: what the README's "Without a cluster" types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.mark.campaign
def test_smollm2_as_jobs(testbed, eagle, verifier_dir, tmp_path: Path):
    """About 10 minutes on 2 cores; the draft helps as much as the one made without Slurm."""
    run = tmp_path / "smollm2"
    done = eagle("submit", "jobs/smollm2.toml", "--site", "testbed", "--run", run)
    assert done.returncode == 0, done.stderr
    watched = eagle("status", run, "--watch", timeout=2400)
    assert watched.returncode == 0, watched.stdout[-3000:]
    looked = json.loads(eagle("status", run, "--json").stdout)[str(run)]
    print(f"used {looked['use']['all']}, result {looked['result']}")
    assert looked["state"] == "finished"
    assert looked["result"]["identical_outputs"] is True
    assert looked["result"]["acceptance_length"] >= 1.4
    assert looked["use"]["all"]["gpu_hours"] > 0
    assert (run / "report.html").is_file() and (run / "draft/config.json").is_file()
