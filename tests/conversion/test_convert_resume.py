"""A conversion that was killed, or whose disk was full, goes on and ends with the same bytes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from foreign_states import make, same, tree, write_shards  # noqa: E402
from kimi_eagle.conversion import to_shards as room  # noqa: E402
from kimi_eagle.conversion.opening import open_source  # noqa: E402
from kimi_eagle.conversion.to_shards import to_shards  # noqa: E402
from kimi_eagle.conversion.to_speculators import to_speculators  # noqa: E402
from kimi_eagle.shards.folder import open_folder, read_manifest  # noqa: E402

SAMPLES = make(60, hidden=64, longest=60)

KILLER = """
# A process that has all imports done starts the conversion in children and kills them: argv are
# the target, SRC, OUT, how often, a seed.
import os, random, signal, sys, time
from pathlib import Path
import pyarrow.parquet
from kimi_eagle.conversion.to_shards import to_shards
from kimi_eagle.conversion.to_speculators import to_speculators
from kimi_eagle.conversion.opening import open_source

if sys.argv[1] == "speculators":
    import datasets, safetensors.torch
target, src, out, times, seed = sys.argv[1], *map(Path, sys.argv[2:4]), *map(int, sys.argv[4:6])
rng, killed = random.Random(seed), 0

def convert():
    source = open_source(src, "shards")
    if target == "shards":
        to_shards(source, out, codec="lossless")
    else:
        to_speculators(source, out)

def born():
    return sum(len(names) for _, _, names in os.walk(out))

while killed < times:
    child = os.fork()
    if not child:
        convert()
        os._exit(0)
    until, patience = born() + rng.randint(0, 4), time.monotonic() + 30
    while born() < until and time.monotonic() < patience:
        if os.waitpid(child, os.WNOHANG)[0]:
            child = 0
            break
        time.sleep(0.0002)
    if child:
        time.sleep(rng.random() * 0.004)
        os.kill(child, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        print("KILLED", born(), flush=True)
    else:  # it was done before: begin anew
        import shutil
        shutil.rmtree(out)
"""


def kill_often(target: str, src: Path, out: Path, times: int, seed: int) -> list[int]:
    """Kill that many conversions, each going on with `out`; -> files there after each."""
    command = [sys.executable, "-c", KILLER, target, str(src), str(out), str(times), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return [int(line.split()[1]) for line in done.stdout.splitlines() if "KILLED" in line]


def finish(target: str, src: Path, out: Path):
    source = open_source(src, "shards")
    if target == "shards":
        return to_shards(source, out, codec="lossless")
    return to_speculators(source, out)


def check_kills(tmp_path: Path, target: str, times: int, seed: int) -> None:
    src = write_shards(tmp_path / "in", SAMPLES, ["raw", "lossless"], each=2)
    untouched = tree(src)
    finish(target, src, tmp_path / "whole")
    there = kill_often(target, src, tmp_path / "out", times, seed)
    assert len(there) == times
    found = finish(target, src, tmp_path / "out")
    assert found.samples == len(SAMPLES)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert list((tmp_path / "out").rglob(".tmp-*")) == []
    assert tree(src) == untouched


@pytest.mark.parametrize(
    "target", ["shards", pytest.param("speculators", marks=pytest.mark.campaign)]
)
def test_killed_conversions_go_on(tmp_path, target):
    check_kills(tmp_path, target, times=3, seed=1)


@pytest.mark.campaign
@pytest.mark.parametrize("target", ["shards", "speculators"])
def test_fifty_killed_conversions(tmp_path, target):
    rounds = 10
    for k in range(rounds):
        folder = tmp_path / str(k)
        folder.mkdir()
        check_kills(folder, target, times=50 // rounds, seed=k)


def test_finished_shards_are_kept_and_only_damaged_ones_made_again(tmp_path, monkeypatch):
    src = write_shards(tmp_path / "in", SAMPLES, each=6)
    out = tmp_path / "out"
    to_shards(open_source(src, "shards"), out)
    whole = tree(out)
    paths = open_folder(out)
    paths[1].unlink()
    paths[3].write_bytes(paths[3].read_bytes()[:-1])
    index = paths[5].with_name("shard-00005.index.parquet")
    index.write_bytes(index.read_bytes()[:-9] + b"x" + index.read_bytes()[-8:])
    header = bytearray(paths[7].read_bytes())
    header[100] ^= 1
    paths[7].write_bytes(header)
    times = {p: p.stat().st_mtime_ns for p in paths[::2]}

    made = []
    make_writer = room.ShardWriter

    def watched(folder, stem, *args, **more):
        made.append(stem)
        return make_writer(folder, stem, *args, **more)

    monkeypatch.setattr(room, "ShardWriter", watched)
    found = to_shards(open_source(src, "shards"), out)
    assert made == ["shard-00001", "shard-00003", "shard-00005", "shard-00007"]
    assert found.kept == 6 and found.shards == 10
    assert all(p.stat().st_mtime_ns == t for p, t in times.items())
    assert tree(out) == whole
    same(out, SAMPLES)


def test_what_is_beyond_a_hole_stays_in_the_manifest(tmp_path, monkeypatch):
    """Killed again while it mends the hole, nothing that was finished is lost."""
    src = write_shards(tmp_path / "in", SAMPLES, each=6)
    out = tmp_path / "out"
    to_shards(open_source(src, "shards"), out)
    for path in open_folder(out)[1:4:2]:
        path.unlink()

    class Stop(Exception):
        pass

    honest, calls = room._Made.shard, []

    def stop_at_the_second(self, *args):
        calls.append(1)
        if len(calls) == 2:
            raise Stop
        return honest(self, *args)

    monkeypatch.setattr(room._Made, "shard", stop_at_the_second)
    with pytest.raises(Stop):
        to_shards(open_source(src, "shards"), out)
    manifest = read_manifest(out)
    assert not manifest["complete"] and len(manifest["shards"]) == 9
    monkeypatch.undo()
    assert to_shards(open_source(src, "shards"), out).kept == 9
    same(out, SAMPLES)


def test_missing_files_of_an_export_are_made_again(tmp_path):
    src = write_shards(tmp_path / "in", SAMPLES)
    out = tmp_path / "out"
    to_speculators(open_source(src, "shards"), out)
    whole = tree(out)
    states = out / "hidden_states"
    (states / "hs_3.safetensors").unlink()
    (states / "hs_9.safetensors").write_bytes((states / "hs_9.safetensors").read_bytes()[:-1])
    (states / "hs_20.safetensors").replace(states / "hs_21.safetensors")
    found = to_speculators(open_source(src, "shards"), out)
    assert found.kept == 56 and tree(out) == whole


def test_leftovers_of_the_living_are_left_alone(tmp_path):
    src = write_shards(tmp_path / "in", SAMPLES)
    out = tmp_path / "out"
    out.mkdir()
    living = out / f".tmp-{os.getpid()}-aa-x"
    living.touch()
    dead = out / f".tmp-{random.randint(5 * 10**6, 10**7)}-aa-x"  # above the largest pid of Linux
    dead.touch()
    to_shards(open_source(src, "shards"), out)
    assert living.exists() and not dead.exists()


FULL = """
import subprocess, sys, os
folder, src, *more = sys.argv[1:]
command = [sys.executable, "-m", "kimi_eagle", "shards", "convert", src, folder + "/out", *more]
first = subprocess.run(command, capture_output=True, text=True)
print("FIRST", first.returncode, first.stderr.strip().splitlines()[-1])
names = os.listdir(folder + "/out")
print("LEFT", [n for n in names if n.startswith(".tmp-")])
subprocess.run(["mount", "-o", "remount,size=64m", folder], check=True)
second = subprocess.run(command, capture_output=True, text=True)
print("SECOND", second.returncode, second.stderr, second.stdout)
subprocess.run(["cp", "-r", folder + "/out", src + "-result"], check=True)
"""


@pytest.mark.parametrize(
    "target", ["shards", pytest.param("speculators", marks=pytest.mark.campaign)]
)
def test_full_disk_then_more_space(tmp_path, target):
    src = write_shards(tmp_path / "in", SAMPLES, each=4)
    source = open_source(src, "shards")
    more = {"shards": ["--codec", "lossless"], "speculators": ["--to", "speculators"]}[target]
    finish(target, src, tmp_path / "whole")
    # Enough for the look at the free space, which is a lower bound, and not for what comes.
    size = room.need(source, "lossless" if target == "shards" else "raw") // 1024 + 40
    folder = tmp_path / "disk"
    folder.mkdir()
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    script = 'mount -t tmpfs -o "size=$1k" tmpfs "$2" && shift && exec "$PYTHON" -c "$FULL" "$@"'
    command = ["unshare", "--mount", *user, "sh", "-c", script, "sh", str(size), str(folder)]
    done = subprocess.run(
        [*command, str(src), *more],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHON": sys.executable, "FULL": FULL},
    )
    if "mount" in done.stderr and "FIRST" not in done.stdout:
        pytest.skip(f"cannot mount here: {done.stderr}")
    assert "FIRST 1 error: " in done.stdout and "No space left" in done.stdout, done
    assert "LEFT []" in done.stdout and "SECOND 0" in done.stdout, done
    assert tree(tmp_path / "in-result") == tree(tmp_path / "whole")
