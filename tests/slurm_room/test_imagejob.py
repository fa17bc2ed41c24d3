"""An image built as a job of a real Slurm, which it starts itself and wipes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kimi_eagle.images import pins
from kimi_eagle.site import Site
from kimi_eagle.slurm import imagejob

TESTBED = Path(__file__).resolve().parents[2] / "slurm" / "testbed" / "testbed.py"


def test_text_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIMI_EAGLE_CACHE", "/shared/a cache")
    site = Site(
        name="s", partition="gpu", account="acc", time="02:00:00", scratch="/local/my scratch",
        apptainer="/opt/an apptainer/bin/apptainer",
        preamble=("module load apptainer",), extra=("--licenses=x",),
        cpu={"partition": "cpu", "cpus": 8, "memory": "32G"},
    )  # fmt: skip
    made = imagejob.text(site, "cuda", Path("/shared/the images/x.sif"))
    assert made == f"""\
#!/bin/bash
#SBATCH --job-name="image"
#SBATCH --output="/shared/the images/x.build-%j.log"
#SBATCH --nodes="1"
#SBATCH --ntasks="1"
#SBATCH --time="02:00:00"
#SBATCH --partition="cpu"
#SBATCH --account="acc"
#SBATCH --cpus-per-task="8"
#SBATCH --mem="32G"
#SBATCH --licenses=x
set -e
module load apptainer
set +e
export KIMI_EAGLE_CACHE='/shared/a cache'
export PYTHONSAFEPATH=1
export PYTHONNOUSERSITE=1
export PATH='/opt/an apptainer/bin':$PATH
exec {sys.executable} -u -m kimi_eagle.slurm.imagejob cuda '/shared/the images/x.sif' \
'/local/my scratch'
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Path]:
    """A testbed of this module alone; SLURM_CONF points to it."""
    folder = Path(f"/tmp/ke-image-{os.getpid()}")
    call = [sys.executable, str(TESTBED)]
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith(("SLURM", "SBATCH"))]:
            patch.delenv(name)
        try:
            subprocess.run([*call, "up", "--dir", str(folder)], check=True, capture_output=True)
            patch.setenv("SLURM_CONF", str(folder / "etc" / "slurm.conf"))
            yield folder
        finally:
            subprocess.run([*call, "wipe", "--dir", str(folder)], check=True, capture_output=True)


@pytest.mark.campaign
def test_image_is_built_and_pinned_on_a_node(apptainer: str, slurm: Path, ground: Path) -> None:
    folder, scratch = ground / "the images", ground / "scratch"
    folder.mkdir()
    scratch.mkdir()
    out = folder / "by job.sif"
    site = Site(name="testbed", time="30", scratch=str(scratch))
    job = imagejob.submit(site, "cpu", out)
    log = folder / f"by job.build-{job}.log"
    deadline = time.monotonic() + 900
    seen = set()
    while _state(job) in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING"):
        seen |= {p.name[:18] for p in scratch.iterdir()}
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)
    said = log.read_text()
    assert _state(job) == "COMPLETED", said
    assert seen == {".kimi-eagle-build-"}  # it worked there ...
    assert not list(scratch.iterdir())  # ... and left nothing
    found = pins.verified(out)
    assert f"sha256:{found.sha256}" in said
    assert re.search(r"^image: [0-9.]+ s$", said, re.MULTILINE)
    left = {p.name for p in folder.iterdir()} - {".images.lock.json.turn"}
    assert left == {
        *("by job.sif", "by job.sbom.cdx.json", "by job.build.sbatch", "images.lock.json"),
        log.name,
    }
    assert json.loads((folder / "images.lock.json").read_text())["images"].keys() == {"by job"}


def _state(job: str) -> str:
    argv = ["squeue", "--noheader", "--states=all", "--jobs", job, "--format", "%T"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
