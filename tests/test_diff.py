"""`kimi-eagle diff`: one changed field is named exactly, with what it did to the results."""
# ruff: noqa: F811 (fixtures that are imported)

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kimi_eagle import files  # noqa: E402
from kimi_eagle.lock import rundiff, runlock  # noqa: E402
from kimi_eagle.rundir import RunDir  # noqa: E402
from locked import (  # noqa: E402, F401
    change,
    cli,
    copy,
    eagle,
    finish,
    origin,
    recipe_file,
    tiny,
)


@pytest.fixture
def other(origin: Path, tiny: RunDir, tmp_path: Path) -> RunDir:
    """A second run, equal to `tiny` but for train.lr and what follows from it."""
    run = copy(origin, tmp_path / "other")
    change(tiny, ("seed = 7", "seed = 7"))
    change(run, ("lr = 2e-3", "lr = 1e-3"))
    finish(tiny, acceptance=1.25, val_loss=3.5, weights=b"one")
    finish(run, acceptance=1.5, val_loss=3.25, weights=b"two")
    return run


def differing(a: object, b: object) -> dict[str, tuple[object, object]]:
    """What counts as different, from --json."""
    done = cli("diff", a, b, "--json")
    assert done.exit_code in (0, 1), done.output
    found = json.loads(done.stdout)
    rows = [r for r in found["rows"] if r["same"] is not True and not r["beside"]]
    assert found["equal"] == (done.exit_code == 0) == (not rows)
    return {r["what"]: (r["a"], r["b"]) for r in rows}


def test_one_field_and_the_change_in_acceptance(tiny: RunDir, other: RunDir) -> None:
    done = cli("diff", tiny.path, other.path)
    assert done.exit_code == 1
    assert [x.split() for x in done.output.splitlines() if "recipe" in x] == [
        ["recipe.train.lr", "0.002", "->", "0.001"]
    ]
    assert re.search(r"benchmark.acceptance_length +1.25 -> 1.5  \(\+0.25\)", done.output)
    found = differing(tiny.path, other.path)
    assert found["train.validation.val_loss"] == (3.5, 3.25)
    assert found["benchmark.acceptance_per_position.1"] == (0.25, 0.5)
    assert "benchmark.identical_outputs" not in found
    upstream = [k for k in found if k.startswith(("regenerate", "prepare", "extract", "vocab"))]
    assert upstream == []
    assert "draft/model.safetensors" in done.output


def test_lock_files_alone_say_the_same(tiny: RunDir, other: RunDir, tmp_path: Path) -> None:
    whole = differing(tiny.path, other.path)
    for run, name in ((tiny, "a.json"), (other, "b.json")):
        runlock.write(run)
        shutil.move(run.lock, tmp_path / name)
        shutil.rmtree(run.path)
    assert differing(tmp_path / "a.json", tmp_path / "b.json") == whole


def test_a_run_equals_its_copy_elsewhere(tiny: RunDir, tmp_path: Path) -> None:
    """The verifier and the prompts lie in other folders, too; tokens per second are others."""
    finish(tiny, acceptance=1.25, val_loss=3.5, weights=b"one")
    again = copy(tiny.path, tmp_path / "again")
    data = files.read_json(again.spec)
    prompts = tmp_path / "moved.jsonl"
    shutil.copy(data["recipe"]["sources"][0]["path"], prompts)
    verifier = tmp_path / "model"
    verifier.symlink_to(data["recipe"]["verifier"]["path"])
    data["recipe"]["sources"][0]["path"] = str(prompts)
    data["recipe"]["verifier"]["path"] = str(verifier)
    again.spec.write_text(json.dumps(data))
    path = next(again.stage("benchmark").files.iterdir())
    path.write_text(path.read_text().replace('"draft": 33.5', '"draft": 20.0'))
    assert differing(tiny.path, again.path) == {}
    done = cli("diff", tiny.path, again.path)
    assert done.exit_code == 0 and "equal in all that counts" in done.output
    assert re.search(r"~ benchmark.tokens_per_second.draft +33.5 -> 20", done.output)
    assert "recipe.train.lr" in cli("diff", tiny.path, again.path, "--all").output


def test_another_source_is_named_by_its_digest(tiny: RunDir, origin: Path, tmp_path: Path) -> None:
    again = copy(origin, tmp_path / "again")
    data = files.read_json(again.spec)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(Path(data["recipe"]["sources"][0]["path"]).read_text() + "\n")
    data["recipe"]["sources"][0]["path"] = str(prompts)
    again.spec.write_text(json.dumps(data))
    found = differing(tiny.path, again.path)
    assert found == {
        "inputs.sources.prompts.path": (
            files.sha256_file(Path(tiny.recipe().sources[0].path)), files.sha256_file(prompts),
        )
    }  # fmt: skip


def test_what_is_not_known_is_not_equal(tiny: RunDir, tmp_path: Path) -> None:
    runlock.write(tiny)
    lock = runlock.read(tiny.path)
    lock["verifier"] = {"id": None, "reason": "gone"}
    lock["inputs"]["benchmark.prompts"] = {"sha256": None, "reason": "not read yet"}
    path = tmp_path / "lock.json"
    path.write_text(json.dumps(lock))
    assert {"verifier.id", "inputs.benchmark.prompts"} <= differing(path, path).keys()
    assert "not read yet" in cli("diff", path, path).output


def test_a_single_other_byte_names_its_unit(tiny: RunDir, origin: Path, tmp_path: Path) -> None:
    again = copy(origin, tmp_path / "again")
    path = next(again.stage("extract").records.glob("00005.*.json"))
    content = files.read_json(path)["info"]["content"]  # what the digests of all samples make
    path.write_text(path.read_text().replace(content, "f" * 32))
    done = cli("diff", tiny.path, again.path)
    assert done.exit_code == 1 and "(1 of 12: 00005)" in done.output
    assert list(differing(tiny.path, again.path)) == ["extract.result_digest"]


def test_how_jobs_are_made_does_not_count(tiny: RunDir, origin: Path, tmp_path: Path) -> None:
    again = copy(origin, tmp_path / "again")
    data = files.read_json(again.spec)
    data["recipe"]["slurm"]["workers"] = 9
    again.spec.write_text(json.dumps(data))
    done = cli("diff", tiny.path, again.path)
    assert done.exit_code == 0 and re.search(r"~ recipe.slurm.workers +4 -> 9", done.output)


def test_wrong_use_is_2(tiny: RunDir, tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{}")
    for other in ("nowhere", tmp_path / "no.json", tmp_path):
        assert cli("diff", tiny.path, other).exit_code == 2


def test_numbers_are_not_truths() -> None:
    same = {(a, b): rundiff._row("x", {"x": a}, {"x": b}, "x").same for a, b in ((1, 1.0), (1, 2))}
    assert same == {(1, 1.0): True, (1, 2): False}
    assert rundiff._row("x", {"x": 1}, {"x": True}, "x").same is False
    assert rundiff._row("x", {"x": None}, {}, "x").same is True


@pytest.mark.campaign
def test_two_real_runs(tmp_path: Path, verifier_dir: Path) -> None:
    """A whole run, and one with another rate: its field, and the acceptance of results.json."""
    one, two = tmp_path / "one", tmp_path / "two"
    recipe = recipe_file(tmp_path / "a.toml")
    eagle("run", recipe, "--run", one)
    shutil.copytree(one, two)
    eagle("run", recipe_file(tmp_path / "b.toml", ("lr = 2e-3", "lr = 1e-3")), "--run", two)
    found = differing(one, two)
    assert [k for k in found if k.startswith("recipe")] == ["recipe.train.lr"]
    results = [files.read_json(run / "bench/results.json") for run in (one, two)]
    lengths = tuple(r["acceptance_length"] for r in results)
    assert lengths[0] != lengths[1] and found["benchmark.acceptance_length"] == lengths
