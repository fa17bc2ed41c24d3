"""Golden texts of sbatch files, and the files of slurm/ against what --emit writes.

A change here is a change of what clusters are asked for: look at each line before renewing them
with `python tests/slurm_room/test_sbatch.py`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kimi_eagle import recipe as recipes
from kimi_eagle.site import load_site
from kimi_eagle.slurm.jobs import whole_run
from kimi_eagle.slurm.sbatch import Words, text

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
KINDS = (".sbatch", ".sh")
WORDS = Words(
    run="/runs/k",
    host="/runs/k/slurm/host.sh",
    suffix="0123456789",
    recipe="ab" * 16,
)
CASES = {
    "gres-typed": ("extract", "workers", {}),
    "gpus-per-node": ("extract", "canary", {}),
    "exclusive": ("train", "single", {"mail": "a@example.org", "command": ["/opt/tell", "a b"]}),
    "cpu-stage": ("vocab", "single", {}),
}
"""name of the golden file: (stage, role, [notify]); the CPU stage is on the gres-typed site."""


def made(case: str) -> str:
    """The text of one case."""
    stage, role, notify = CASES[case]
    data = recipes.load(ROOT / "jobs/kimi-k2.5.toml").model_dump(mode="json", exclude_none=True)
    data["slurm"]["groups"] = [["regenerate", "prepare"], ["extract"], ["vocab"], ["train"]]
    data["slurm"]["groups"][-1].append("benchmark")
    data["slurm"] |= {"cpu_stages": ["vocab"], "max_gpu_hours": 2000.0}
    data["notify"] |= notify
    recipe = recipes.parse(data, where="golden", base=ROOT)
    site = load_site("gres-typed" if case == "cpu-stage" else case)
    jobs = [j for jobs in whole_run(recipe, site) for j in jobs]
    (job,) = [j for j in jobs if j.role == role and stage in j.stages]
    after = () if role == "canary" else ("17", "18")
    return text(job, recipe, site, WORDS, folder=Path("/runs/k/slurm/log"), after=after) + "\n"


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str):
    assert made(case) == (GOLDEN / f"{case}.sbatch").read_text()


def test_cpu_stage_asks_for_no_gpu():
    assert not [x for x in made("cpu-stage").splitlines() if x.startswith("#SBATCH") and "gpu" in x]
    assert [x for x in made("gres-typed").splitlines() if x == "#SBATCH --gres=gpu:h200:8"]


def test_shipped_files_are_what_emit_writes(eagle, root: Path, tmp_path: Path):
    """slurm/*.sbatch and slurm/submit.sh: --emit of the Kimi recipe on the example site.

    Its model is not on this machine: that is told, and no reason to write nothing.
    """
    done = eagle(
        "submit", "jobs/kimi-k2.5.toml", "--site", "slurm/sites/example.toml",
        "--run", tmp_path / "run", "--emit", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "warning: /shared/kimi-k2.5-int4: verifier-directory" in done.stderr
    emitted = {p.name: p.read_text() for p in (tmp_path / "out").iterdir()}
    shipped = {p.name: p.read_text() for p in (root / "slurm").iterdir() if p.suffix in KINDS}
    assert emitted == shipped


def test_emitted_files_are_shell(root: Path):
    for path in [*(root / "slurm").glob("*.sbatch"), root / "slurm/submit.sh"]:
        assert subprocess.run(["bash", "-n", path], capture_output=True).returncode == 0
        assert len(path.read_text().splitlines()) < 60


def test_host_script_is_short(root: Path):
    assert len((root / "slurm/host.sh").read_text().splitlines()) <= 150


if __name__ == "__main__":
    for name in CASES:
        (GOLDEN / f"{name}.sbatch").write_text(made(name))
