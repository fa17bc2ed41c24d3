"""Bits flipped and ends cut off at random places of finished shards: each is found and named.

The proof is the one of `verify` (a unit's record, its index, its samples), the reading the one of
training (ShardSet with the index digests of the records).
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hidden_run import bf16, flip  # noqa: E402
from kimi_eagle import files  # noqa: E402
from kimi_eagle.data.rows import sample_id  # noqa: E402
from kimi_eagle.errors import RunError  # noqa: E402
from kimi_eagle.ledger import Record  # noqa: E402
from kimi_eagle.proof.files import Fault, size_faults  # noqa: E402
from kimi_eagle.proof.shards import ShardProof, Wanted  # noqa: E402
from kimi_eagle.rundir import StageDir  # noqa: E402
from kimi_eagle.shards import Shard, ShardSet, ShardWriter  # noqa: E402

LAYERS, HIDDEN = (2, 5, 9, 12), 40
LENGTHS = (17, 1, 130, 64, 3, 41)
CODECS = ("raw", "lossless", "fp8")
WANTED = Wanted(LAYERS, HIDDEN, "verifier", CODECS, 0.9)


@dataclass
class Made:
    """A finished unit: its record as extract makes it, and what its samples are."""

    record: Record
    shard: Path
    index: Path
    samples: list[dict[str, np.ndarray]]

    def faults(self) -> list[Fault]:
        """As `verify --deep` has them."""
        found = list(size_faults(self.record))
        if found:
            return found
        proof = ShardProof(self.record, WANTED)
        found = list(proof.quick())
        return found + list(proof.deep(None, lambda count: None)) if proof.opens else found

    @property
    def index_digest(self) -> str:
        return self.record.data["files"][1]["xxh3"]

    def place(self, at: int) -> str | None:
        """The sample that a byte of the shard belongs to, if it belongs to one."""
        data, shard = self.shard.read_bytes(), Shard(self.shard)
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:begin]).items():
            if name == "__metadata__":
                continue
            first, last = (begin + x for x in entry["data_offsets"])
            if not first <= at < last:
                continue
            if name == "blocks":
                starts, counts = shard.index.columns["offset"], shard.index.columns["n_bytes"]
                place = at - first
            else:
                starts, counts = shard.index.starts, shard.lengths
                place = (at - first) * shard.tokens // (last - first)
            rows = np.flatnonzero((starts <= place) & (place < starts + counts))
            return shard.sample_ids[rows[0]] if len(rows) else None
        return None


def make(folder: Path, codec: str, unit: int) -> Made:
    stage, rng = StageDir(folder).make(), np.random.default_rng(unit)
    name = f"{unit:05d}"
    meta = {"verifier_id": "verifier", "engine": {"dtype": "bfloat16"}}
    ids = []
    with ShardWriter(stage.files, f"{name}.a1", LAYERS, HIDDEN, meta, codec=codec) as writer:
        for length in LENGTHS:
            tokens = rng.integers(0, 50_000, length, np.int32)
            mask = rng.random(length) < 0.5
            ids.append(sample_id(tokens, mask))
            writer.add(ids[-1], bf16(rng, length, len(LAYERS), HIDDEN), tokens, mask)
    entries = []
    for path, (digest, of) in writer.digests.items():
        entry = {"name": path.name, "bytes": path.stat().st_size, "xxh3": digest}
        entries.append(entry | ({"of": of} if of else {}))
    data = {
        "unit": name, "key": "0" * 16, "state": "done", "attempt": 1, "files": entries,
        "counts": {"samples": len(LENGTHS), "tokens": sum(LENGTHS)},
        "info": {"probe": {"agreement": 1.0}, "content": writer.content, "rejected": []},
    }  # fmt: skip
    shard, index = writer.digests
    whole = [{k: v.copy() for k, v in Shard(shard).sample(i).items()} for i in ids]
    return Made(Record(stage, data), shard, index, whole)


@pytest.fixture
def made(tmp_path: Path) -> list[Made]:
    """Two units of each codec."""
    return [make(tmp_path / "extract", c, i) for i, c in enumerate((*CODECS, *CODECS))]


def read_all(made: list[Made], spoilt: Made) -> dict[str, bool]:
    """Each sample of the spoilt shard: could it be read as good? The shards beside it can.

    All bytes that were given out are the right ones, or this fails.
    """
    others = ShardSet([m.shard for m in made if m is not spoilt])
    whole = [s for m in made if m is not spoilt for s in m.samples]
    for got, want in zip(others.read(range(len(others))), whole, strict=True):
        assert all(np.array_equal(got[k], want[k]) for k in want)
    try:
        found = ShardSet([spoilt.shard], [spoilt.index_digest])
    except RunError:
        return {}
    good = {}
    for number, name in enumerate(found.ids):
        try:
            (got,) = found.read([number])
        except RunError:
            assert found.check(number), "read refused what check calls good"
            good[name] = False
            continue
        assert all(np.array_equal(got[k], spoilt.samples[number][k]) for k in got), name
        assert found.check(number) is None
        good[name] = True
    return good


def check_flips(made: list[Made], count: int, seed: int) -> dict[str, int]:
    """Flip one bit at a time; -> how many lay where."""
    dice, where = random.Random(seed), {"sample": 0, "index": 0, "else": 0}
    before = {p: files.file_digest(p) for m in made for p in (m.shard, m.index)}
    for _ in range(count):
        one = dice.choice(made)
        path = one.index if dice.random() < 0.2 else one.shard
        # Headers and ends are small: a third of the flips is kept for them.
        size = path.stat().st_size
        at = dice.randrange(min(4200, size) if dice.random() < 0.34 else size)
        bit, sample = dice.randrange(8), one.place(at) if path == one.shard else None
        where["index" if path == one.index else "sample" if sample else "else"] += 1
        note = f"{path.name} byte {at} bit {bit}, sample {sample}"
        flip(path, at, bit)
        faults = one.faults()
        assert faults, f"not found: {note}"
        assert {f.sample_id for f in faults} == {sample}, f"{note}: {faults}"
        assert all(f.file == path.name for f in faults), f"{note}: {faults}"
        assert not any(f for m in made if m is not one for f in m.faults()), note
        good = read_all(made, one)
        if sample:
            assert good == {n: n != sample for n in Shard(one.shard).sample_ids}, note
        flip(path, at, bit)
    assert {p: files.file_digest(p) for p in before} == before
    return where


def check_cuts(made: list[Made], count: int, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(count):
        one = dice.choice(made)
        path = one.index if dice.random() < 0.2 else one.shard
        data = path.read_bytes()
        kept = dice.randrange(len(data))
        path.write_bytes(data[:kept])
        faults = one.faults()
        assert [f.file for f in faults] == [path.name], f"{path.name} cut to {kept}: {faults}"
        assert not any(f for m in made if m is not one for f in m.faults())
        assert not any(read_all(made, one).values()), f"{path.name} cut to {kept} was read"
        # As long as before, what follows the cut lost: a hole after a crash.
        hole = data[:kept] + bytes(len(data) - kept)
        if hole != data:
            path.write_bytes(hole)
            assert one.faults(), f"{path.name} zeros from {kept}"
            read_all(made, one)
        path.write_bytes(data)
    assert not any(m.faults() for m in made)


def test_some_flips_and_cuts_are_found_and_named(made: list[Made]) -> None:
    assert not any(m.faults() for m in made)
    where = check_flips(made, 60, seed=1)
    assert min(where.values()) >= 5, where
    check_cuts(made, 12, seed=1)


@pytest.mark.campaign
def test_a_thousand_flips_are_found_and_named(made: list[Made]) -> None:
    where = check_flips(made, 1000, seed=2026)
    print(where)
    assert sum(where.values()) == 1000 and min(where.values()) >= 100, where


@pytest.mark.campaign
def test_two_hundred_cuts_are_found(made: list[Made]) -> None:
    check_cuts(made, 200, seed=2026)


def test_padding_of_blocks_is_proven_too(tmp_path: Path) -> None:
    for unit in range(20):
        one = make(tmp_path / str(unit), "lossless", unit)
        shard = Shard(one.shard)
        end = int((shard.index.columns["offset"] + shard.index.columns["n_bytes"])[-1])
        if end % 8 == 0:
            continue
        begin = 8 + int.from_bytes(one.shard.read_bytes()[:8], "little")
        assert one.place(begin + end) is None
        flip(one.shard, begin + end)
        (fault,) = one.faults()
        assert fault.sample_id is None and "after the last block" in fault.what
        return
    pytest.fail("no padding in 20 shards")
