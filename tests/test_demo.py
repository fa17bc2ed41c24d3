"""The embedded default, whole: what `make demo` promises (README, table of figures)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def demo(tmp_path_factory, verifier_dir, eagle) -> tuple[Path, dict]:
    run = tmp_path_factory.mktemp("runs") / "smollm2"
    done = eagle("run", ROOT / "jobs/smollm2.toml", "--run", run, "--json", timeout=2400)
    assert done.returncode == 0, done.stderr
    return run, json.loads(done.stdout)


def test_acceptance_and_equal_outputs(demo: tuple[Path, dict], capsys) -> None:
    run, shown = demo
    results = json.loads((run / "bench/results.json").read_text())
    with capsys.disabled():
        wall = sum(s["wall"] for s in shown["stages"])
        peak = max(s["peak_gib"] for s in shown["stages"])
        print(
            f"\ndemo: acceptance length {results['acceptance_length']:.3f}, {wall / 60:.1f} min, "
            f"{peak:.1f} GiB, {results['tokens_per_second']}"
        )
    assert results["k"] == 3
    assert results["acceptance_length"] >= 1.5
    assert results["identical_outputs"] is True
    assert results["details"]["dtype"] == "float32"
    assert len(results["details"]["prompts"]) >= 16


def test_memory(demo: tuple[Path, dict]) -> None:
    # The largest process; beside it are the front and, in benchmark, the stage: 0.5 GiB each.
    assert max(s["peak_gib"] for s in demo[1]["stages"]) + 1 <= 8


def test_held_out_prompts_are_held_out() -> None:
    def rows(name: str) -> set[str]:
        lines = (ROOT / "jobs/data" / name).read_text().splitlines()
        return {" ".join(json.dumps(json.loads(x)).lower().split()) for x in lines if x}

    assert not rows("heldout.jsonl") & (rows("prompts.jsonl") | rows("multiturn.jsonl"))
    assert len(rows("heldout.jsonl")) >= 16


def test_the_probe_agrees_and_two_turns_were_answered(demo: tuple[Path, dict]) -> None:
    run, _ = demo
    records = [json.loads(p.read_text()) for p in (run / "extract/records").glob("*.json")]
    assert min(r["info"]["probe"]["agreement"] for r in records) >= 0.97
    from kimi_eagle.data.answers import read_answers

    answers = [a for p in (run / "regenerate/files").glob("*.parquet") for a in read_answers(p)]
    assert any(len(a["turns"]) == 2 for a in answers)
