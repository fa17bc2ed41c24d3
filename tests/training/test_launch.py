"""Training under torchrun: the same run as in one process, stopped and failing in good order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_eagle.errors import RunError
from kimi_eagle.shards import ShardSet


@pytest.fixture
def ranks(verifier, corpus):
    """`launch.run` with one torchrun rank."""
    from kimi_eagle.training import launch

    def call(recipe, workdir: Path, progress: list, stop_at: int | None = None, shards=None):
        return launch.run(
            recipe,
            verifier,
            ShardSet(shards or corpus.shards),
            d2t=corpus.d2t,
            t2d=corpus.t2d,
            workdir=workdir,
            should_stop=lambda: bool(stop_at and progress and progress[-1]["step"] >= stop_at),
            on_progress=progress.append,
            ranks=1,
        )

    return call


def losses(workdir: Path) -> list[float]:
    lines = [json.loads(x) for x in (workdir / "curves.jsonl").read_text().splitlines()]
    return [x["loss"] for x in lines if "loss" in x]


def test_ranks_are_those_of_the_recipe_where_there_is_no_gpu(recipe_for, monkeypatch) -> None:
    import torch

    from kimi_eagle.training.launch import ranks_here

    assert ranks_here(recipe_for()) == 1
    assert ranks_here(recipe_for(ranks=3)) == 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert ranks_here(recipe_for(ranks=3)) == 3, "train.device is cpu"
    assert ranks_here(recipe_for(device="auto", ranks=3)) == 8


class Clock:
    """Stands for `time` in launch.py. on_sleep: called with the number of each sleep."""

    def __init__(self, on_sleep=lambda _n: None):
        self.now, self.sleeps, self._on_sleep = 0.0, 0, on_sleep

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now, self.sleeps = self.now + seconds, self.sleeps + 1
        self._on_sleep(self.sleeps)


def look_slowly(monkeypatch, seconds_a_look: float, script: str) -> Clock:
    """One rank that stands still at once, its beats on a slow disk; `script` runs for torchrun."""
    from kimi_eagle.training import launch, watchdog

    clock = Clock()

    def read(_folder):
        clock.now += seconds_a_look
        return {0: watchdog.Beat(0, "node", 1)}

    monkeypatch.setattr(launch, "time", clock)
    monkeypatch.setattr(launch.watchdog, "read", read)
    monkeypatch.setattr(launch.nodes, "torchrun", lambda *_a: ["bash", "-c", script])
    return clock


def test_a_hang_is_told_by_the_clock(monkeypatch, tmp_path: Path) -> None:
    """NCCL's 600 s go by the clock; 1,080 looks of half a second are more than 540 s."""
    from kimi_eagle.training import launch, watchdog

    workdir = tmp_path / "files" / "work"
    workdir.mkdir(parents=True)
    clock = look_slowly(monkeypatch, 0.25, "exec sleep 60")
    with pytest.raises(RunError, match="training hangs: rank 0"):
        launch._torchrun(
            workdir, 1, watchdog.Watch(1, 540), lambda: False, lambda _s: None, tmp_path / "stop"
        )
    assert 540 <= clock.now < 545
    clock.now, before = 0.0, iter([0.0])
    monkeypatch.setattr(clock, "monotonic", lambda: clock.now + next(before, 3600.0))
    with pytest.raises(RunError, match="training hangs"):
        launch._torchrun(
            workdir, 1, watchdog.Watch(1, 540), lambda: False, lambda _s: None, tmp_path / "stop"
        )
    assert clock.now > 530, "an hour in which this process stood still counts as seconds"


def test_the_error_is_of_this_attempt(monkeypatch, tmp_path: Path) -> None:
    from kimi_eagle.training import launch, watchdog

    workdir = tmp_path / "files" / "work"
    workdir.mkdir(parents=True)
    (workdir / "ranks.log").write_text("kimi_eagle.errors.RunError: of yesterday\n")
    look_slowly(monkeypatch, 0.0, "echo killed; exit 1")
    with pytest.raises(RunError, match="training failed: killed"):
        launch._torchrun(
            workdir, 1, watchdog.Watch(1, 540), lambda: False, lambda _s: None, tmp_path / "stop"
        )


GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (["kimi_eagle.errors.RunError: no disk", "ValueError: of another", GLOO], "no disk"),
        (["torch.OutOfMemoryError: CUDA out of memory", GLOO], "CUDA out of memory"),
        ([GLOO, "torch.distributed.elastic.ChildFailedError:"], "closed by peer"),
    ],
)
def test_the_error_is_of_the_rank_that_failed(tmp_path: Path, said: list[str], told: str) -> None:
    """The others say that it has gone, and later."""
    from kimi_eagle.training import launch

    log = tmp_path / "ranks.log"
    log.write_text("\n".join(said))
    assert told in launch._last_line(log, 0)


def test_progress_that_cannot_be_read_ends_nothing(monkeypatch, tmp_path: Path) -> None:
    """As a file that another node replaces while this one reads it."""
    from kimi_eagle.training import launch, watchdog

    workdir = tmp_path / "files" / "work"
    (workdir / "progress.json").mkdir(parents=True)  # cannot be read
    look_slowly(monkeypatch, 0.0, "sleep 0.2")
    launch._torchrun(
        workdir, 1, watchdog.Watch(1, 1e9), lambda: False, lambda _s: None, tmp_path / "stop"
    )


def test_what_another_node_wrote_is_waited_for(monkeypatch, tmp_path: Path) -> None:
    """torchrun gives rank 0 to the first node by name, which need not be this one."""
    from kimi_eagle.training import launch

    path = tmp_path / "result.json"
    clock = Clock(lambda n: path.write_text('{"steps": 7}') if n == 100 else None)
    monkeypatch.setattr(launch, "time", clock)
    assert launch._written(path) is None and clock.sleeps == 0, "one node"
    monkeypatch.setattr(launch.nodes, "count", lambda: 2)
    assert launch._written(path) == {"steps": 7}
    path.unlink()
    assert launch._written(path) is None and clock.now < 200


FAILS = """
import atexit, time
from kimi_eagle.errors import RunError
from kimi_eagle.training import launch
atexit.register(time.sleep, 600)  # as NCCL's end, which waits for the other ranks
def fail(workdir): raise RunError("no such thing")
launch._rank = fail
launch._main(None)
"""


def test_a_rank_that_fails_waits_for_nobody() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FAILS], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1
    assert ended.stderr.strip().splitlines()[-1] == "kimi_eagle.errors.RunError: no such thing"


def test_the_ranks_part_only_where_all_are_at_the_end(run, recipe_for, tmp_path, monkeypatch):
    """As `destroy_process_group` of NCCL waits for the others, who wait for the one that failed."""
    from kimi_eagle.errors import UsageError
    from kimi_eagle.training import loop

    parted: list[bool] = []
    monkeypatch.setattr(loop, "maybe_destroy_distributed", lambda: parted.append(True))
    with pytest.raises(UsageError, match="no_such_loss"):
        run(recipe_for(loss="no_such_loss"), tmp_path)
    assert not parted
    run(recipe_for(epochs=1, max_steps=1), tmp_path)
    assert parted


@pytest.mark.campaign
def test_stopped_under_torchrun_and_finished_in_process(ranks, run, recipe_for, tmp_path) -> None:
    progress: list[dict] = []
    recipe = recipe_for(epochs=3)
    first = ranks(recipe, tmp_path / "ranks", progress, stop_at=2)
    assert first.interrupted and first.steps < first.total_steps
    again = ranks(recipe, tmp_path / "ranks", progress)
    assert not again.interrupted and again.steps == again.total_steps
    assert again.checkpoint.is_dir() and progress[-1]["step"] == again.steps
    whole = run(recipe, tmp_path / "one")
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "one"), rel=0.02)
    assert (again.steps, again.tokens) == (whole.steps, whole.tokens)


@pytest.mark.campaign
def test_a_rank_that_meets_damage_names_the_sample(ranks, recipe_for, corpus, tmp_path) -> None:
    from kimi_eagle.training import damage

    (tmp_path / "shards").mkdir()
    shards = corpus.write(tmp_path / "shards")
    with open(shards[1], "r+b") as f:
        f.seek(5000)
        f.write(bytes(8))
    with pytest.raises(RunError, match="damaged hidden states"):
        ranks(recipe_for(), tmp_path / "work", [], shards=shards)
    (met,) = damage.read(tmp_path / "work" / damage.NAME)
    assert met.shard == shards[1].name and not met.skipped


def test_a_rank_that_fails_is_named_with_its_error(ranks, recipe_for, corpus, tmp_path) -> None:
    recipe = recipe_for(loss="no_such_loss")
    with pytest.raises(RunError, match="no_such_loss"):
        ranks(recipe, tmp_path, [])
