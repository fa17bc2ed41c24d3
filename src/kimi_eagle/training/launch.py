"""Start training: in this process for one rank, under torchrun for one rank a GPU.

The stage's process keeps the claim, the heartbeat and the stop file; torchrun's ranks only train.
They get a JSON spec, rank 0 writes progress.json and result.json into the working folder, and all
ranks take the stop from rank 0, so that none leaves the others waiting in a collective. The
alternative, torchrun around the whole stage, would put eight workers on one unit.

On a CPU one rank is used; torchrun was run here with one rank only, several GPUs were not. Where
the job has several nodes, `nodes.py` brings their torchruns together.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle import files
from kimi_eagle.errors import RunError
from kimi_eagle.recipe import Recipe, parse
from kimi_eagle.rundir import StageDir
from kimi_eagle.shards.store import ShardSet
from kimi_eagle.training import nodes

if TYPE_CHECKING:
    from kimi_eagle.training.loop import TrainResult

MODULE = "kimi_eagle.training.launch"
POLL_SECONDS = 0.5
STOP_SECONDS = 600.0
"""Ranks that have not left this long after a stop was asked for are killed."""


def ranks_here(recipe: Recipe) -> int:
    """Ranks to start on each node: one a visible GPU, 1 on a CPU."""
    if recipe.train.device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def run(
    recipe: Recipe,
    verifier: Any,
    store: ShardSet,
    *,
    d2t: Path,
    t2d: Path,
    workdir: Path,
    should_stop: Callable[[], bool],
    on_progress: Callable[[dict[str, Any]], None],
    ranks: int | None = None,
) -> TrainResult:
    """`loop.train` with as many ranks as there are GPUs; see there for the arguments.

    ranks: for tests; a number given starts torchrun even for one. Raises RunError with the last
    line of the ranks' log when they fail.
    """
    from kimi_eagle.training import loop

    if ranks is None and (ranks := ranks_here(recipe)) == 1 and nodes.count() == 1:
        return loop.train(
            recipe,
            verifier,
            store,
            d2t,
            t2d,
            workdir,
            should_stop=should_stop,
            on_progress=on_progress,
        )
    workdir.mkdir(parents=True, exist_ok=True)
    spec, result, stop = (workdir / n for n in ("spec.json", "result.json", "stop-ranks"))
    for old in (result, stop):
        old.unlink(missing_ok=True)
    data = {
        "recipe": recipe.model_dump(mode="json", exclude_none=True),
        "shards": [str(s.path) for s in store.shards],
        "index_digests": [s.index.digest for s in store.shards],
        "d2t": str(d2t),
        "t2d": str(t2d),
    }
    files.write_atomic(spec, files.to_json(data))
    _torchrun(workdir, ranks, should_stop, on_progress, stop)
    found = files.read_json(result)
    if found is None:
        raise RunError("the ranks ended without a result", where=workdir / "ranks.log")
    checkpoint = Path(found.pop("checkpoint")) if found.get("checkpoint") else None
    return loop.TrainResult(**{**found, "checkpoint": checkpoint, "curves": Path(found["curves"])})


def _torchrun(
    workdir: Path,
    ranks: int,
    should_stop: Callable[[], bool],
    on_progress: Callable[[dict[str, Any]], None],
    stop: Path,
) -> None:
    """Run the ranks to their end, passing progress up and the stop down."""
    stage = StageDir(workdir.parents[1])
    meeting = nodes.lead(stage, ranks, MODULE, workdir)
    command = nodes.torchrun(ranks, meeting, MODULE, workdir)
    log = workdir / "ranks.log"
    asked: float | None = None
    with open(log, "ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                if step := files.read_json(workdir / "progress.json"):
                    on_progress(step)
                if asked is None and should_stop():
                    stop.touch()
                    asked = time.monotonic()
                if asked is not None and time.monotonic() - asked > STOP_SECONDS:
                    raise RunError("the ranks did not stop", where=log)
                time.sleep(POLL_SECONDS)
        finally:
            # torchrun passes SIGTERM on to its ranks, which then leave as it does.
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    if process.returncode:
        raise RunError(f"training failed: {_last_line(log)}", where=log)


def _last_line(log: Path) -> str:
    """The error that the ranks left, not torchrun's own summary after it."""
    lines = [x.strip() for x in log.read_text(errors="replace").splitlines() if x.strip()]
    errors = [x for x in lines if "Error" in x and not x.startswith(("torch.distributed", "raise"))]
    return (errors or lines or ["no log"])[-1]


def _rank(workdir: Path) -> None:
    """What each rank runs."""
    from kimi_eagle.training import loop
    from kimi_eagle.verifier import open_verifier

    data = json.loads((workdir / "spec.json").read_bytes())
    recipe = parse(data["recipe"], where=workdir / "spec.json", base=workdir)
    section = recipe.verifier
    result = loop.train(
        recipe,
        open_verifier(section.path, trust_remote_code=section.trust_remote_code),
        ShardSet([Path(p) for p in data["shards"]], data["index_digests"]),
        Path(data["d2t"]),
        Path(data["t2d"]),
        workdir,
        should_stop=lambda: _agreed((workdir / "stop-ranks").exists()),
        on_progress=lambda step: files.write_atomic(
            workdir / "progress.json", files.to_json(step), sync=False
        ),
    )
    # The process group is gone by now; torchrun's environment still tells the ranks apart.
    if os.environ.get("RANK", "0") == "0":
        text = json.dumps(dataclasses.asdict(result), default=str)
        files.write_atomic(workdir / "result.json", text)


def _agreed(asked: bool) -> bool:
    """Rank 0's answer, on every rank, after the same step."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return asked
    answer = [asked]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
