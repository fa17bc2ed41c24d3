"""A job of two nodes: torchrun on each, meeting on a free port of the first; by real srun.

What runs on the ranks is a sum over gloo, not training (tests/training/test_ranks.py, on one node).
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

RANK = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
Path(sys.argv[1], f"sum.{dist.get_rank()}").write_text(str(total.item()))
dist.destroy_process_group()
"""

NODE = """
import subprocess, sys
from pathlib import Path
from kimi_eagle.rundir import StageDir
from kimi_eagle.training import nodes
stage = StageDir(Path(sys.argv[1]))
if nodes.rank() > 0:
    sys.exit(nodes.follow(stage))
try:
    meeting = nodes.lead(stage, 2, "rank_of_test", stage.path)
    argv = nodes.torchrun(2, meeting, "rank_of_test", stage.path)
    sys.exit(subprocess.run(argv).returncode)
finally:
    nodes.close(stage)
"""


def test_two_nodes_meet(testbed, root, tmp_path: Path):
    """Two jobs at once on the same two nodes: neither takes the other's port."""
    jobs = []
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "train").mkdir(parents=True)
        (folder / "rank_of_test.py").write_text(RANK)
        (folder / "node.py").write_text(NODE)
        command = [sys.executable, str(folder / "node.py"), str(folder / "train")]
        host = ["bash", str(root / "slurm/host.sh"), "--run", str(folder), "--stages", "train"]
        script = f"export PYTHONPATH={shlex.quote(str(folder))}; exec " + shlex.join(
            [*host, "--gpus", "4", "--", *command]
        )
        jobs.append(
            testbed.sbatch(
                script, "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "-w",
                "127.0.1.[1-2]", "--mem=2G", "--cpus-per-task=4",
            )
        )  # fmt: skip
    for job, name in zip(jobs, ("one", "two"), strict=True):
        log = tmp_path / name / "train/log"
        state = testbed.wait_state(job, "COMPLETED", "FAILED", "CANCELLED", seconds=120)
        said = testbed.output(job) + "".join(p.read_text() for p in log.glob("*.out"))
        assert state == "COMPLETED", said
        sums = sorted(p.read_text() for p in (tmp_path / name / "train").glob("sum.*"))
        assert sums == ["10.0"] * 4
