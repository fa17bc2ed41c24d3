"""What the other nodes of a job do; two real nodes meet in tests/slurm_room/test_nodes.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kimi_eagle import files
from kimi_eagle.rundir import StageDir
from kimi_eagle.training import nodes


def test_ranks_of_the_other_nodes_share_their_cores(tmp_path: Path, monkeypatch) -> None:
    """torchrun by itself gives each rank one thread: those of the first node would wait."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("KIMI_EAGLE_PAYLOAD", raising=False)
    stage = StageDir(tmp_path / "train")
    meeting = stage.path / "meetings" / "here.json"
    meeting.parent.mkdir(parents=True)
    told = {"id": "1", "ranks": 1, "module": "m", "workdir": str(tmp_path)}
    files.write_atomic(meeting, files.to_json(told))
    script = (
        "import os, sys; from pathlib import Path\n"
        "Path(sys.argv[1]).write_text(os.environ['OMP_NUM_THREADS'])\n"
        'Path(sys.argv[2]).write_text(\'{"id": "over"}\')\n'
        "sys.exit(3)"
    )
    said = tmp_path / "threads"
    argv = [sys.executable, "-c", script, str(said), str(meeting)]
    monkeypatch.setattr(nodes, "torchrun", lambda *_a: argv)
    assert nodes.follow(stage) == 3
    assert int(said.read_text()) == len(os.sched_getaffinity(0))
