"""The embedded default as Slurm jobs, whole: what the README's "Without a cluster" types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.mark.campaign
@pytest.mark.parametrize("where", ["host", "root"])
def test_smollm2_as_jobs(where, place, testbed, eagle, verifier_dir, root: Path, tmp_path: Path):
    """About 10 minutes on 2 cores; the draft helps as much as the one made without Slurm, on the
    host's Python (`host`) and in the image (`root`)."""
    run, site, image = tmp_path / "smollm2", tmp_path / "site.toml", place(where).image
    text = (root / "slurm/sites/testbed.toml").read_text()
    site.write_text(text + (f'\nimage = "{image}"\n' if image else ""))
    done = eagle("submit", "jobs/smollm2.toml", "--site", site, "--run", run)
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
