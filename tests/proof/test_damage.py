"""`verify` finds every kind of damage by name and calls nothing else damaged."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1])]
from looks import UNITS, edit, file, found, marks, names, no_json, swap  # noqa: E402

import hidden_run  # noqa: E402
from hidden_run import extract, flip, record_of  # noqa: E402
from kimi_eagle import housekeeping, proof  # noqa: E402
from kimi_eagle.data import samples  # noqa: E402
from kimi_eagle.recipe import STAGES  # noqa: E402
from kimi_eagle.shards import Shard  # noqa: E402
from kimi_eagle.stages.context import Context  # noqa: E402

# -- damage ----------------------------------------------------------------------------------------


def _missing(ctx: Context) -> None:
    file(ctx, "00002").unlink()


def _no_index(ctx: Context) -> None:
    file(ctx, "00002", ".parquet").unlink()


def _short(ctx: Context) -> None:
    path = file(ctx, "00002")
    os.truncate(path, path.stat().st_size - 1)


def _header(ctx: Context) -> None:
    path = file(ctx, "00002")
    flip(path, path.read_bytes()[:4096].index(b"verifier_id") + 14)


def _header_padding(ctx: Context) -> None:
    flip(file(ctx, "00002"), 4000)


def _index_footer(ctx: Context) -> None:
    flip(file(ctx, "00002", ".parquet"), -20)


def _indexes_swapped(ctx: Context) -> None:
    swap(file(ctx, "00002", ".parquet"), file(ctx, "00003", ".parquet"))


def _both_swapped(ctx: Context) -> None:
    _indexes_swapped(ctx)
    swap(file(ctx, "00002"), file(ctx, "00003"))


def _tokens_edited(ctx: Context) -> None:
    edit(ctx, "00002", "extract", lambda data: data["counts"].update(tokens=5))


def _parts_edited(ctx: Context) -> None:
    edit(ctx, "00002", "extract", lambda data: data["parts"].update(layers=[1, 2]))


def _other_units_files(ctx: Context) -> None:
    other = record_of(ctx, "00003").data["files"]
    edit(ctx, "00002", "extract", lambda data: data.update(files=other))


def _half_a_list(ctx: Context) -> None:
    edit(ctx, "00002", "extract", lambda data: data["files"].pop())


PAIR = {("extract", "00002"), ("extract", "00003")}
ONE = {("extract", "00002")}


@pytest.mark.parametrize(
    ("spoil", "where", "word"),
    [
        (_missing, ONE, "missing"),
        (_no_index, ONE, "missing"),
        (_short, ONE, "bytes, recorded"),
        (_header, ONE, "header"),
        (_header_padding, ONE, "header"),
        (_index_footer, ONE, "not those recorded"),
        (_indexes_swapped, PAIR, "not those recorded"),
        (_both_swapped, PAIR, "not those recorded"),
        (_tokens_edited, ONE, "tokens"),
        (_parts_edited, ONE, "parts"),
        (_other_units_files, ONE, "not a file of this attempt"),
        (_half_a_list, ONE, "expected ['safetensors', 'index.parquet']"),
        (no_json, ONE, "not a record"),
    ],
)
@pytest.mark.parametrize("deep", [False, True])
def test_damage_that_shows_without_reading_samples(
    ctx: Context, spoil: Callable, where: set, word: str, deep: bool
) -> None:
    spoil(ctx)
    report = proof.verify(ctx, deep=deep)
    assert found(report) == where
    assert word in " ".join(d.what for d in report.damage)
    row = report.rows[STAGES.index("extract")]
    assert (row.ok, row.damaged) == (len(UNITS) - len(where), len(where))
    broken = spoil is no_json  # shuts the gate and is opened by retry as it is
    assert len(marks(ctx)) == (0 if broken else len(where))


def _states(ctx: Context) -> list[str]:
    flip(file(ctx, "00002"), 4096 + 100)
    return names(ctx, "00002")[:1]


def _token_ids(ctx: Context) -> list[str]:
    shard = Shard(file(ctx, "00002"))
    flip(shard.path, -5 * shard.tokens + 4 * int(shard.lengths[0]) + 1)  # the first of sample 1
    return shard.sample_ids[1:2]


def _mask(ctx: Context) -> list[str]:
    flip(file(ctx, "00002"), -1)
    return names(ctx, "00002")[-1:]


def _shards_swapped(ctx: Context) -> list[str]:
    one, other = file(ctx, "00002"), file(ctx, "00003")
    assert one.stat().st_size == other.stat().st_size
    assert one.read_bytes()[:4096] == other.read_bytes()[:4096]
    swap(one, other)
    return names(ctx, "00002") + names(ctx, "00003")


@pytest.mark.parametrize("spoil", [_states, _token_ids, _mask, _shards_swapped])
def test_deep_names_the_samples_that_are_damaged(ctx: Context, spoil: Callable) -> None:
    samples_hit = spoil(ctx)
    assert found(proof.verify(ctx)) == set()
    report = proof.verify(ctx, deep=True)
    assert sorted(d.sample_id for d in report.damage) == sorted(samples_hit)
    assert found(report) == (PAIR if spoil is _shards_swapped else ONE)
    mark = ctx.ledger("extract").damage(record_of(ctx, "00002"))
    assert mark["attempt"] == 1 and set(mark["samples"]) <= set(samples_hit) and mark["reasons"]
    # What is marked is damaged to a quick look too, until it is made again.
    assert found(proof.verify(ctx)) == found(report)


@pytest.mark.parametrize(
    ("stage", "unit", "end"),
    [
        ("prepare", "all", ".00002.tokens.parquet"),
        ("prepare", "all", "rejects.jsonl"),
        ("vocab", "all", "d2t.npy"),
        ("train", "all", "model.safetensors"),
        ("train", "all", "curves.jsonl"),
        ("benchmark", "all", "results.json"),
    ],
)
def test_deep_reads_the_files_of_every_stage(ctx: Context, stage: str, unit: str, end: str) -> None:
    path = file(ctx, unit, end, stage)
    if path.stat().st_size:
        flip(path, path.stat().st_size // 2)
    else:
        edit(ctx, unit, stage, lambda d: [f.update(xxh3="0" * 32) for f in d["files"][:1]])
    assert found(proof.verify(ctx)) == set()
    report = proof.verify(ctx, deep=True)
    assert {(d.stage, d.unit, Path(d.file).name) for d in report.damage} == {
        (stage, unit, path.name)
    }
    assert len(marks(ctx)) == 1


def test_a_damaged_tokens_part_is_found_where_only_extract_is_looked_at(ctx: Context) -> None:
    flip(file(ctx, "all", ".00002.tokens.parquet", "prepare"), 300)
    assert proof.verify(ctx, stage="extract", deep=True).damage == []


def test_a_draft_that_was_changed_is_put_there_anew(ctx: Context) -> None:
    path = ctx.run.draft / "model.safetensors"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    assert proof.verify(ctx, deep=True).damage == []
    flip(path, 7)
    assert proof.verify(ctx).damage == []
    report = proof.verify(ctx, deep=True)
    assert [(d.stage, d.file) for d in report.damage] == [("draft", "draft/model.safetensors")]
    assert housekeeping.retry(ctx) == {"draft": 1}
    assert [r.state for r in proof.verify(ctx, deep=True).rows if r.stage == "draft"] == ["open"]
    hidden_run.train.publish(ctx)
    assert path.read_bytes() == data and proof.verify(ctx, deep=True).damage == []


# -- units that are whole, and not what they should be ---------------------------------------------


@pytest.mark.parametrize(
    ("changes", "quick", "word"),
    [
        ({"layers": [3, 15, 27, 30]}, True, "layers"),
        ({"verifier_id": "other"}, True, "another verifier"),
        ({"codec": "fp8"}, True, "codec fp8"),
        ({"agreement": 0.5}, True, "probe"),
        ({"part": "00003"}, False, "no sample of this unit's tokens part"),
        ({"part": "ids"}, False, "token ids"),
        ({"part": "mask"}, False, "loss mask"),
    ],
)
def test_whole_shards_of_something_else(
    ctx: Context, changes: dict, quick: bool, word: str
) -> None:
    part = samples.read_samples(file(ctx, "all", ".00002.tokens.parquet", "prepare"))
    if changes.get("part") == "00003":
        changes = {
            "part": samples.read_samples(file(ctx, "all", ".00003.tokens.parquet", "prepare"))
        }
    elif changes.get("part"):
        changes = {"part": [_Renamed(s, changes["part"]) for s in part]}
    ctx.ledger("extract").set_aside(record_of(ctx, "00002"), "test")
    assert extract(ctx, **changes) == ["00002"]
    assert found(proof.verify(ctx)) == (ONE if quick else set())
    report = proof.verify(ctx, deep=True)
    assert found(report) == ONE
    assert word in " ".join(d.what for d in report.damage)


class _Renamed:
    """A sample with another's name: what a reader that goes by row numbers would have made."""

    def __init__(self, sample: samples.Sample, what: str):
        self.sample_id = sample.sample_id
        self.input_ids, self.loss_mask = sample.input_ids, sample.loss_mask
        if what == "ids":
            self.input_ids = self.input_ids[::-1].copy()
        else:
            self.loss_mask = ~self.loss_mask


def test_lossless_and_raw_may_be_mixed_and_rejected_samples_are_not_missed(ctx: Context) -> None:
    ctx.ledger("extract").set_aside(record_of(ctx, "00002"), "test")
    extract(ctx, codec="lossless", reject=1)
    assert record_of(ctx, "00002").counts["rejected"] == 1
    ctx.recipe = ctx.recipe.model_copy(update={"allow_rejected": 0.5})
    assert proof.verify(ctx, deep=True).damage == []
    edit(ctx, "00002", "extract", lambda data: data["info"].update(rejected=[]))
    report = proof.verify(ctx, deep=True)
    assert found(report) == ONE and "not in the shard" in report.damage[0].what
