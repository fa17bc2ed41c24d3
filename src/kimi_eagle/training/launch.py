"""Start training: in this process for one rank, under torchrun for one rank a GPU.

The stage's process keeps the claim, the heartbeat and the stop file; torchrun's ranks only train.
They get a JSON spec, rank 0 writes progress.json and result.json into the working folder, and a
stop that one rank sees all obey after the same step, so that none leaves the others waiting in a
collective. The alternative, torchrun around the whole stage, would put eight workers on one unit.
Meanwhile `watchdog.py` looks whether the ranks go on.

On CPUs there are `train.ranks` of them (gloo); 2 and 4 were run, several GPUs were not. Where the
job has several nodes, `nodes.py` brings their torchruns together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle import files
from kimi_eagle.errors import RunError
from kimi_eagle.recipe import Recipe, parse
from kimi_eagle.rundir import StageDir
from kimi_eagle.shards.store import ShardSet
from kimi_eagle.training import nodes, watchdog

if TYPE_CHECKING:
    from kimi_eagle.training.loop import TrainResult

logger = logging.getLogger(__name__)

MODULE = "kimi_eagle.training.launch"
POLL_SECONDS = 0.5
LEAVE_SECONDS = 60.0
"""torchrun itself kills ranks that do not leave at SIGTERM after 30 s; it must live so long."""

LONGEST_LOOK = 5.0
"""Seconds that one look at the ranks counts at most: more have passed only for a process that stood
still itself."""

SHOWN_SECONDS = 90.0
"""In so long a file of another node is seen (NFS keeps for 60 s that there was none, acdirmax)."""

STOP_SECONDS = 600.0
"""Ranks that have not left this long after a stop was asked for are killed."""


def ranks_here(recipe: Recipe) -> int:
    """Ranks to start on each node: one a visible GPU; `train.ranks` where there is none to use."""
    if recipe.train.device == "cpu":
        return recipe.train.ranks
    import torch

    return torch.cuda.device_count() or recipe.train.ranks


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
    line of the ranks' log when they fail, and with the rank's name when one hangs.
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
    watch = watchdog.Watch(ranks * nodes.count(), recipe.train.hang_seconds)
    _torchrun(workdir, ranks, watch, should_stop, on_progress, stop)
    found = _written(result)
    if found is None:
        raise RunError("the ranks ended without a result", where=workdir / "ranks.log")
    checkpoint = Path(found.pop("checkpoint")) if found.get("checkpoint") else None
    return loop.TrainResult(**{**found, "checkpoint": checkpoint, "curves": Path(found["curves"])})


def _torchrun(
    workdir: Path,
    ranks: int,
    watch: watchdog.Watch,
    should_stop: Callable[[], bool],
    on_progress: Callable[[dict[str, Any]], None],
    stop: Path,
) -> None:
    """Run the ranks to their end, passing progress up and the stop down."""
    stage = StageDir(workdir.parents[1])
    meeting = nodes.lead(stage, ranks, MODULE, workdir)
    command = nodes.torchrun(ranks, meeting, MODULE, workdir)
    log = workdir / "ranks.log"
    watchdog.clear(workdir / watchdog.FOLDER)
    asked: float | None = None
    looked = time.monotonic()
    with open(log, "ab") as out:
        begun = out.tell()
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=nodes.environment(ranks)
        )
        try:
            while process.poll() is None:
                # Not POLL_SECONDS: a look takes time too, and NCCL's 600 s go by the clock.
                before, looked = looked, time.monotonic()
                _look(watch, workdir, log, min(looked - before, LONGEST_LOOK))
                step = None
                with contextlib.suppress(OSError):  # NFS: replaced under the reader (ESTALE)
                    step = files.read_json(workdir / "progress.json")
                if step:
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
                    process.wait(LEAVE_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    if process.returncode:
        raise RunError(f"training failed: {_last_line(log, begun)}", where=log)


def _look(watch: watchdog.Watch, workdir: Path, log: Path, passed: float) -> None:
    """Tell of ranks that lag; RunError for one that hangs. passed: seconds since the last look."""
    beats = watchdog.read(workdir / watchdog.FOLDER)
    for word in watch.lagging(beats):
        logger.warning("%s", word)
    if word := watch.look(beats, passed):
        raise RunError(word, where=log, fix="the same command goes on from the last checkpoint")


def _written(path: Path) -> Any | None:
    """The JSON that rank 0 wrote, on whichever node it was; None where it did not."""
    waits = int(SHOWN_SECONDS / POLL_SECONDS) if nodes.count() > 1 else 0
    while (found := files.read_json(path)) is None and waits:
        waits -= 1
        time.sleep(POLL_SECONDS)
    return found


def _last_line(log: Path, begun: int) -> str:
    """The error that the ranks left, not torchrun's own summary after it. begun: bytes of the log
    that were there before (earlier attempts')."""
    text = log.read_bytes()[begun:].decode(errors="replace")
    lines = [x.strip() for x in text.splitlines() if x.strip()]
    errors = [x for x in lines if "Error" in x and not x.startswith(("torch.distributed", "raise"))]
    # The other ranks lose their connection to the one that failed, and say so after it.
    first = [x for x in errors if "by peer" not in x]
    own = [x for x in first if x.startswith("kimi_eagle.errors.")]
    return (own or first or errors or lines or ["no log"])[-1]


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
        should_stop=(workdir / "stop-ranks").exists,
        on_progress=lambda step: files.write_atomic(
            workdir / "progress.json", files.to_json(step), sync=False
        ),
    )
    # The process group is gone by now; torchrun's environment still tells the ranks apart.
    if os.environ.get("RANK", "0") == "0":
        text = json.dumps(dataclasses.asdict(result), default=str)
        files.write_atomic(workdir / "result.json", text)


def _main(workdir: Path) -> None:
    """What torchrun starts: `_rank`, which leaves at once where it fails.

    Others then wait for this rank within NCCL, and the end of NCCL (in Python's own end, too) waits
    for them: torchrun would see no rank fail, and the log would show no error.
    """
    try:
        _rank(workdir)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
