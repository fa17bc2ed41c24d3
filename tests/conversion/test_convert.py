"""Conversions: every pair of formats and codecs, proven; what is damaged or missing is named."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from foreign_states import (  # noqa: E402
    HIDDEN,
    LAYERS,
    META,
    contents,
    make,
    same,
    tree,
    write_dumps,
    write_shards,
    write_speculators,
)
from kimi_eagle.conversion import to_shards as room  # noqa: E402
from kimi_eagle.conversion.opening import open_source  # noqa: E402
from kimi_eagle.conversion.to_shards import to_shards  # noqa: E402
from kimi_eagle.conversion.to_speculators import to_speculators  # noqa: E402
from kimi_eagle.errors import RunError, UsageError  # noqa: E402
from kimi_eagle.shards import (  # noqa: E402
    Shard,
    ShardSet,
    store,  # noqa: E402
)
from kimi_eagle.shards.folder import open_folder  # noqa: E402

SAMPLES = make(23)
BF16 = ("raw", "lossless")


def source(path: Path, kind: str = "shards", **more):
    return open_source(path, kind, **more)


def codecs(folder: Path) -> list[str]:
    return [Shard(p).codec for p in open_folder(folder)]


@pytest.mark.parametrize("after", ["raw", "lossless", "fp8"])
@pytest.mark.parametrize("before", ["raw", "lossless", "fp8"])
def test_codec_to_codec(tmp_path, before, after):
    first = write_shards(tmp_path / "in", SAMPLES, [before])
    untouched = tree(first)
    found = to_shards(source(first), tmp_path / "out", codec=after)
    assert (found.samples, found.shards) == (23, 5)
    assert found.tokens == sum(len(s.ids) for s in SAMPLES)
    assert codecs(tmp_path / "out") == [after] * 5
    if before in BF16 and after in BF16:
        same(tmp_path / "out", SAMPLES)
    if (before in BF16) == (after in BF16):  # the same values, so the same digests; fp8, too
        assert contents(tmp_path / "out") == contents(first)
    else:
        lost = ShardSet(open_folder(tmp_path / "out")), ShardSet(open_folder(first))
        for number in range(23):
            a, b = (values(s.at(number)["hidden_states"]) for s in lost)
            assert np.abs(a - b).max() <= np.abs(b).max() / 16
    assert tree(first) == untouched
    shard = Shard(open_folder(tmp_path / "out")[0])
    assert (shard.layers, shard.hidden_size) == (LAYERS, HIDDEN)
    assert shard.meta["verifier_id"] == "v1" and json.loads(shard.meta["engine"]) == META["engine"]


def values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_there_and_back_is_bytes_for_bytes(tmp_path):
    first = write_shards(tmp_path / "in", SAMPLES)
    to_shards(source(first), tmp_path / "a")
    to_shards(source(tmp_path / "a"), tmp_path / "b", codec="lossless")
    to_shards(source(tmp_path / "b"), tmp_path / "c")
    for path in open_folder(tmp_path / "a"):
        assert (tmp_path / "c" / path.name).read_bytes() == path.read_bytes()


def test_mixed_codecs_become_one(tmp_path):
    first = write_shards(tmp_path / "in", SAMPLES, ["raw", "lossless"])
    to_shards(source(first), tmp_path / "out", codec="raw")
    same(tmp_path / "out", SAMPLES)
    mixed = write_shards(tmp_path / "mixed", SAMPLES, ["raw", "fp8", "lossless"])
    to_shards(source(mixed), tmp_path / "fp8", codec="fp8")
    all_fp8 = write_shards(tmp_path / "all", SAMPLES, ["fp8"])
    assert contents(tmp_path / "fp8") == contents(all_fp8)


@pytest.mark.parametrize("limit", [1, 60, 10**6])
def test_shards_are_cut_by_tokens(tmp_path, limit):
    first = write_shards(tmp_path / "in", SAMPLES)
    to_shards(source(first), tmp_path / "out", shard_tokens=limit)
    shards = [Shard(p) for p in open_folder(tmp_path / "out")]
    assert all(s.tokens <= limit or len(s) == 1 for s in shards)
    pairs = zip(shards, shards[1:], strict=False)
    assert all(a.tokens + int(b.lengths[0]) > limit for a, b in pairs)
    same(tmp_path / "out", SAMPLES)


def test_more_shards_than_a_process_may_have_open(tmp_path):
    """Python's maps hold a file descriptor each."""
    import resource

    first = write_shards(tmp_path / "in", make(60), each=1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 50, limits[1]))
    try:
        store.OPEN, before = 12, store.OPEN
        to_shards(source(first), tmp_path / "out")
        to_shards(source(first), tmp_path / "out")  # now it looks at 60 that are there
        to_shards(source(first), tmp_path / "one", shard_tokens=10**6)
        to_speculators(source(first), tmp_path / "spec")
    finally:
        store.OPEN = before
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(open_folder(tmp_path / "out")) == 60


def test_repeated_samples_are_kept_once(tmp_path):
    prepared = write_speculators(tmp_path / "in", [*SAMPLES[:4], *SAMPLES[:2]])
    found = to_shards(source(prepared, "speculators", layers=LAYERS), tmp_path / "out")
    assert (found.samples, found.repeated) == (4, 2)
    same(tmp_path / "out", SAMPLES[:4])


def test_speculators_there_and_back(tmp_path):
    first = write_shards(tmp_path / "in", SAMPLES, ["raw", "lossless"])
    found = to_speculators(source(first), tmp_path / "spec")
    assert (found.samples, found.kept) == (23, 0)
    again = source(tmp_path / "spec", "speculators")
    assert again.layers == LAYERS
    to_shards(again, tmp_path / "back", codec="lossless")
    assert contents(tmp_path / "back") == contents(first)
    assert Shard(open_folder(tmp_path / "back")[0]).meta["verifier_id"] == "v1"
    with pytest.raises(UsageError, match="--layers"):
        source(tmp_path / "spec", "speculators", layers=(1, 2, 3, 30))


def test_speculators_own_classes_read_what_we_write(tmp_path):
    import torch
    from hs_connectors import FileTransfer
    from speculators.train.data import ArrowDataset

    first = write_shards(tmp_path / "in", SAMPLES, ["lossless"])
    to_speculators(source(first), tmp_path / "spec")
    transfer = FileTransfer(tmp_path / "spec/hidden_states")
    data = ArrowDataset(4096, tmp_path / "spec", transfer, on_missing="raise")
    assert len(data) == 23
    assert data.approx_lengths == [len(s.ids) for s in SAMPLES]
    for number, s in enumerate(SAMPLES):
        states = torch.from_numpy(s.states.view(np.int16)).view(torch.bfloat16)
        loaded = transfer.get_cached(number)
        assert torch.equal(loaded["hidden_states"], states)
        row = data[number]
        assert torch.equal(row["hidden_states"], states[:, :-1].flatten(1))
        assert torch.equal(row["verifier_last_hidden_states"], states[:, -1])
        assert row["input_ids"].tolist() == s.ids.tolist()
        assert row["loss_mask"].bool().tolist() == s.mask.tolist()


def test_what_speculators_wrote_becomes_shards(tmp_path):
    prepared = write_speculators(tmp_path / "in", SAMPLES)
    untouched = tree(prepared)
    opened = source(prepared, "speculators", layers=LAYERS)
    assert opened.tokens == sum(len(s.ids) for s in SAMPLES)
    found = to_shards(opened, tmp_path / "out", codec="lossless", shard_tokens=100)
    same(tmp_path / "out", SAMPLES)
    assert found.missing == [] and tree(prepared) == untouched


def test_shuffled_rows_come_in_their_order(tmp_path):
    """A dataset that was selected from without being flattened keeps an indices file."""
    from datasets import Dataset, load_from_disk

    prepared = write_speculators(tmp_path / "in", SAMPLES[:6])
    order = [4, 1, 5]
    mixed = write_speculators(tmp_path / "mixed", [SAMPLES[i] for i in order])
    data = load_from_disk(str(prepared)).select(order)
    assert isinstance(data, Dataset) and data._indices is not None
    data.save_to_disk(str(tmp_path / "rows"))
    (mixed / "hidden_states").rename(tmp_path / "rows/hidden_states")
    to_shards(source(tmp_path / "rows", "speculators", layers=LAYERS), tmp_path / "out")
    same(tmp_path / "out", [SAMPLES[i] for i in order])


def test_folders_of_shards(tmp_path):
    plain = write_shards(tmp_path / "in", SAMPLES)
    assert [p.name for p in open_folder(plain)] == [f"u{k:03d}.safetensors" for k in range(5)]
    to_shards(source(plain), tmp_path / "out")
    names = [p.name for p in open_folder(tmp_path / "out")]
    assert names == [f"shard-{k:05d}.safetensors" for k in range(5)]
    assert len(ShardSet(open_folder(tmp_path / "out"))) == 23
    stray = tmp_path / "out/stray.safetensors"
    stray.write_bytes(b"x")
    assert stray not in open_folder(tmp_path / "out")  # the manifest says what belongs to it
    stray.unlink()

    manifest = tmp_path / "out/shards.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"samples":5', '"samples":6', 1))
    with pytest.raises(RunError, match="not the one that was written"):
        open_folder(tmp_path / "out")
    manifest.write_text(text)
    (tmp_path / "out/shard-00003.index.parquet").unlink()
    with pytest.raises(RunError, match="shard-00003.index.parquet: is missing"):
        open_folder(tmp_path / "out")
    (plain / "u001.index.parquet").unlink()
    with pytest.raises(RunError, match="u001.safetensors has no index"):
        open_folder(plain)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no shards here"):
        open_folder(tmp_path / "empty")


def test_damage_is_named_and_stops_or_is_left_out(tmp_path):
    first = write_shards(tmp_path / "in", SAMPLES, ["raw", "lossless"])
    for stem, row in (("u000", 2), ("u001", 1)):
        path = first / f"{stem}.safetensors"
        shard, data = Shard(path), bytearray(path.read_bytes())
        place = 4096 + (
            int(shard.index.starts[row]) * len(LAYERS) * HIDDEN * 2
            if shard.codec == "raw"
            else int(shard.index.columns["offset"][row])
        )
        data[place + 7] ^= 1
        path.write_bytes(data)
    cut = first / "u004.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10])
    with pytest.raises(RunError) as e:
        to_shards(source(first), tmp_path / "out")
    assert SAMPLES[2].id in e.value.line() and "--skip-damaged" in e.value.line()
    found = to_shards(source(first), tmp_path / "out", skip_damaged=True)
    lost = [2, 6, 20, 21, 22]
    assert len(found.damaged) == 5
    assert all(SAMPLES[i].id in text for i, text in zip(lost, found.damaged, strict=True))
    same(tmp_path / "out", [s for i, s in enumerate(SAMPLES) if i not in lost])
    with pytest.raises(RunError, match="no sample could be converted"):
        for path in first.glob("*.safetensors"):
            path.write_bytes(b"")
        to_shards(source(first), tmp_path / "none", skip_damaged=True)


def test_codec_that_lies_is_found(tmp_path, monkeypatch):
    """The proof of a conversion: states that come back otherwise than they were given."""
    from kimi_eagle.shards import codecs as coding

    first = write_shards(tmp_path / "in", SAMPLES)
    honest = coding.compress

    def lying(bits):
        return honest(bits ^ (np.arange(bits.size).reshape(bits.shape) == 77))

    monkeypatch.setattr(coding, "compress", lying)
    with pytest.raises(RunError, match="decoded states are not those"):
        to_shards(source(first), tmp_path / "out", codec="lossless")
    monkeypatch.undo()

    def shifted(self, number):
        found = load(self, number)
        return type(found)(**{**found.__dict__, "states": np.roll(found.states, 1, 0)})

    load = room.Source.__subclasses__()[0].load
    monkeypatch.setattr(room.Source.__subclasses__()[0], "load", shifted)
    for write in (to_shards, to_speculators):
        with pytest.raises(RunError, match=f"{SAMPLES[0].id}.*not that of the source"):
            write(source(first), tmp_path / f"out-{write.__name__}")


def test_verifiers_are_not_mixed(tmp_path):
    first = write_shards(tmp_path / "in", SAMPLES[:10])
    other = write_shards(tmp_path / "other", SAMPLES[10:], meta={"verifier_id": "v2"})
    for path in other.iterdir():
        path.rename(first / f"z-{path.name}")
    for write in (to_shards, to_speculators):
        with pytest.raises(RunError, match="verifier v2.*expected v1"):
            write(source(first), tmp_path / write.__name__)


def test_engines_are_kept_apart(tmp_path):
    """One verifier, two engines: no shard says that one of them made what the other made."""
    first = write_shards(tmp_path / "in", SAMPLES[:10])
    newer = write_shards(
        tmp_path / "newer", SAMPLES[10:], meta={**META, "engine": {"vllm": "0.32.0"}}
    )
    for path in newer.iterdir():
        path.rename(first / f"z-{path.name}")
    to_shards(source(first), tmp_path / "out", shard_tokens=10**6)
    shards = [Shard(p) for p in open_folder(tmp_path / "out")]
    assert [json.loads(s.meta["engine"])["vllm"] for s in shards] == ["0.31.0", "0.32.0"]
    to_speculators(source(first), tmp_path / "spec")
    said = json.loads((tmp_path / "spec/states.json").read_text())
    assert said["meta"] == {"verifier_id": "v1"}


@pytest.mark.parametrize("write", [to_shards, to_speculators])
def test_out_is_never_something_else(tmp_path, write):
    first = write_shards(tmp_path / "in", SAMPLES)
    with pytest.raises(UsageError, match="OUT lies in SRC"):
        write(source(first), first)
    with pytest.raises(UsageError, match="OUT lies in SRC"):
        write(source(first), first / "new")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="something else .thesis.tex"):
        write(source(first), tmp_path / "full")
    with pytest.raises(UsageError, match="OUT is a file"):
        write(source(first), tmp_path / "full/thesis.tex")
    write(source(first), tmp_path / "out")
    before = tree(tmp_path / "out")
    other = write_shards(tmp_path / "other", make(5, seed=9))
    with pytest.raises(UsageError, match="another source"):
        write(source(other), tmp_path / "out")
    if write is to_shards:
        for change in ({"codec": "fp8"}, {"shard_tokens": 5}):
            with pytest.raises(UsageError, match="was made with"):
                write(source(first), tmp_path / "out", **change)
    assert tree(tmp_path / "out") == before
    assert write(source(first), tmp_path / "out").kept == (5 if write is to_shards else 23)
    assert tree(tmp_path / "out") == before


def test_too_little_space_is_told_with_the_figure(tmp_path, monkeypatch):
    first = write_shards(tmp_path / "in", SAMPLES)
    need = room.need(source(first), "raw")
    assert need == sum(len(s.ids) for s in SAMPLES) * (len(LAYERS) * HIDDEN * 2 + 5)
    usage = type("Usage", (), {"free": need - 1})
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: usage)
    for write in (to_shards, to_speculators):
        with pytest.raises(RunError, match=r"at least 0\.00 GB are to be written"):
            write(source(first), tmp_path / write.__name__)
    # As the message says, another codec may do, in the same folder.
    to_shards(source(first), tmp_path / "to_shards", codec="fp8")
    assert codecs(tmp_path / "to_shards") == ["fp8"] * 5


def test_dumps_to_speculators(tmp_path):
    dumps = write_dumps(tmp_path / "in", SAMPLES[:5])
    to_speculators(source(dumps, "pt", num_layers=30), tmp_path / "spec")
    to_shards(source(tmp_path / "spec", "speculators"), tmp_path / "out")
    same(tmp_path / "out", SAMPLES[:5])
