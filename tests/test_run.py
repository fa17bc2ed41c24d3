"""`kimi-eagle run` on the tiny recipe, real parts throughout: results, resume, changed recipes.

The run of the fixture is the reference; every other run of this file must give the same bytes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kimi_eagle import files
from kimi_eagle.recipe import STAGES
from kimi_eagle.rundir import open_run
from kimi_eagle.stages.context import Context
from kimi_eagle.survey import survey

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "tests/recipes/tiny.toml"


@pytest.fixture(scope="module")
def reference(tmp_path_factory, verifier_dir, eagle) -> Path:
    """A finished run that nobody disturbed."""
    path = tmp_path_factory.mktemp("runs") / "tiny"
    done = eagle("run", TINY, "--run", path)
    assert done.returncode == 0, done.stderr + done.stdout
    return path


def contents(run: Path, *stages: str) -> dict[str, str]:
    """Digest of the bytes of every recorded file, by stage, unit and kind (attempts left out)."""
    found = {}
    for stage in stages:
        for path in (run / stage / "records").glob("*.json"):
            record = json.loads(path.read_text())
            for entry in record["files"]:
                kind = entry["name"].split(".", 2)[2]
                file = run / stage / "files" / entry["name"]
                found[f"{stage}/{record['unit']}/{kind}"] = files.file_digest(file)
    return found


def leftovers(run: Path) -> list[str]:
    """Data files that no record names and that do not carry a temporary name."""
    named = set()
    for path in run.glob("*/records/*.json"):
        stage, record = path.parent.parent.name, json.loads(path.read_text())
        named |= {f"{stage}/{f['name'].split('/')[0]}" for f in record["files"]}
    every = {f"{p.parent.parent.name}/{p.name}" for p in run.glob("*/files/*")}
    return sorted(x for x in every - named if files.TEMPORARY not in x and "/work-" not in x)


def test_all_stages_are_done_and_the_results_are_there(reference: Path) -> None:
    run = open_run(reference)
    states = survey(Context(run, run.recipe()))
    assert {s.name: s.state for s in states} == dict.fromkeys(STAGES, "done")
    by_name = {s.name: s for s in states}
    assert len(by_name["regenerate"].units) >= 8 and len(by_name["extract"].units) >= 8
    results = json.loads((reference / "bench/results.json").read_text())
    assert set(results) >= {
        "acceptance_length",
        "acceptance_per_position",
        "identical_outputs",
        "tokens_per_second",
        "k",
    }
    assert results["k"] == 2 and len(results["acceptance_per_position"]) == 2
    assert 1.0 <= results["acceptance_length"] <= 3.0
    assert results["identical_outputs"] is True
    assert min(results["tokens_per_second"].values()) > 0
    assert {p.name for p in (reference / "draft").iterdir()} >= {"config.json", "model.safetensors"}
    assert "<svg" in (reference / "report.html").read_text()
    assert leftovers(reference) == []


def test_answers_are_what_the_engine_made_and_the_mask_covers_them(reference: Path) -> None:
    from kimi_eagle.data.answers import read_answers
    from kimi_eagle.data.samples import read_samples

    units = (reference / "regenerate/files").glob("*.parquet")
    answers = [answer for path in units for answer in read_answers(path)]
    made = {
        tuple(a["turns"][0]["prompt_ids"] + a["turns"][0]["answer_ids"]): a["turns"][0]
        for a in answers
        if len(a["turns"]) == 1
    }
    parts = sorted((reference / "prepare/files").glob("*.parquet"))
    samples = [s for p in parts for s in read_samples(p)]
    assert len(samples) == 24
    for sample in samples:
        turn = made[tuple(sample.input_ids.tolist())]
        assert sample.loss_mask.sum() == len(turn["answer_ids"])
        assert sample.loss_mask[len(turn["prompt_ids"]) :].all()
        assert not sample.loss_mask[: len(turn["prompt_ids"])].any()


def test_a_finished_run_is_left_as_it_is(reference: Path, eagle) -> None:
    before = {p: p.stat().st_mtime_ns for p in reference.glob("*/records/*")}
    done = eagle("run", TINY, "--run", reference, "--json")
    assert done.returncode == 0, done.stderr
    assert {p: p.stat().st_mtime_ns for p in reference.glob("*/records/*")} == before
    shown = json.loads(done.stdout)
    assert [s["state"] for s in shown["stages"]] == ["done"] * 6
    assert shown["result"]["identical_outputs"] is True


def test_every_byte_of_a_finished_run_is_proven(reference: Path, eagle) -> None:
    done = eagle("verify", reference, "--deep", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    shown = json.loads(done.stdout)
    assert [s["stage"] for s in shown["stages"]] == [*STAGES, "draft"]
    assert all(s["ok"] == s["units"] > 0 for s in shown["stages"])
    assert shown["deep"] and shown["damage"] == []
    assert shown["strays"] <= 2  # working folders of train and benchmark, which `gc` removes


def edited(path: Path, **changes: str) -> Path:
    """The tiny recipe with lines replaced, its relative paths made absolute."""
    text = TINY.read_text().replace("../../", f"{ROOT}/")
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("change", "redone", "reason"),
    [
        (("vocab_size = 1024", "vocab_size = 512"), ["vocab"], "vocab.draft_vocab_size"),
        (("layers = [2, 15, 27, 30]", "layers = [2, 15, 26, 30]"), ["extract"], "layers"),
        (("lr = 2e-3", "lr = 1e-3"), ["train"], "train.lr"),
        (("max_tokens = 24", "max_tokens = 16"), ["benchmark"], "workload"),
        (("max_length = 128", "max_length = 96"), ["prepare"], "prepare.max_length"),
        (("max_tokens = 48", "max_tokens = 40"), ["regenerate"], "sampling.max_tokens"),
        (("seed = 7", "seed = 8"), ["regenerate"], "conversations"),
        (("limit = 4", "limit = 4 # a comment"), [], ""),
    ],
    ids=lambda x: x[1] if isinstance(x, tuple) else "",
)
def test_a_changed_recipe_redoes_what_depends_on_it_and_says_why(
    reference: Path, tmp_path: Path, eagle, change, redone: list[str], reason: str
) -> None:
    recipe = edited(tmp_path / "tiny.toml", one=change)
    done = eagle("explain", reference, "--recipe", recipe, "--json")
    assert done.returncode == 0, done.stderr
    found = {e["stage"]: e for e in json.loads(done.stdout)}
    assert [s for s in STAGES if found[s]["state"] == "open"] == redone
    for stage in redone:
        assert any(reason in text for text in found[stage]["changes"]), found[stage]["changes"]
    after = STAGES.index(redone[0]) if redone else len(STAGES)
    for stage in STAGES[:after]:
        assert found[stage]["state"] == "done"
    if redone == ["vocab"]:
        assert found["train"]["state"] == "waiting"


def start(run: Path, *args: str) -> subprocess.Popen[bytes]:
    """The front process in a session of its own, so that the whole tree can be killed."""
    return subprocess.Popen(
        [sys.executable, "-m", "kimi_eagle", "run", str(TINY), "--run", str(run), *args],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def kill_session(front: subprocess.Popen[bytes]) -> None:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == front.pid:  # its session
            os.kill(int(path.parent.name), signal.SIGKILL)
    front.wait()


@pytest.mark.campaign
def test_sigkill_at_random_moments_changes_no_byte(reference: Path, tmp_path: Path, eagle) -> None:
    run, dice = tmp_path / "killed", random.Random(2026)
    for kill in range(5):
        front = start(run, "--until", "vocab")
        time.sleep(dice.uniform(4, 30))
        if kill % 2:
            front.kill()  # the front alone: the stage lives on, the next `run` attaches to it
            front.wait()
        else:
            kill_session(front)
    done = eagle("run", TINY, "--run", run, "--until", "vocab")
    assert done.returncode == 0, done.stderr + done.stdout
    stages = ("regenerate", "prepare", "extract", "vocab")
    assert contents(run, *stages) == contents(reference, *stages)


@pytest.mark.campaign
def test_run_attaches_to_a_live_stage_and_two_runs_never_double_it(
    reference: Path, tmp_path: Path, eagle
) -> None:
    run = tmp_path / "attached"
    front = start(run, "--until", "regenerate")
    deadline = time.monotonic() + 120
    while not list(run.glob("regenerate/workers/*.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    front.kill()
    front.wait()
    second = start(run, "--until", "regenerate")
    done = eagle("run", TINY, "--run", run, "--until", "regenerate")
    assert done.returncode == 0, done.stderr
    assert second.wait(timeout=120) == 0
    assert len(list(run.glob("regenerate/workers/*.json"))) == 1
    assert contents(run, "regenerate") == contents(reference, "regenerate")


@pytest.mark.campaign
def test_training_goes_on_after_sigkill(reference: Path, tmp_path: Path, eagle) -> None:
    run = tmp_path / "train"
    shutil.copytree(reference, run, symlinks=True)
    for stage in ("train", "benchmark"):
        shutil.rmtree(run / stage)
    front = start(run, "--until", "train")
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if list(run.glob("train/files/work-*/checkpoints/0/training_state.json")):
            break
        time.sleep(0.05)
    kill_session(front)
    assert list(run.glob("train/files/work-*/checkpoints/0"))
    done = eagle("run", TINY, "--run", run, "--until", "train")
    assert done.returncode == 0, done.stderr + done.stdout
    (record,) = [json.loads(p.read_text()) for p in run.glob("train/records/*.json")]
    assert record["counts"]["steps"] == 20 and record["attempt"] == 2


def test_gc_removes_what_a_changed_recipe_left_and_clean_frees_the_states(
    reference: Path, tmp_path: Path, eagle
) -> None:
    run = tmp_path / "gc"
    shutil.copytree(reference, run, symlinks=True)
    assert json.loads(eagle("gc", run, "--json").stdout)["removed"] <= 2
    stray = run / "extract/files/00000.a9.safetensors"
    stray.write_bytes(b"half")
    shown = json.loads(eagle("gc", run, "--json", "--dry-run").stdout)
    assert shown["removed"] == 1 and shown["bytes"] == 4 and stray.exists()
    eagle("gc", run)
    assert not stray.exists()
    done = eagle("clean", run, "--hidden")
    assert done.returncode == 0, done.stderr
    assert not list(run.glob("extract/files/*.safetensors"))
    again = eagle("run", TINY, "--run", run, "--json")
    assert again.returncode == 0 and json.loads(again.stdout)["stages"][2]["state"] == "done"


# -- what other recipes, damage and dead machines leave behind -----------------------------------


@pytest.fixture
def copy(reference: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be spoilt."""
    return Path(shutil.copytree(reference, tmp_path / "copy"))


def records(run: Path, stage: str) -> list[Path]:
    return sorted((run / stage / "records").glob("*.json"))


def test_results_of_another_recipe_are_replaced(copy: Path, reference: Path, eagle) -> None:
    for name in ("bench/results.json", "draft/record.json", "rejects.jsonl"):
        (copy / name).write_text('{"acceptance_length": 9}')
    done = eagle("run", TINY, "--run", copy, "--json")
    assert done.returncode == 0, done.stderr
    for name in ("bench/results.json", "draft/record.json", "rejects.jsonl"):
        assert (copy / name).read_bytes() == (reference / name).read_bytes()
    shutil.rmtree(copy / "draft")
    shutil.rmtree(copy / "bench")
    assert eagle("run", TINY, "--run", copy, "--json").returncode == 0
    assert (copy / "draft/model.safetensors").is_file() and (copy / "bench/results.json").is_file()


def test_a_failed_unit_shuts_the_gate_and_retry_opens_it(copy: Path, eagle) -> None:
    path = records(copy, "extract")[0]
    data = {**json.loads(path.read_text()), "state": "failed", "files": [], "counts": {}}
    path.write_text(json.dumps({**data, "info": {"reasons": ["ValueError: no good"] * 3}}))
    path.with_suffix(".failed").touch()
    before = sorted(p.name for p in copy.glob("*/files/*"))
    done = eagle("run", TINY, "--run", copy)
    assert done.returncode == 1 and "no good" in done.stderr and "retry" in done.stderr
    found = {e["stage"]: e for e in json.loads(eagle("explain", copy, "--json").stdout)}
    assert found["train"]["state"] == "failed" and "no good" in found["train"]["reason"]
    assert "failed" in eagle("status", copy).stdout
    eagle("gc", copy)
    gone = set(before) - {p.name for p in copy.glob("*/files/*")}
    assert not any("draft" in name for name in gone), gone
    assert json.loads(eagle("retry", copy, "--json").stdout) == {"extract": 1}
    found = {e["stage"]: e for e in json.loads(eagle("explain", copy, "--json").stdout)}
    assert found["extract"]["open"] == 1


@pytest.mark.campaign
def test_lost_files_are_noticed_before_they_are_read(copy: Path, eagle) -> None:
    for stage in ("vocab", "train", "benchmark"):
        shutil.rmtree(copy / stage)
    next((copy / "prepare/files").glob("*.tokens.parquet")).unlink()
    done = eagle("run", TINY, "--run", copy, "--until", "vocab")
    assert done.returncode == 1 and "missing" in done.stderr and "retry" in done.stderr
    assert eagle("retry", copy).returncode == 0
    assert eagle("run", TINY, "--run", copy, "--until", "vocab").returncode == 0


def test_a_silent_worker_of_another_machine_is_dead_after_three_beats(copy: Path, eagle) -> None:
    path = next((copy / "extract/workers").glob("*.json"))
    worker = json.loads(path.read_text())
    worker.pop("ended")
    path.write_text(json.dumps({**worker, "host": "elsewhere", "beat_seconds": 0.2, "recipe": ""}))
    records(copy, "extract")[-1].rename(copy / "extract/aside")
    done = eagle("gc", copy, "--dry-run", env={"KIMI_EAGLE_BEAT_SECONDS": "0.2"}, timeout=60)
    assert done.returncode == 0, done.stderr


def test_another_recipe_does_not_take_over_a_live_run(copy: Path, tmp_path: Path, eagle) -> None:
    other = edited(tmp_path / "other.toml", one=("limit = 24", "limit = 23"))
    spec = (copy / "run.json").read_bytes()
    shutil.rmtree(copy / "benchmark")
    front = start(copy)
    deadline = time.monotonic() + 60
    while not (copy / "driver.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        done = eagle("run", other, "--run", copy)
        assert done.returncode == 1 and "another recipe" in done.stderr
        assert (copy / "run.json").read_bytes() == spec
    finally:
        kill_session(front)
    bad = edited(tmp_path / "bad.toml", one=("27, 30]", "27, 29]"))
    assert eagle("run", bad, "--run", copy).returncode == 2
    assert (copy / "run.json").read_bytes() == spec
