"""Damage that was found is marked, kept from readers and mended by `retry`, and nothing else is."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1])]
from looks import UNITS, file, marks, no_json  # noqa: E402

import hidden_run  # noqa: E402
from hidden_run import extract, flip, record_of  # noqa: E402
from kimi_eagle import housekeeping, proof  # noqa: E402
from kimi_eagle.cli import main  # noqa: E402
from kimi_eagle.stages.context import Context, GateShut  # noqa: E402
from kimi_eagle.survey import explain, survey  # noqa: E402
from kimi_eagle.worker import Worker  # noqa: E402

# -- marks and retry -------------------------------------------------------------------------------


def test_retry_opens_only_what_is_damaged_and_the_same_bytes_come_back(
    ctx: Context, finished: Path
) -> None:
    flip(file(ctx, "00001"), 5000)
    flip(file(ctx, "00004"), -1)
    proof.verify(ctx, deep=True)
    done = CliRunner().invoke(main, ["retry", str(ctx.run.path)])
    assert done.exit_code == 0 and "2 units open again" in done.output
    assert "warning: train, benchmark stay done" in done.output
    assert marks(ctx) == []
    found = {s.name: s for s in survey(ctx)}
    assert [u.name for u in found["extract"].open_units] == ["00001", "00004"]
    why = {e["stage"]: e for e in explain(ctx)}
    assert why["extract"]["changes"] == {"set aside: damaged": 2}
    assert extract(ctx) == ["00001", "00004"]
    assert proof.verify(ctx, deep=True).damage == []
    assert {s.state for s in survey(ctx)} == {"skipped", "done"}
    for unit in UNITS:
        old = next((finished / "extract/files").glob(f"{unit}.a1.safetensors"))
        assert file(ctx, unit).read_bytes() == old.read_bytes()
    assert file(ctx, "00001").name == "00001.a2.safetensors"
    assert housekeeping.retry(ctx) == {}


def test_marks_of_earlier_attempts_mean_nothing(ctx: Context) -> None:
    ledger, old = ctx.ledger("extract"), record_of(ctx, "00001")
    ledger.set_aside(old, "test")
    extract(ctx)
    ledger.mark_damaged(old, ["it was"], ["x"])
    assert len(marks(ctx)) == 1
    assert ledger.damage(record_of(ctx, "00001")) is None
    assert proof.verify(ctx).damage == []
    ctx.reading = ("extract",)
    assert len(ctx.gate("extract")) == len(UNITS)
    assert housekeeping.retry(ctx) == {} and marks(ctx) == []


def test_gc_keeps_live_marks_alone(ctx: Context) -> None:
    ledger, old = ctx.ledger("extract"), record_of(ctx, "00001")
    ledger.set_aside(old, "test")
    extract(ctx)
    ledger.mark_damaged(old, ["it was"], [])
    ledger.mark_damaged(record_of(ctx, "00002"), ["it is"], [])
    (ctx.run.stage("extract").damaged / "00003.0123456789abcdef.json").write_text("{}")
    housekeeping.gc(ctx, dry_run=False)
    assert [Path(m).name[:5] for m in marks(ctx)] == ["00002"]


def test_a_mark_shuts_the_gate_of_a_reader_until_the_unit_is_whole(ctx: Context) -> None:
    ledger = ctx.ledger("extract")
    for sample in ("a", "b", "a"):  # as training meets them
        ledger.mark_damaged(record_of(ctx, "00001"), [f"sample {sample}: wrong"], [sample])
    mark = ledger.damage(record_of(ctx, "00001"))
    assert (mark["samples"], len(mark["reasons"])) == (["a", "b"], 2)
    assert len(ctx.gate("extract")) == len(UNITS)  # nobody reads
    ctx.reading = ("extract", "vocab")
    with pytest.raises(GateShut, match="unit 00001 is damaged: sample a: wrong and 1 more.*retry"):
        ctx.gate("extract")
    recipe = ctx.recipe
    skip = recipe.train.model_copy(update={"on_damage": "skip"})
    ctx.recipe = recipe.model_copy(update={"train": skip})
    assert len(ctx.gate("extract")) == len(UNITS)
    ctx.recipe, ctx.reading = recipe, ()
    report = proof.verify(ctx)
    assert [d.what for d in report.damage] == [f"marked: sample {x}: wrong" for x in "ab"]
    report = proof.verify(ctx, deep=True)  # every byte is right after all
    assert report.damage == [] and report.whole_again == ["extract 00001"] and marks(ctx) == []


def test_a_record_that_is_none_shuts_the_gate_and_retry_opens_it(ctx: Context) -> None:
    no_json(ctx)
    with pytest.raises(GateShut, match="not a record.*retry"):
        ctx.gate("extract")
    found = housekeeping.retry(ctx)
    assert found["extract"] == 1
    assert extract(ctx) == ["00002"]
    assert proof.verify(ctx, deep=True).damage == []


def test_damage_upstream_is_mended_without_doing_the_rest_again(ctx: Context) -> None:
    flip(file(ctx, "all", ".00002.tokens.parquet", "prepare"), 300)
    proof.verify(ctx, deep=True)
    ctx.reading = ("prepare",)
    with pytest.raises(GateShut, match="prepare unit all is damaged"):
        ctx.gate("prepare")
    ctx.reading = ()
    found = housekeeping.retry(ctx)
    assert found["prepare"] == 1 and "extract, vocab, train" in found["warnings"][0]
    with Worker(ctx.run.stage("prepare")) as worker:
        hidden_run.module("prepare").work(ctx, worker)
    assert {s.state for s in survey(ctx)} == {"skipped", "done"}
    assert proof.verify(ctx, deep=True).damage == []


def test_status_says_how_many_units_are_damaged(ctx: Context) -> None:
    flip(file(ctx, "00001"), 5000)
    proof.verify(ctx, deep=True)
    done = CliRunner().invoke(main, ["status", str(ctx.run.path)])
    (line,) = [x for x in done.output.splitlines() if x.strip().startswith("extract")]
    assert "1 damaged" in line
    shutil.rmtree(ctx.run.stage("extract").damaged)
    assert "damaged" not in CliRunner().invoke(main, ["status", str(ctx.run.path)]).output
