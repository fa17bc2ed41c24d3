"""`kimi-eagle report` as it is typed, of several runs; tests/test_run.py has that of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_results import made_results

from kimi_eagle import recipe, summary
from kimi_eagle.ledger import Unit
from kimi_eagle.report.page import EARLIER, ReportData, render
from kimi_eagle.rundir import RunDir, create_run, follow
from kimi_eagle.stages import benchmark
from kimi_eagle.stages.context import Context
from kimi_eagle.survey import StageState

Eagle = Callable[..., Any]


@pytest.fixture
def runs(root: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of one name in two places; nothing has run, one was benchmarked all the same."""
    found = []
    for place, results in (("a", made_results()), ("b", None)):
        run = create_run(tmp_path / place / "tiny")
        file = root / "tests" / "recipes" / "tiny.toml"
        follow(run, recipe.load(file), file)
        if results:
            run.bench.mkdir()
            (run.bench / "results.json").write_text(json.dumps(results))
        found.append(run.path)
    return found[0], found[1]


def test_several_runs_make_one_page(eagle: Eagle, runs: tuple[Path, Path], tmp_path: Path) -> None:
    done = eagle("report", *runs, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = tmp_path / "runs-compared.html"
    assert done.stdout.strip() == str(page)
    html = page.read_text()
    assert "2 runs compared" in html and ">a/tiny<" in html and ">b/tiny<" in html
    assert f"{made_results()['acceptance_length']:.3f}" in html


def test_figures_of_an_earlier_benchmark_are_told_as_such(runs: tuple[Path, Path]) -> None:
    summary.write_report(Context(RunDir(runs[0]), RunDir(runs[0]).recipe()))
    assert EARLIER in (runs[0] / "report.html").read_text()
    assert EARLIER not in render(ReportData("x", results=made_results()), runs[0])
    assert EARLIER not in render(ReportData("x", earlier=True), runs[0])  # no figures at all


def test_a_report_of_an_earlier_benchmark_is_written_again_when_it_is_the_current(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, written = RunDir(runs[0]), []
    record = SimpleNamespace(path=lambda _: run.bench / "results.json")
    ctx = SimpleNamespace(run=run, gate=lambda _: [record])
    monkeypatch.setattr(summary, "write_report", written.append)
    for text, times in ((EARLIER, 1), ("as it should be", 1)):
        run.report.write_text(text)
        benchmark.publish(ctx)
        assert len(written) == times


def test_a_training_under_way_is_shown(runs: tuple[Path, Path]) -> None:
    ctx = Context(RunDir(runs[0]), RunDir(runs[0]).recipe())
    unit = Unit("all", {"x": 1})
    states = [StageState("train", "open", [unit], [unit])]
    found = summary.curves_of(ctx, states)
    assert found == runs[0] / "train" / "files" / f"work-{unit.key}" / "curves.jsonl"
    assert summary.curves_of(ctx, [StageState("train", "waiting")]) is None


def test_out_names_the_page(eagle: Eagle, runs: tuple[Path, Path], tmp_path: Path) -> None:
    done = eagle("report", *runs, "--out", tmp_path / "x.html")
    assert done.returncode == 0 and (tmp_path / "x.html").is_file()
    done = eagle("report", *runs, "--out", tmp_path / "absent" / "x.html")
    assert done.returncode == 2 and "absent/x.html: cannot be written" in done.stderr
    done = eagle("report", runs[0], "--out", tmp_path / "y.html")
    assert done.returncode == 2 and "--out is for several runs" in done.stderr
    done = eagle("report", runs[0], tmp_path)
    assert done.returncode == 2 and "no run here" in done.stderr
    assert len(done.stderr.splitlines()) == 1
