"""Ranks that hang or lag are named: what is judged, and real processes that are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kimi_eagle.errors import RunError
from kimi_eagle.training import watchdog
from kimi_eagle.training.watchdog import Beat, Watch


def beats(*doing: str, step: int = 6, tick: int = 1, went_on: int = 1) -> dict[int, Beat]:
    """One beat a rank, of ranks on host `node`."""
    return {
        rank: Beat(rank, "node", 100 + rank, tick, went_on, step, what)
        for rank, what in enumerate(doing)
    }


def looks(watch: Watch, *rounds: dict[int, Beat], passed: float = 1.0) -> str | None:
    """The first sentence of these looks."""
    return next(filter(None, (watch.look(found, passed) for found in rounds)), None)


def test_ranks_that_go_on_are_left_alone():
    rounds = [beats("forward", "backward", tick=n, went_on=n) for n in range(100)]
    assert looks(Watch(2, 5), *rounds) is None


def test_the_rank_that_the_others_wait_for_is_named():
    rounds = [beats("backward", "waiting for data", "backward", tick=n) for n in range(30)]
    said = looks(Watch(3, 20), *rounds)
    assert said == (
        "training hangs: rank 1 (host node, pid 101) does not go on for 20 s; it was at step 7: "
        "waiting for data; the other ranks are at: backward"
    )


def test_a_rank_a_step_behind_is_named():
    found = beats("forward", "after the step")
    found[0] = replace(found[0], step=7)
    assert "rank 1 " in looks(Watch(2, 20), *([found] * 40))


def test_what_comes_between_two_steps_comes_before_the_next_one():
    """The step is counted already: who is in the next one's forward has gone past it."""
    for doing in ("after the step", "checkpoint", "validation"):
        rounds = [beats("backward", doing, tick=n) for n in range(30)]
        said = looks(Watch(2, 20), *rounds)
        assert "rank 1 (host node, pid 101) does not go on" in said
        assert f"it was after step 6: {doing}; the other ranks are at: backward" in said


def test_all_at_one_place_are_all_named():
    said = looks(Watch(2, 20), *(beats("checkpoint", "checkpoint", tick=n) for n in range(30)))
    assert "rank 0 (host node, pid 100), and so do rank 1 does not go on" in said


def test_a_rank_that_stands_still_is_told_from_one_that_waits():
    rounds = []
    for n in range(30):
        found = beats("backward", "backward", tick=n)
        found[1] = replace(found[1], tick=1)  # no thread of it runs
        rounds.append(found)
    said = looks(Watch(2, 20), *rounds)
    assert "rank 1 (host node, pid 101) gives no sign of life for 20 s" in said


def test_a_rank_that_did_not_begin():
    watch = Watch(2, 5)
    seen = [beats("starting", tick=n, went_on=n) for n in range(700)]
    assert looks(watch, *seen[:599]) is None, "it may take its time to start"
    assert looks(watch, *seen[599:]) == "training hangs: rank 1 of 2 did not begin"


def test_lagging_is_told_once():
    found = beats("forward", "forward", "forward", "forward")
    slow = {r: replace(b, own_seconds=0.4, measured=5) for r, b in found.items()}
    slow[2] = replace(slow[2], own_seconds=0.9)
    watch = Watch(4, 100)
    assert watch.lagging(found) == [], "nothing measured yet"
    assert watch.lagging(slow) == [
        "rank 2 (host node, pid 102) lags: 900 ms of its own work a step, the others 400 ms"
    ]
    assert watch.lagging(slow) == []


def test_a_pulse_says_what_is_done_and_torn_files_say_nothing(tmp_path):
    with watchdog.Pulse(tmp_path, 3) as pulse:
        for seconds in (1.0, 3.0):
            pulse.worked(seconds)
        pulse.goes_on("forward", 4)
        assert wait_for(lambda: doing_of(tmp_path) == {3: "forward"})
    (tmp_path / "rank-1.json").write_text('{"rank": 1')
    (tmp_path / "rank-2.json").write_text('{"rank": 2, "odd": 1}')
    (tmp_path / "rank-4.json").mkdir()  # cannot be read, as a file that NFS has replaced
    (found,) = watchdog.read(tmp_path).values()
    assert (found.step, found.doing, found.went_on, found.pid) == (4, "forward", 1, os.getpid())
    assert (found.own_seconds, found.measured) == (2.0, 2)
    (tmp_path / "rank-4.json").rmdir()
    watchdog.clear(tmp_path)
    assert watchdog.read(tmp_path) == {}


def doing_of(folder: Path) -> dict[int, str]:
    return {rank: beat.doing for rank, beat in watchdog.read(folder).items()}


def wait_for(true, seconds: float = 60.0) -> bool:
    ends = time.monotonic() + seconds
    while not (said := true()) and time.monotonic() < ends:
        time.sleep(0.05)
    return said


def test_collectives_wait_longer_than_the_watchdog():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        options = dist.group.WORLD._get_backend(torch.device("cpu")).options
        watchdog.outlast(540)
        assert options._timeout.total_seconds() == 1800, "gloo's own is long enough"
        watchdog.outlast(3600)
        assert options._timeout.total_seconds() == 3660
    finally:
        dist.destroy_process_group()


BUSY = """
import sys, time
from pathlib import Path
from kimi_eagle.training.watchdog import Pulse
with Pulse(Path(sys.argv[1]), int(sys.argv[2])) as pulse:
    pulse.goes_on("backward", 7)
    time.sleep(600)
"""


def test_a_stopped_process_is_named(tmp_path):
    """Two processes stand in a step; one of them gets SIGSTOP, the other one waits for it."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", BUSY, str(tmp_path), str(rank)])
        for rank in range(2)
    ]
    try:
        assert wait_for(lambda: list(doing_of(tmp_path).values()) == ["backward"] * 2)
        ranks[1].send_signal(signal.SIGSTOP)
        watch, said = Watch(2, 8), None
        while said is None:
            said = watch.look(watchdog.read(tmp_path), 0.25)
            time.sleep(0.25)
        assert f"rank 1 (host {os.uname().nodename}, pid {ranks[1].pid}) gives no sign" in said
        assert "it was at step 8: backward; the other ranks are at: backward" in said
    finally:
        for process in ranks:
            process.kill()
            process.wait()


ALONE = """
import sys, time
from pathlib import Path
from kimi_eagle.training.watchdog import OwnWatch, Pulse
with Pulse(Path(sys.argv[1]), 0, OwnWatch(2)) as pulse:
    pulse.goes_on("waiting for data", 41)
    time.sleep(600)
"""


def test_a_single_process_that_hangs_leaves(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1
    assert "kimi-eagle: training hangs: rank 0 " in ended.stderr
    assert "does not go on for 2 s; it was at step 42: waiting for data" in ended.stderr
    assert "time.sleep" in ended.stderr or "<module>" in ended.stderr, "where it stands"


@pytest.mark.campaign
def test_a_stopped_rank_ends_the_attempt_and_the_run_goes_on(
    verifier, corpus, recipe_for, run, tmp_path, monkeypatch
):
    """Under torchrun, with real training: SIGSTOP for rank 1 in its third step."""
    from kimi_eagle.shards import ShardSet
    from kimi_eagle.training import launch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    stopped: list[int] = []
    recipe = recipe_for(epochs=1, hang_seconds=20, checkpoints_per_epoch=5)

    def stop_one(step: dict) -> None:
        if step["step"] >= 3 and not stopped:
            stopped.append(watchdog.read(tmp_path / watchdog.FOLDER)[1].pid)
            os.kill(stopped[0], signal.SIGSTOP)

    def attempt():
        return launch.run(
            recipe, verifier, ShardSet(corpus.shards), d2t=corpus.d2t, t2d=corpus.t2d,
            workdir=tmp_path, should_stop=lambda: False, on_progress=stop_one, ranks=2,
        )  # fmt: skip

    started = time.monotonic()
    with pytest.raises(RunError, match=r"rank 1 \(host .*gives no sign of life") as caught:
        attempt()
    print(f"after {time.monotonic() - started:.0f} s: {caught.value.line()}")
    assert f"pid {stopped[0]}" in caught.value.what
    assert not Path(f"/proc/{stopped[0]}").exists(), "nothing of it is left"
    assert threading.active_count() < 20
    result = attempt()
    assert not result.interrupted and result.steps == result.total_steps
