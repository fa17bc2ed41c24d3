"""`kimi-eagle verify DIR` of shards that belong to no run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hidden_run import bf16, flip  # noqa: E402
from kimi_eagle.cli import main  # noqa: E402
from kimi_eagle.data.rows import sample_id  # noqa: E402
from kimi_eagle.shards import Shard, ShardWriter  # noqa: E402


def verify(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["verify", str(folder), *words])


def write(folder: Path, stem: str, seed: int, layers: tuple[int, ...] = (1, 2)) -> Path:
    rng = np.random.default_rng(seed)
    with ShardWriter(folder, stem, layers, 16, {"verifier_id": "v"}) as writer:
        for length in (9, 4, 30):
            ids, mask = rng.integers(0, 99, length, np.int32), rng.random(length) < 0.5
            states = bf16(rng, length, len(layers), 16)
            writer.add(sample_id(ids, mask), states, ids, mask)
    return writer.path


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Three shards and nothing else."""
    (tmp_path / "bare").mkdir()
    for i in range(3):
        write(tmp_path / "bare", f"s{i}", i)
    return tmp_path / "bare"


@pytest.fixture
def made(bare: Path, tmp_path: Path) -> Path:
    """The same through `shards convert`: with a manifest."""
    words = ["shards", "convert", str(bare), str(tmp_path / "made"), "--codec", "lossless"]
    done = CliRunner().invoke(main, [*words, "--shard-tokens", "43"])
    assert done.exit_code == 0, done.output
    return tmp_path / "made"


def damage(done: Result) -> list[tuple[str, str | None]]:
    assert done.exit_code in (0, 1), done.output
    shown = json.loads(done.stdout)
    assert done.exit_code == bool(shown["damage"]) and shown["ok"] == (not shown["damage"])
    return [(d["file"], d["sample_id"]) for d in shown["damage"]]


@pytest.mark.parametrize("deep", [(), ("--deep",)])
def test_whole_folders(bare: Path, made: Path, deep: tuple[str, ...]) -> None:
    for folder, count in ((bare, 3), (made, 3)):
        assert damage(verify(folder, *deep, "--json")) == []
        (row,) = json.loads(verify(folder, *deep, "--json").stdout)["stages"]
        assert (row["units"], row["ok"], row["state"]) == (count, count, "done")
    assert "the indexes are believed" in verify(bare).output
    assert "shards.json" not in verify(made).output
    assert verify(made, "extract").exit_code == 2


@pytest.mark.parametrize("which", ["bare", "made"])
def test_damaged_samples_are_named(request: pytest.FixtureRequest, which: str) -> None:
    folder = request.getfixturevalue(which)
    path = sorted(folder.glob("*.safetensors"))[1]
    flip(path, 4096 + 10)
    assert damage(verify(folder, "--json")) == []
    assert damage(verify(folder, "--deep", "--json")) == [(path.name, Shard(path).sample_ids[0])]
    done = verify(folder, "--deep")
    assert done.exit_code == 1 and path.name in done.output and "shards convert" in done.output
    flip(path, 4096 + 10)
    flip(path, 3000)
    assert damage(verify(folder, "--json")) == [(path.name, None)]


def test_what_verify_says_to_do_mends_a_folder(bare: Path, made: Path) -> None:
    path = sorted(made.glob("*.safetensors"))[1]
    before = path.read_bytes()
    flip(path, 4096 + 10)
    assert damage(verify(made, "--deep", "--json"))
    path.unlink()
    words = ["shards", "convert", str(bare), str(made), "--codec", "lossless"]
    done = CliRunner().invoke(main, [*words, "--shard-tokens", "43"])
    assert done.exit_code == 0, done.output
    assert path.read_bytes() == before and damage(verify(made, "--deep", "--json")) == []


def test_a_block_that_the_disk_cannot_read_is_named(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sorted(bare.glob("*.safetensors"))[1]
    shard, read = Shard(path), os.preadv
    bad = 4096 + 2 * 2 * 16 * int(shard.lengths[0])  # in the states of the second sample

    def preadv(fd: int, buffers: list, at: int) -> int:
        same = os.path.samestat(os.fstat(fd), path.stat())
        if same and at <= bad < at + sum(b.nbytes for b in buffers):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    done = verify(bare, "--deep", "--json")
    assert damage(done) == [(path.name, shard.sample_ids[1])]
    assert "Input/output error" in json.loads(done.stdout)["damage"][0]["what"]


def test_a_manifest_tells_what_indexes_alone_cannot(made: Path, bare: Path) -> None:
    one, two, three = sorted(made.glob("*.safetensors"))
    index = [p.with_name(p.name.replace(".safetensors", ".index.parquet")) for p in (one, two)]
    (made / "mine.txt").write_text("x")
    assert json.loads(verify(made, "--json").stdout)["strays"] == 1
    for pair in ((one, two), index):  # a whole shard in another's place
        third = made / "third"
        pair[0].rename(third)
        pair[1].rename(pair[0])
        third.rename(pair[1])
    assert {f for f, _ in damage(verify(made, "--json"))} == {p.name for p in index}
    three.unlink()
    assert (three.name, None) in damage(verify(made, "--deep", "--json"))
    shutil.rmtree(made)
    write(bare, "s9", 9, layers=(1, 3))
    assert damage(verify(bare, "--json")) == [("s9.safetensors", None)]


def test_a_conversion_that_is_not_finished_is_open(made: Path) -> None:
    from kimi_eagle.shards.folder import read_manifest, write_manifest

    data = read_manifest(made)
    write_manifest(made, {**data, "complete": False})
    done = verify(made, "--deep", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["stages"][0]["state"] == "open"
    (made / "shards.json").write_text((made / "shards.json").read_text().replace("false", "true"))
    done = verify(made)
    assert done.exit_code == 1 and "the manifest is not the one that was written" in done.output
