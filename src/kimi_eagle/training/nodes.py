"""Training over several nodes of one job: one process of ours a node, torchrun in each.

host.sh starts `kimi-eagle stage train` on every node. The first one is the worker: it claims the
unit, and when it trains it binds a free port of its own host and writes the meeting point into the
run. The others read it there and only run torchrun beside it. Nothing is agreed on beforehand, so
that two jobs on shared nodes cannot meet on one port.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from kimi_eagle import files
from kimi_eagle.rundir import StageDir

POLL_SECONDS = 0.5


def count() -> int:
    """Nodes of this job's step, 1 outside one."""
    return int(os.environ.get("KIMI_EAGLE_NODES", "1"))


def rank() -> int:
    """Which of the nodes this is; srun says it."""
    return int(os.environ.get("SLURM_NODEID", "0")) if count() > 1 else 0


def torchrun(ranks: int, meeting: dict[str, str] | None, module: str, workdir: Path) -> list[str]:
    """argv of torchrun on this node. meeting: what `lead` gave, None for one node."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    if meeting is None:
        command.append("--standalone")
    else:
        command += [f"--nnodes={count()}", "--rdzv-backend=c10d", f"--rdzv-id={meeting['id']}"]
        command.append(f"--rdzv-endpoint={meeting['host']}:{meeting['port']}")
        command.append(f"--rdzv-conf=is_host={'true' if rank() == 0 else 'false'}")
    return [*command, "-m", module, str(workdir)]


def environment(ranks: int) -> dict[str, str]:
    """For torchrun: the cores of this node shared among its ranks, where it gives each one thread.

    ranks: on this node.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    return {"OMP_NUM_THREADS": str(threads), **os.environ}


def lead(stage: StageDir, ranks: int, module: str, workdir: Path) -> dict[str, str] | None:
    """Choose the meeting point and tell the other nodes; None for one node."""
    if count() == 1:
        return None
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    path = _path(stage)
    path.parent.mkdir(exist_ok=True)
    meeting = {"id": f"{path.stem}-{time.time_ns()}", "host": host, "port": str(port)}
    told = {**meeting, "ranks": ranks, "module": module, "workdir": str(workdir)}
    files.write_atomic(path, files.to_json(told))
    return meeting


def close(stage: StageDir) -> None:
    """Let the other nodes leave."""
    if count() > 1 and rank() == 0:
        path = _path(stage)
        path.parent.mkdir(exist_ok=True)
        files.write_atomic(path, files.to_json({"id": "over"}))


def follow(stage: StageDir) -> int:
    """What the other nodes do: torchrun beside the first node's, until that one closes.

    Returns the last torchrun's exit code. The first node sees a stop and tells all ranks.
    """
    seen, code = "", 0
    while True:
        told = files.read_json(_path(stage)) or {}
        if told.get("id") == "over":
            return code
        if told and told["id"] != seen:
            seen = told["id"]
            argv = torchrun(told["ranks"], told, told["module"], Path(told["workdir"]))
            code = subprocess.run(argv, check=False, env=environment(told["ranks"])).returncode
        time.sleep(POLL_SECONDS)


def _path(stage: StageDir) -> Path:
    """One file a start of the job: an earlier start's meeting point is nobody's any more."""
    start = os.environ.get("KIMI_EAGLE_PAYLOAD", "here")
    return stage.path / "meetings" / f"{start}.json"
