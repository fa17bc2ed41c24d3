"""A run whose training meets damaged samples: marks, what `retry` opens, what the record says."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hidden_run import extract, flip, started  # noqa: E402
from kimi_eagle import display, housekeeping, summary  # noqa: E402
from kimi_eagle.errors import RunError  # noqa: E402
from kimi_eagle.ledger import Record  # noqa: E402
from kimi_eagle.shards import ShardSet  # noqa: E402
from kimi_eagle.stages import train  # noqa: E402
from kimi_eagle.stages.context import Context, recipe_digest  # noqa: E402
from kimi_eagle.worker import Worker  # noqa: E402


@pytest.fixture
def ctx(tmp_path) -> Context:
    """A run whose states are there; training is three steps, one epoch."""
    found = started(tmp_path)
    extract(found)
    return following(found, epochs=1, max_steps=3, seq_len=256, ttt_steps=1)


def following(ctx: Context, **changes) -> Context:
    """The same run under another `[train]`."""
    section = ctx.recipe.train.model_copy(update=changes)
    recipe = ctx.recipe.model_copy(update={"train": section})
    return Context(ctx.run, recipe, reading=("extract",))  # as a worker of train has it


def work(ctx: Context) -> Record:
    with Worker(ctx.run.stage("train"), recipe_digest=recipe_digest(ctx.recipe)) as worker:
        train.work(ctx, worker)
    (record,) = ctx.gate("train")
    return record


def spoil(ctx: Context) -> tuple[Record, str]:
    """Flip a bit in the states of the first sample of the second unit -> its record and the id."""
    record = ctx.ledger("extract").records(ctx.plan("extract"))[1]
    path = record.path(".safetensors")
    store = ShardSet([path])
    states = store.at(0)["hidden_states"].tobytes()
    flip(path, path.read_bytes().index(states) + 1000, bit=3)
    return record, store.ids[0]


def marked(ctx: Context) -> dict[str, list[str]]:
    """Unit -> marked samples, of all units of extract."""
    ledger = ctx.ledger("extract")
    found = ledger.damaged(ledger.records(ctx.plan("extract")))
    return {record.unit: mark["samples"] for record, mark in found}


def test_stopped_retried_and_finished(ctx):
    record, sample = spoil(ctx)
    with pytest.raises(RunError) as caught:
        work(ctx)
    assert caught.value.where == f"{record.path('.safetensors').name}, sample {sample}"
    assert f"kimi-eagle retry {ctx.run.path}" in caught.value.fix
    assert marked(ctx) == {record.unit: [sample]}
    with pytest.raises(RunError, match=f"unit {record.unit} is damaged"):
        work(ctx)  # not begun again before somebody mends it

    assert housekeeping.retry(ctx)["extract"] == 1
    assert extract(ctx) == [record.unit] and marked(ctx) == {}
    assert "skipped_samples" not in work(ctx).info
    assert marked(ctx) == {}, "what was mended is not marked for what the log still says"


def test_skipped_and_said(ctx):
    record, sample = spoil(ctx)
    skipping = following(ctx, on_damage="skip")
    (stop, skip) = (train.plan(c)[0].key for c in (ctx, skipping))
    assert stop == skip, "the answer to damage opens no finished training"
    assert train.plan(following(ctx, shuffle_shards=2))[0].key != stop
    assert work(skipping).info["skipped_samples"] == [sample]
    assert marked(ctx) == {record.unit: [sample]}
    row = next(r for r in summary.stage_rows(skipping) if r["stage"] == "train")
    assert row["state"] == "done" and row["warning"].startswith("1 damaged sample left out")
    text = io.StringIO()
    Console(file=text, width=200).print(display.table(summary.stage_rows(skipping)))
    assert "warning: train: 1 damaged sample" in text.getvalue()
    summary.write_report(skipping)
    assert "train: 1 damaged sample left out" in ctx.run.report.read_text()


def test_a_damaged_index_is_marked(ctx):
    record = ctx.ledger("extract").records(ctx.plan("extract"))[0]
    flip(record.path(".index.parquet"), 200)
    with pytest.raises(RunError) as caught:
        work(ctx)
    assert "index" in caught.value.line() and "kimi-eagle retry" in caught.value.fix
    assert marked(ctx) == {record.unit: []}
