"""Writers that are killed, starved of disk, or set against each other: whole or not there.

A child does one unit of extract as the stage does (a Worker, an Attempt, a ShardWriter, a record);
the same unit is then done again by the next child, and must be byte-equal to an undisturbed one.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kimi_eagle.ledger import Ledger, Unit
from kimi_eagle.rundir import StageDir
from kimi_eagle.shards import ShardSet

UNIT = Unit("00000", {"format": "test"})
CODECS = ("raw", "lossless", "fp8")
CHILD = """
import sys
from pathlib import Path
import numpy as np
from kimi_eagle.ledger import Unit
from kimi_eagle.rundir import StageDir
from kimi_eagle.shards import ShardWriter
from kimi_eagle.worker import Attempt, Worker

folder, codec, forced = sys.argv[1:4]
if codec == "fp8":
    import torch  # before the clock starts
rng = np.random.default_rng(0)
states = (rng.normal(size=(60_000, 4, 32)).astype(np.float32).view(np.uint32) >> 16)
states = states.astype(np.uint16)
unit = Unit("00000", {"format": "test"})
with Worker(StageDir(Path(folder))) as worker:
    print("ready", flush=True)
    sys.stdin.readline()
    # forced: as if the claim of another worker had not been seen
    attempts = [Attempt(worker, unit, 3)] if forced == "forced" else worker.attempts([unit])
    for attempt in attempts:
        with attempt:
            paths = [attempt.path("safetensors"), attempt.path("index.parquet")]
            writer = ShardWriter(paths[0].parent, paths[0].stem, (1, 2, 3, 4), 32, {}, codec=codec)
            with writer:
                for i in range(0, 60_000, 200):
                    writer.add(f"{i:032x}", states[i : i + 200], np.arange(200), np.ones(200))
            won = attempt.commit(paths, counts={"tokens": 60_000}, digests=writer.digests)
            print("won" if won else "lost", flush=True)
"""


def start(folder: Path, codec: str, forced: str = "") -> subprocess.Popen[str]:
    """A child that waits for a line before it does the unit."""
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(folder), codec, forced],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "ready\n", child.stderr.read()
    return child


def go(child: subprocess.Popen[str]) -> None:
    child.stdin.write("go\n")
    child.stdin.flush()


def whole(child: subprocess.Popen[str]) -> str:
    out, err = child.communicate("go\n", timeout=120)
    assert child.returncode == 0, err
    return out.strip()


def contents(folder: Path) -> list[bytes]:
    """The bytes of the files that the unit's record names."""
    record = Ledger(StageDir(folder)).record(UNIT)
    assert record is not None and record.state == "done" and record.files_whole() is None
    paths = [record.path(".safetensors"), record.path(".index.parquet")]
    store = ShardSet(paths[:1], [record.data["files"][1]["xxh3"]])
    assert [store.check(i) for i in range(len(store))] == [None] * 300
    return [p.read_bytes() for p in paths]


def kill_at_random(folder: Path, codec: str, times: int, rng: random.Random) -> list[bytes]:
    """Kill a writer `times` times at random points of its work, then let one end."""
    folder.mkdir()
    child = start(folder / "first", codec)
    began = time.monotonic()
    whole(child)
    takes, stage = time.monotonic() - began, StageDir(folder / "killed")
    kills = 0
    while kills < times:
        child = start(stage.path, codec)
        go(child)
        time.sleep(rng.uniform(0, takes))
        child.kill()
        child.communicate()
        if Ledger(stage).record(UNIT) is not None:  # it was quicker; once more from the start
            assert contents(stage.path) == contents(folder / "first")
            shutil.rmtree(stage.path)
            continue
        kills += 1
        for name in os.listdir(stage.files):
            # Whole files without a record are nobody's; everything else is temporary by name.
            assert name.startswith((".tmp-", "00000.a"))
    whole(start(stage.path, codec))
    assert contents(folder / "first") == contents(stage.path)
    return contents(stage.path)


@pytest.mark.parametrize("codec", ["lossless"])
def test_killed_writers(tmp_path, codec):
    kill_at_random(tmp_path / "a", codec, 3, random.Random(0))


@pytest.mark.campaign
@pytest.mark.parametrize("codec", CODECS)
def test_fifty_killed_writers(tmp_path, codec):
    rng = random.Random(1)
    found = {b"".join(kill_at_random(tmp_path / f"{i}", codec, 10, rng)) for i in range(5)}
    assert len(found) == 1


def two_at_once(folder: Path, codec: str) -> None:
    """Both do the same unit, neither sees the other's claim: one record, the loser's files gone."""
    children = [start(folder, codec, "forced") for _ in range(2)]
    for child in children:
        go(child)
    said = sorted(child.communicate(timeout=120)[0].strip() for child in children)
    assert said == ["lost", "won"]
    assert len(list(StageDir(folder).files.iterdir())) == 2
    contents(folder)


def test_two_workers_on_one_unit(tmp_path):
    two_at_once(tmp_path / "stage", "raw")


@pytest.mark.campaign
@pytest.mark.parametrize("codec", CODECS)
def test_two_workers_on_one_unit_ten_times(tmp_path, codec):
    for i in range(10):
        two_at_once(tmp_path / f"{i}", codec)
    assert len({b"".join(contents(tmp_path / f"{i}")) for i in range(10)}) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")
@pytest.mark.parametrize("codec", ["raw", pytest.param("fp8", marks=pytest.mark.campaign)])
def test_full_disk_then_more_space(tmp_path, codec):
    """The unit is dropped without a failed try, and done as soon as there is room."""
    small = tmp_path / "small"
    small.mkdir()
    whole(start(tmp_path / "first", codec))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", small], check=True)
    try:
        out, err = start(small / "stage", codec).communicate("go\n", timeout=120)
        assert "No space left on device" in err and "won" not in out
        stage = StageDir(small / "stage")
        assert list(stage.files.iterdir()) == [] and list(stage.records.iterdir()) == []
        assert Ledger(stage).failures(UNIT) == []
        subprocess.run(["mount", "-o", "remount,size=60m", small], check=True)
        whole(start(small / "stage", codec))
        assert contents(small / "stage") == contents(tmp_path / "first")
    finally:
        subprocess.run(["umount", small], check=True)
