"""Records of the wrong unit, files that nobody may read, and what is no file at all."""

from __future__ import annotations

import builtins
import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1])]
from looks import UNITS, edit, file, found, marks  # noqa: E402

import hidden_run  # noqa: E402
from hidden_run import extract  # noqa: E402
from kimi_eagle import housekeeping, proof  # noqa: E402
from kimi_eagle.cli import main  # noqa: E402
from kimi_eagle.record import RIGHTS  # noqa: E402
from kimi_eagle.stages.context import Context, GateShut  # noqa: E402
from kimi_eagle.survey import explain  # noqa: E402
from kimi_eagle.worker import Worker  # noqa: E402

# -- records that are none -------------------------------------------------------------------------


def _record(ctx: Context, unit: str, stage: str = "extract") -> Path:
    (path,) = ctx.run.stage(stage).records.glob(f"{unit}.*.json")
    return path


def _copied(ctx: Context) -> None:
    shutil.copy(_record(ctx, "00003"), _record(ctx, "00002"))


def _other_key(ctx: Context) -> None:
    edit(ctx, "00002", "extract", lambda data: data.update(key="0" * 16))


def _null_files(ctx: Context) -> None:
    _record(ctx, "00002").write_text('{"files": null, "state": "done"}')


def _no_sizes(ctx: Context) -> None:
    edit(ctx, "00002", "extract", lambda data: data["files"][0].pop("bytes"))


def _nested(ctx: Context) -> None:
    _record(ctx, "00002").write_text("[" * 100_000)


def _folder(ctx: Context) -> None:
    path = _record(ctx, "00002")
    path.unlink()
    path.mkdir()


def _loop(ctx: Context) -> None:
    path = _record(ctx, "00002")
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    "spoil", [_copied, _other_key, _null_files, _no_sizes, _nested, _folder, _loop]
)
def test_a_record_that_is_none_is_told_shuts_the_gate_and_is_set_aside(
    ctx: Context, spoil: Callable
) -> None:
    spoil(ctx)
    for deep in (False, True):
        report = proof.verify(ctx, deep=deep)
        assert found(report) == {("extract", "00002")} and marks(ctx) == []
        assert report.damage[0].what.startswith("not a record")
    with pytest.raises(GateShut, match="not a record.*retry"):
        ctx.gate("extract")
    done = CliRunner().invoke(main, ["status", str(ctx.run.path)])
    assert done.exit_code == 0, done.output
    assert housekeeping.retry(ctx)["extract"] == 1
    assert [e.get("changes") for e in explain(ctx) if e["stage"] == "extract"] == [
        {"set aside: damaged": 1}
    ]
    assert extract(ctx) == ["00002"]
    assert [r.unit for r in ctx.gate("extract")] == list(UNITS)
    assert proof.verify(ctx, deep=True).damage == []


def test_a_cut_record_of_prepare_is_damage_of_its_unit(ctx: Context) -> None:
    path = _record(ctx, "all", "prepare")
    path.write_text(path.read_text()[:100])
    for stage in (None, "extract", "prepare"):
        report = proof.verify(ctx, deep=True, stage=stage)
        assert found(report) == (set() if stage == "extract" else {("prepare", "all")})
    assert f"fix: kimi-eagle retry {ctx.run.path}" in (
        CliRunner().invoke(main, ["verify", str(ctx.run.path), "--deep"]).output.splitlines()
    )
    assert housekeeping.retry(ctx)["prepare"] == 1
    with Worker(ctx.run.stage("prepare")) as worker:
        hidden_run.module("prepare").work(ctx, worker)
    assert proof.verify(ctx, deep=True).damage == []


# -- files that cannot be looked at ----------------------------------------------------------------


def _link_loop(path: Path) -> None:
    path.symlink_to(path.name)


def _folder_there(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [_link_loop, _folder_there, os.mkfifo])
@pytest.mark.parametrize("end", [".safetensors", ".index.parquet"])
def test_what_is_no_file_is_damage_of_one_unit(ctx: Context, make: Callable, end: str) -> None:
    path = file(ctx, "00002", end)
    path.unlink()
    make(path)
    for deep in (True, False):
        assert found(proof.verify(ctx, deep=deep)) == {("extract", "00002")}
    assert len(marks(ctx)) == 1
    ctx.reading = ("extract",)
    with pytest.raises(GateShut, match="00002"):
        ctx.gate("extract")
    ctx.reading = ()
    assert housekeeping.retry(ctx)["extract"] == 1
    assert extract(ctx) == ["00002"] and proof.verify(ctx, deep=True).damage == []


@pytest.mark.parametrize("size", [0, 4096])
def test_a_pipe_in_place_of_an_empty_file_is_not_opened(ctx: Context, size: int) -> None:
    path = file(ctx, "00002", ".index.parquet")
    path.unlink()
    os.mkfifo(path)
    entry = {"name": path.name, "bytes": size, "xxh3": "0" * 32}
    edit(ctx, "00002", "extract", lambda data: data["files"].__setitem__(1, entry))
    report = proof.verify(ctx, deep=True)
    assert [d.what for d in report.damage] == ["not a regular file"]


def _denied(monkeypatch: pytest.MonkeyPatch, path: Path, number: int, *, stat: bool) -> None:
    """Whoever opens the file (or asks for its size) is told the error of this number."""

    def wrap(call: Callable) -> Callable:
        def wrapped(name: object, *args: object, **kwargs: object) -> object:
            if str(name) == str(path):
                raise OSError(number, os.strerror(number), str(path))
            return call(name, *args, **kwargs)

        return wrapped

    if stat:
        monkeypatch.setattr(os, "stat", wrap(os.stat))
    monkeypatch.setattr(builtins, "open", wrap(open))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ESTALE])
@pytest.mark.parametrize("stat", [False, True])
@pytest.mark.parametrize("end", [".safetensors", ".index.parquet"])
def test_a_file_that_nobody_may_read_is_not_damaged(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, number: int, stat: bool, end: str
) -> None:
    path, text = file(ctx, "00002", end), f"cannot be read ({os.strerror(number)})"
    with monkeypatch.context() as patch:
        _denied(patch, path, number, stat=stat)
        for deep in (False, True):
            report = proof.verify(ctx, deep=deep)
            assert report.damage == [] and marks(ctx) == []
            assert [(d.unit, d.file, d.what) for d in report.unread] == [("00002", path.name, text)]
            assert [r.unread for r in report.rows if r.stage == "extract"] == [1]
        done = CliRunner().invoke(main, ["verify", str(ctx.run.path), "--json"])
        assert done.exit_code == 1 and not json.loads(done.stdout)["ok"]
        done = CliRunner().invoke(main, ["verify", str(ctx.run.path)])
        assert done.exit_code == 1 and text in done.output
        assert [x for x in done.output.splitlines() if x.startswith("fix")] == [f"fix: {RIGHTS}"]
        again = housekeeping.retry(ctx)
        if stat:
            assert list(again) == ["warnings"] and text in again["warnings"][0]
            ctx.reading = ("extract",)
            with pytest.raises(GateShut, match="give the rights"):
                ctx.gate("extract")
        else:
            assert again == {}
    report = proof.verify(ctx, deep=True)
    assert report.ok and report.rows[2].ok == len(UNITS)


def test_an_io_error_of_one_file_is_damage_and_of_its_folder_is_not(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file(ctx, "00002")
    _denied(monkeypatch, path, errno.EIO, stat=True)
    listdir = os.listdir

    def ill(folder: object = ".") -> list[str]:
        if str(folder) == str(path.parent):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return listdir(folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", ill)
        assert [x for x in ctx.ledger("extract").records(ctx.plan("extract")) if x.files_whole()]
        assert "extract" not in housekeeping.retry(ctx)
    assert found(proof.verify(ctx)) == {("extract", "00002")} and len(marks(ctx)) == 1
    assert housekeeping.retry(ctx)["extract"] == 1


@pytest.mark.parametrize(
    ("content", "damaged"),
    [("0" * 32, False), ("content/9:" + "0" * 32, False), ("content/1:" + "0" * 32, True)],
)
def test_content_is_compared_where_its_meaning_is_known(
    ctx: Context, content: str, damaged: bool
) -> None:
    edit(ctx, "00002", "extract", lambda data: data["info"].update(content=content))
    assert bool(proof.verify(ctx, deep=True).damage) == damaged
