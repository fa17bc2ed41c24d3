"""Files that --emit wrote, submitted by hand: the same jobs, with sbatch and bash alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from campaign import Case, digests  # noqa: E402
from places import IN_IMAGE  # noqa: E402


def without_python(folder: Path) -> Path:
    """Every program of this machine but Python."""
    folder.mkdir()
    for path in [*Path("/bin").iterdir(), *Path("/usr/sbin").iterdir()]:
        if "python" not in path.name and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    return folder


@IN_IMAGE
def test_one_file_by_sbatch(case: Case) -> None:
    """vocab, from another folder's files; the run's own start.sh knows what to start.

    In the image the job has bash and apptainer and nothing else: neither Python nor kimi-eagle.
    """
    case.configure(site={"preamble": []})  # the usual one drops the file's arguments
    case.open()
    shutil.rmtree(case.run / "vocab")
    out = case.folder / "jobs"
    command = ("submit", case.recipe, "--site", case.site, "--run", case.run, "--emit", out)
    case.eagle(*command, "--only", "vocab")
    path = os.environ["PATH"]
    if case.place.image:
        path = str(without_python(case.folder / "bin"))
    done = subprocess.run(
        ["sbatch", "--parsable", "2-vocab.sbatch", case.run],
        cwd=out, env={"PATH": path, "SLURM_CONF": case.bed.env["SLURM_CONF"]},
        capture_output=True, text=True, **case.place.ids,
    )  # fmt: skip
    job = done.stdout.strip()
    assert case.bed.wait_state(job, "COMPLETED", "FAILED", seconds=90) == "COMPLETED", done.stderr
    assert digests(case.run, "vocab") == digests(case.origin, "vocab")
    shown = case.eagle("status", case.run).stdout
    assert "in 1 starts" in shown
    assert (out / f"voc-tiny-{job}.log").exists()


def test_submit_script_keeps_the_order(case: Case) -> None:
    """Every file once, each behind those it needs; the canary is told whom to open."""
    case.configure("workers = 3", site={"extra": ["--begin=now+1hour"], "chain": 1})
    case.open()
    out = case.folder / "jobs"
    case.eagle("submit", case.recipe, "--site", case.site, "--run", case.run, "--emit", out)
    done = subprocess.run(
        ["bash", out / "submit.sh", case.run], env=case.bed.env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    ids = {line.split(" ", 1)[1]: line.split()[0] for line in done.stdout.splitlines()}
    shown = case.bed.run("squeue", "--noheader", "-o", "%A %E").splitlines()
    behind = {
        job: {x.split(":")[1].split("(")[0].rstrip("_*") for x in rest.split(",")}
        for job, _, rest in (line.partition(" ") for line in shown)
        if ":" in rest
    }
    canary, others = ids["extract, vocab (canary)"], ids["extract, vocab (workers, 2 at once)"]
    assert behind[others] == {canary}
    suffix = case.bed.run("squeue", "--noheader", "-j", canary, "-o", "%j").rpartition("-")[2]
    assert (case.run / f"slurm/jobs/{suffix}.others").read_text().split() == [others]
    first = [j for text, j in ids.items() if text.startswith("regenerate")]
    assert len(first) == 3 and behind[canary] == set(first)
    assert len([j for text, j in ids.items() if text.startswith("train")]) == 1  # printed twice
    assert len(shown) == 8
    # Known by their names: shown, not doubled, not taken for ours.
    assert f"job {canary}" in case.eagle("status", case.run).stdout
    again = subprocess.run(
        ["bash", out / "submit.sh", case.run], env=case.bed.env, capture_output=True, text=True
    )
    assert again.returncode == 1 and "in the queue" in again.stderr
    command = ("submit", case.recipe, "--site", case.site, "--run", case.run)
    done = case.eagle(*command, check=False)
    assert done.returncode == 1 and "by hand" in done.stderr
    left = case.eagle("cancel", case.run).stdout
    assert "scancel" in left and canary in left
    assert len(case.bed.run("squeue", "--noheader", "-o", "%A").splitlines()) == 8


def test_submit_script_wants_a_run(case: Case, root: Path) -> None:
    done = subprocess.run(["bash", root / "slurm/submit.sh", case.folder], capture_output=True)
    assert done.returncode == 2 and b"no run in" in done.stderr
