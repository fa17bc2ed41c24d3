"""`verify` of runs that are whole, open, freed, live or read-only, and of what is shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1])]
from looks import UNITS, file, found, marks, names, tokens_part  # noqa: E402

import hidden_run  # noqa: E402
from hidden_run import extract, flip, record_of  # noqa: E402
from kimi_eagle import files, housekeeping, proof  # noqa: E402
from kimi_eagle.cli import main  # noqa: E402
from kimi_eagle.recipe import STAGES  # noqa: E402
from kimi_eagle.stages.context import Context  # noqa: E402
from kimi_eagle.survey import survey  # noqa: E402
from kimi_eagle.worker import Worker  # noqa: E402

# -- a whole run -----------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [False, True])
def test_a_whole_run_is_ok(ctx: Context, deep: bool) -> None:
    report = proof.verify(ctx, deep=deep)
    assert (report.damage, report.strays, report.marked, marks(ctx)) == ([], 0, [], [])
    rows = {r.stage: r for r in report.rows}
    assert list(rows) == [*STAGES, "draft"]
    assert (rows["extract"].units, rows["extract"].ok) == (len(UNITS), len(UNITS))
    sizes = sum(p.stat().st_size for p in ctx.run.stage("extract").files.iterdir())
    assert (rows["extract"].files, rows["extract"].bytes) == (2 * len(UNITS), sizes)
    assert all(r.ok == r.units for r in report.rows)
    json.dumps(report.as_json())


def test_progress_ends_with_all_bytes(ctx: Context) -> None:
    said: list[tuple[int, int]] = []
    report = proof.verify(ctx, deep=True, on_bytes=lambda *x: said.append(x))
    total = sum(r.bytes for r in report.rows if r.stage != "draft")
    assert said[-1] == (total, total) and said == sorted(said) and len(said) > 20


def test_the_command_says_it_in_a_table_and_as_json(ctx: Context) -> None:
    done = CliRunner().invoke(main, ["verify", str(ctx.run.path)])
    assert done.exit_code == 0 and "--deep compares every byte" in done.output
    flip(file(ctx, "00001"), 5000)
    words = ["verify", str(ctx.run.path), "--deep", "--threads", "2"]
    done = CliRunner().invoke(main, words)
    lines = done.output.splitlines()
    assert done.exit_code == 1, done.output
    assert f"fix: kimi-eagle retry {ctx.run.path}" in lines
    (line,) = [x for x in lines if x.startswith("damaged: ")]
    assert all(x in line for x in ("extract", "00001", "safetensors", names(ctx, "00001")[0]))
    done = CliRunner().invoke(main, [*words, "--json"])
    shown = json.loads(done.stdout)
    assert done.exit_code == 1 and not shown["ok"]
    assert shown["damage"][0]["sample_id"] == names(ctx, "00001")[0]
    row = next(s for s in shown["stages"] if s["stage"] == "extract")
    assert (row["damaged"], row["ok"]) == (1, len(UNITS) - 1)
    done = CliRunner().invoke(main, ["verify", str(ctx.run.path), "extrakt"])
    assert done.exit_code == 2 and "expected one of" in done.output
    done = CliRunner().invoke(main, ["verify", str(ctx.run.path), "vocab"])
    assert done.exit_code == 0 and "extract" not in done.output


# -- open, freed, live, read-only ------------------------------------------------------------------


def test_units_in_the_making_are_open_and_a_live_worker_goes_on(ctx: Context) -> None:
    ctx.ledger("extract").set_aside(record_of(ctx, "00001"), "test")
    ctx.ledger("extract").set_aside(record_of(ctx, "00004"), "test")
    for end in ("00001", "00004"):
        for path in ctx.run.stage("extract").files.glob(f"{end}.*"):
            path.unlink()
    units = hidden_run.module("extract").plan(ctx)
    with Worker(ctx.run.stage("extract")) as worker:
        for attempt in worker.attempts(units):
            with attempt:
                attempt.path("safetensors").write_bytes(b"half")
                files.temporary_name(attempt.path("index.parquet")).write_bytes(b"h")
                report = proof.verify(ctx, deep=True)
                row = report.rows[STAGES.index("extract")]
                left = len(ctx.ledger("extract").open_units(units))
                assert (row.open, row.ok, row.damaged) == (left, len(UNITS) - left, 0)
                assert report.damage == [] and report.strays == 0
                with pytest.raises(Exception, match="a worker is alive"):
                    housekeeping.retry(ctx)
                hidden_run.write_states(ctx, attempt)
    for path in ctx.run.stage("extract").files.glob(f"{files.TEMPORARY}*"):
        path.unlink()
    assert proof.verify(ctx, deep=True).damage == []


def test_freed_states_are_not_damaged_but_lost_ones_are(ctx: Context) -> None:
    lost = file(ctx, "00004")
    kept = lost.read_bytes()
    lost.unlink()
    assert found(proof.verify(ctx)) == {("extract", "00004")}
    assert ctx.ledger("extract").damage(record_of(ctx, "00004"))
    lost.write_bytes(kept)
    housekeeping.clean_hidden(ctx)
    assert marks(ctx) == []
    for deep in (False, True):
        report = proof.verify(ctx, deep=deep)
        row = report.rows[STAGES.index("extract")]
        assert (row.freed, row.ok, row.damaged) == (len(UNITS), 0, 0) and not report.damage
    assert housekeeping.retry(ctx) == {}
    assert survey(ctx)[STAGES.index("extract")].state == "done"


def test_states_that_are_freed_meanwhile_are_not_damaged(ctx: Context) -> None:
    def meanwhile(done: int, total: int) -> None:
        if not ctx.run.stage("extract").freed.exists():
            housekeeping.clean_hidden(ctx)

    report = proof.verify(ctx, deep=True, on_bytes=meanwhile)
    row = report.rows[STAGES.index("extract")]
    assert report.damage == [] and marks(ctx) == [] and row.freed + row.ok == len(UNITS)
    assert row.freed > 0


def test_stray_files_are_only_counted(ctx: Context) -> None:
    folder = ctx.run.stage("extract").files
    (folder / "00000.a9.safetensors").write_bytes(b"half")
    files.temporary_name(folder / "00001.a9.safetensors").write_bytes(b"half")
    report = proof.verify(ctx, deep=True)
    assert (report.strays, report.damage) == (2, [])
    assert "2 leftovers that no record names: kimi-eagle gc" in (
        CliRunner().invoke(main, ["verify", str(ctx.run.path)]).output
    )
    assert housekeeping.gc(ctx, dry_run=False)["removed"] >= 2
    assert proof.verify(ctx).strays == 0


def test_a_run_that_cannot_be_written_is_verified_and_nothing_marked(ctx: Context) -> None:
    flip(file(ctx, "00001"), 5000)
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    script = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
    command = ["unshare", "--mount", *user, "sh", "-c", script, "sh", str(ctx.run.path)]
    command += [sys.executable, "-m", "kimi_eagle", "verify", str(ctx.run.path), "--deep"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "cannot be written (Read-only file system)" in done.stdout
    assert "00001" in done.stdout and marks(ctx) == []


def test_a_unit_that_is_set_aside_meanwhile_is_open(ctx: Context) -> None:
    record = record_of(ctx, "00001")
    flip(record.path(".safetensors"), 5000)

    def meanwhile(done: int, total: int) -> None:
        if ctx.ledger("extract").records_of("00001"):
            ctx.ledger("extract").set_aside(record, "test")

    report = proof.verify(ctx, deep=True, on_bytes=meanwhile)
    assert report.damage == [] and report.rows[STAGES.index("extract")].open == 1
    assert marks(ctx) == []


# -- others that read what records say of files ----------------------------------------------------


def test_diff_and_reproduce_compare_states_not_headers(ctx: Context, original: Context) -> None:
    from kimi_eagle.lock import stage_facts

    def results(context: Context) -> dict:
        records = context.ledger("extract").records(context.plan("extract"))
        return stage_facts.results(context.run.stage("extract"), [r.data for r in records])

    same = results(original)
    assert results(ctx) == same
    assert set(same["files"]) == {f"{u}/safetensors" for u in UNITS}
    assert len(set(same["files"].values())) == len(UNITS)  # headers are all equal
    for record in ctx.ledger("extract").records(ctx.plan("extract")):
        ctx.ledger("extract").set_aside(record, "test")
    extract(ctx, codec="lossless")
    assert results(ctx) == same  # another attempt, another codec, the same states
    ctx.ledger("extract").set_aside(record_of(ctx, "00003"), "test")
    extract(ctx, part=tokens_part(ctx, "00003")[::-1])  # other states for each sample
    other = results(ctx)
    assert other["result_digest"] != same["result_digest"]
    assert [k for k, v in other["files"].items() if v != same["files"][k]] == ["00003/safetensors"]
