"""`verify` finds every kind of damage by name and calls nothing else damaged; `retry` mends it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))
import hidden_run  # noqa: E402
from hidden_run import copied, extract, flip, record_of  # noqa: E402
from kimi_eagle import files, housekeeping, proof  # noqa: E402
from kimi_eagle.cli import main  # noqa: E402
from kimi_eagle.data import samples  # noqa: E402
from kimi_eagle.proof import Report  # noqa: E402
from kimi_eagle.recipe import STAGES  # noqa: E402
from kimi_eagle.shards import Shard  # noqa: E402
from kimi_eagle.stages.context import Context, GateShut, open_context  # noqa: E402
from kimi_eagle.survey import explain, survey  # noqa: E402
from kimi_eagle.worker import Worker  # noqa: E402

UNITS = ("00000", "00001", "00002", "00003", "00004", "00005")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, verifier_dir: Path) -> Path:
    """A whole run. Not to be changed by a test."""
    return hidden_run.whole_run(tmp_path_factory.mktemp("verify"))


@pytest.fixture(scope="module")
def original(finished: Path) -> Context:
    return open_context(finished)


@pytest.fixture
def ctx(original: Context, tmp_path: Path) -> Context:
    """A copy, to be spoilt."""
    return copied(original, tmp_path / "run")


def file(ctx: Context, unit: str, end: str = ".safetensors", stage: str = "extract") -> Path:
    return record_of(ctx, unit, stage).path(end)


def tokens_part(ctx: Context, unit: str) -> list[samples.Sample]:
    return samples.read_samples(file(ctx, "all", f".{unit}.tokens.parquet", "prepare"))


def found(report: Report) -> set[tuple[str, str]]:
    return {(d.stage, d.unit) for d in report.damage}


def marks(ctx: Context) -> list[str]:
    return sorted(str(p.relative_to(ctx.run.path)) for p in ctx.run.path.glob("*/damaged/*"))


def names(ctx: Context, unit: str) -> list[str]:
    return Shard(file(ctx, unit)).sample_ids


def edit(ctx: Context, unit: str, stage: str, change: Callable[[dict], None]) -> None:
    """Rewrite a record, as somebody with an editor would."""
    path = ctx.run.stage(stage).records
    (path,) = path.glob(f"{unit}.*.json")
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def swap(one: Path, other: Path) -> None:
    third = one.with_name("third")
    one.rename(third)
    other.rename(one)
    third.rename(other)


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


def _no_json(ctx: Context) -> None:
    (path,) = ctx.run.stage("extract").records.glob("00002.*.json")
    path.write_text(path.read_text()[:100])


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
        (_no_json, ONE, "not a record"),
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
    broken = spoil is _no_json  # shuts the gate and is opened by retry as it is
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
    _no_json(ctx)
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
