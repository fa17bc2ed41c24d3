"""`submit --here`: work in the allocation that this command stands in, and submit nothing.

One worker a node for stages of many units, one for the others; groups one after the other. The
supervisor is the same host.sh, started on each node by srun; it cannot requeue here.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from kimi_eagle import files
from kimi_eagle.begin import begin
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.recipe import STAGES, Recipe
from kimi_eagle.rundir import RunDir
from kimi_eagle.site import Site
from kimi_eagle.slurm import guard, progress, queue, sbatch
from kimi_eagle.slurm.jobs import SHARED_STAGES
from kimi_eagle.slurm.names import new_suffix
from kimi_eagle.stages.context import recipe_digest
from kimi_eagle.turns import turn


def work_here(
    run: RunDir, recipe: Recipe, recipe_path: Path, site: Site, *, only: str | None = None
) -> None:
    """Do the groups in order on the nodes of this allocation; RunError where one fails."""
    job_id = os.environ.get("SLURM_JOB_ID")
    if not job_id:
        raise UsageError(
            "--here works inside an allocation, and this is none",
            fix="salloc ... kimi-eagle submit RECIPE --site SITE --here, or leave --here out",
        )
    if recipe.slurm.nodes.get("train", 1) > 1 and only in (None, "train"):
        raise UsageError(
            "train over several nodes is a job of its own, not a part of an allocation",
            where="slurm.nodes",
            fix="leave --here out, or take one node",
        )
    sbatch.words_for(run, None)
    nodes, suffix = _nodes(), new_suffix(run.path)
    run.slurm.make()
    with turn(run.slurm.lock):
        guard.refuse_held(run, recipe, progress.done_stages(run, recipe))
        guard.before_following(run, recipe)
        begin(run, recipe, recipe_path, site)
        files.write_atomic(run.slurm.host, sbatch.host_script().read_bytes())
        for stage in STAGES:
            run.stage(stage).stop.unlink(missing_ok=True)  # of `cancel --after-unit`
    for stages in recipe.slurm.groups:
        wanted = (only,) if only in stages else stages
        if only and only not in stages:
            continue
        shared = bool(SHARED_STAGES & set(wanted))
        workers = nodes if shared else nodes[:1]
        started = [_start(run, recipe, node, n, suffix, wanted) for n, node in enumerate(workers)]
        codes = [p.wait() for p in started]
        if any(codes):
            raise RunError(
                f"{', '.join(wanted)}: a worker ended with exit code {max(codes)}",
                where=run.path,
                fix=f"kimi-eagle logs {run.path} {wanted[0]}",
            )


def _nodes() -> list[str]:
    """Names of the allocation's nodes."""
    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    if not listed:
        raise UsageError("no node is named", where="SLURM_JOB_NODELIST", fix="use salloc or sbatch")
    done = queue.call(["scontrol", "show", "hostnames", listed])
    if done.returncode:
        raise RunError(f"scontrol show hostnames: {queue.said(done)}", where=listed)
    return done.stdout.split()


def _start(
    run: RunDir,
    recipe: Recipe,
    node: str,
    number: int,
    suffix: str,
    stages: tuple[str, ...],
) -> subprocess.Popen[bytes]:
    """host.sh on one node, as a step of this allocation."""
    section = recipe.slurm
    argv = ["srun", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--overlap"]
    argv += ["--input=none", "--export=ALL"]
    argv += ["bash", str(run.slurm.host), "--run", str(run.path), "--suffix", suffix]
    argv += ["--task", str(number), "--role", "single", "--stages", ",".join(stages)]
    argv += ["--gpus", str(section.gpus), "--attempts", str(section.max_attempts)]
    if section.max_gpu_hours is not None:
        argv += ["--hours", f"{section.max_gpu_hours:g}"]
    argv += ["--", "bash", str(run.start), "stage", "@STAGE@", "--run", str(run.path)]
    env = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}
    env["KIMI_EAGLE_RECIPE"] = recipe_digest(recipe)
    return subprocess.Popen(argv, env=env)
