"""`kimi-eagle reproduce`: what is missing or differs is said before anything is made; then the same
bytes come out.
"""
# ruff: noqa: F811 (fixtures that are imported)

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kimi_eagle import files  # noqa: E402
from kimi_eagle.lock import reproduce as again  # noqa: E402
from kimi_eagle.lock import runlock  # noqa: E402
from kimi_eagle.provenance import provenance  # noqa: E402
from kimi_eagle.recipe import load, parse  # noqa: E402
from kimi_eagle.rundir import RunDir, open_run  # noqa: E402
from locked import ROOT, TINY, cli, digests, eagle, origin, tiny  # noqa: E402, F401

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def lock(tiny: RunDir) -> Path:
    """The run's lock as this very code would have made it, its sources in a place of its own."""
    prompts = tiny.path.parent / "prompts.jsonl"
    shutil.copy(tiny.recipe().sources[0].path, prompts)
    data = files.read_json(tiny.spec)
    data["recipe"]["sources"][0]["path"] = str(prompts)
    tiny.spec.write_text(json.dumps(data))
    runlock.write(tiny)
    here = provenance()

    def of_here(lock: dict[str, Any]) -> None:
        for stage in lock["stages"].values():
            stage.pop("current", None)  # planned before the sources were moved
        names = ("kimi_eagle", "commit", "dirty", "source", "python", "packages", "lock")
        lock["code"]["ran"] = [{k: here[k] for k in names if k in here} | {"units": 26}]
        lock["environment"] = {"packages": here["packages"], "python": [here["python"]]}
        lock["machines"] = [
            {k: here[k] for k in ("cpu", "cpus", "gpus") if k in here} | {"units": 26}
        ]

    edit(tiny.lock, of_here)
    return tiny.lock


def edit(path: Path, change: Edit) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def check(lock: Path, *words: str, code: int = 0) -> dict[str, tuple[str, str]]:
    """what -> (verdict, note) of `reproduce --check`."""
    done = cli("reproduce", lock.parent, "--check", "--json", *words)
    assert done.exit_code == code, done.output
    found = json.loads(done.stdout[: done.stdout.rindex("}") + 1])
    assert bool(found["refused"]) == (code == 1)
    return {c["what"]: (c["verdict"], c["note"]) for c in found["checks"]}


# -- what stands in the way ------------------------------------------------------------------------


def test_the_same_machine_a_moment_later(lock: Path) -> None:
    found = check(lock)
    assert {verdict for verdict, _ in found.values()} == {"ok"}
    assert found.keys() >= {"recipe", "code", "python", "package torch", "verifier", "CPU"}
    assert found.keys() >= {"sources.prompts.path", "benchmark.prompts"}
    table = cli("reproduce", lock.parent, "--check").output
    assert "then" in table and "sources.prompts.path" in table


def test_a_changed_source(lock: Path) -> None:
    prompts = lock.parent.parent / "prompts.jsonl"
    prompts.write_text(prompts.read_text().replace("a", "b", 1))
    verdict, _ = check(lock, code=1)["sources.prompts.path"]
    assert verdict == "differs"
    done = cli("reproduce", lock.parent)
    assert done.exit_code == 1
    assert "sources.prompts.path (differs)" in done.stderr
    assert "--allow sources.prompts.path" in done.stderr
    check(lock, "--allow", "sources.prompts.path")
    assert cli("reproduce", lock.parent, "--check", "--allow", "weather").exit_code == 2
    assert sorted(p.name for p in lock.parent.parent.iterdir()) == ["prompts.jsonl", "tiny"]


def test_everything_that_is_missing_is_listed_at_once(lock: Path, tmp_path: Path) -> None:
    (lock.parent.parent / "prompts.jsonl").unlink()

    def more(data: dict[str, Any]) -> None:
        data["recipe"]["verifier"]["path"] = str(tmp_path / "gone")
        data["environment"]["packages"]["torch"] = "1.0"

    edit(lock, more)
    found = check(lock, code=1)
    # The digest of a recipe holds its paths.
    assert {w for w, (verdict, _) in found.items() if verdict != "ok"} == {
        "recipe", "sources.prompts.path", "verifier", "package torch",
    }  # fmt: skip
    message = cli("reproduce", lock.parent).stderr
    for what in ("sources.prompts.path (missing)", "verifier (missing)", "package torch (differs)"):
        assert what in message
    # What is not there cannot be allowed.
    assert cli("reproduce", lock.parent, "--allow", "sources.prompts.path").exit_code == 2


def test_inputs_that_lie_elsewhere_now(lock: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.jsonl"
    shutil.move(lock.parent.parent / "prompts.jsonl", moved)
    check(lock, code=1)
    assert check(lock, "--at", f"sources.prompts.path={moved}")["sources.prompts.path"][0] == "ok"
    for wrong in ("sources.prompts=x", "nonsense", "verifier.path="):
        assert cli("reproduce", lock.parent, "--check", "--at", wrong).exit_code == 2


def test_another_verifier(lock: Path, verifier_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in verifier_dir.iterdir():
        (model / path.name).symlink_to(path)
    assert check(lock, "--at", f"verifier.path={model}")["verifier"][0] == "ok"
    config = model / "tokenizer_config.json"
    text = config.read_text()
    config.unlink()
    config.write_text(text + " ")
    verdict = check(lock, "--at", f"verifier.path={model}", code=1)["verifier"]
    assert verdict == ("differs", "the tokenizer is another one")


def test_another_cpu_is_a_warning(lock: Path) -> None:
    edit(lock, lambda data: data["machines"][0].update(cpu="Intel 80386", gpus={"NVIDIA H200": 8}))
    found = check(lock)
    assert found["CPU"] == ("warning", "bytes may differ")
    assert found["GPUs"] == ("warning", "bytes may differ")


def other_code(data: dict[str, Any]) -> None:
    data["code"]["ran"][0].update(source="0" * 64, commit="1" * 40)


def two_codes(data: dict[str, Any]) -> None:
    data["code"]["ran"].append(data["code"]["ran"][0] | {"source": "0" * 64, "units": 1})


def old_code(data: dict[str, Any]) -> None:
    data["code"]["ran"] = [{"kimi_eagle": "0.1.0", "commit": "1" * 40 + "+dirty", "units": 26}]


def no_units(data: dict[str, Any]) -> None:
    data["code"]["ran"] = []


def other_python(data: dict[str, Any]) -> None:
    data["environment"]["python"] = ["3.9.2"]


def other_locks(data: dict[str, Any]) -> None:
    data["environment"]["locks"] = ["0" * 64]


def no_input_digest(data: dict[str, Any]) -> None:
    data["inputs"]["benchmark.prompts"] = {"sha256": None, "reason": "not read yet"}


def no_verifier(data: dict[str, Any]) -> None:
    data["verifier"] = {"id": None, "reason": "it was gone"}


def image_unknown(data: dict[str, Any]) -> None:
    data["image"] = {"unknown": "image.json: not whole"}


@pytest.mark.parametrize(
    ("change", "allow"),
    [
        (other_code, "code"),
        (two_codes, "code"),
        (old_code, "code"),
        (no_units, "code"),
        (other_python, "python"),
        (other_locks, "environment"),
        (no_input_digest, "benchmark.prompts"),
        (no_verifier, "verifier"),
        (image_unknown, "image"),
    ],
)
def test_what_differs_is_refused_until_it_is_allowed(lock: Path, change: Edit, allow: str) -> None:
    edit(lock, change)
    check(lock, code=1)
    check(lock, "--allow", allow)


def test_a_tracked_change_does_not_matter_where_the_package_is_the_same(lock: Path) -> None:
    edit(lock, lambda data: data["code"]["ran"][0].update(commit="1" * 40, dirty=None))
    assert check(lock)["code"] == ("ok", "the package's files are the same")


def lost_image(data: dict[str, Any]) -> None:
    data["image"] = {"sha256": "a" * 64, "labels": {}}
    data["paths"]["image"] = "/not/there.sif"


def no_recipe(data: dict[str, Any]) -> None:
    data["recipe"] = {"unknown": "run.json is torn"}


def recipe_of_tomorrow(data: dict[str, Any]) -> None:
    data["recipe"]["train"]["warp"] = 9


@pytest.mark.parametrize(
    ("change", "what"),
    [(lost_image, "image"), (no_recipe, "recipe"), (recipe_of_tomorrow, "recipe")],
)
def test_what_cannot_be_had_cannot_be_allowed(lock: Path, change: Edit, what: str) -> None:
    edit(lock, change)
    assert check(lock, code=1)[what][0] == "missing"
    assert cli("reproduce", lock.parent, "--allow", what).exit_code == 2


def test_a_run_in_an_image_is_not_asked_for_this_python(lock: Path) -> None:
    edit(lock, lost_image)
    found = check(lock, code=1)
    assert not {"code", "python", "package torch"} & found.keys()
    assert "/not/there.sif" in cli("reproduce", lock.parent, "--image", "/not/there.sif").output


def test_results_under_an_earlier_recipe_are_said(lock: Path) -> None:
    edit(lock, lambda data: data["stages"]["extract"].update(current=False))
    assert check(lock)["results"][0] == "warning"


def test_accepted_losses_are_said_and_end_a_stage(lock: Path) -> None:
    def lossy(data: dict[str, Any]) -> None:
        data["accepted"] = [{"stage": "extract", "share": 0.1, "reason": "a bad node"}]
        data["stages"]["extract"].update(state="part", done=11, failed=1)

    edit(lock, lossy)
    assert check(lock)["accepted loss"][0] == "warning"
    found = runlock.read(lock)
    assert again.last_stage(found) == "vocab"
    found["stages"]["extract"]["failed"] = 0
    assert again.last_stage(found) == "prepare"


def test_a_run_that_finished_nothing(lock: Path) -> None:
    edit(lock, lambda data: data["stages"]["regenerate"].update(state="part", done=3))
    done = cli("reproduce", lock.parent)
    assert done.exit_code == 1 and "finished no stage" in done.output
    assert not list(lock.parent.parent.glob("*-reproduced"))


# -- where, and by which recipe --------------------------------------------------------------------


def test_where_the_new_run_goes(lock: Path, tmp_path: Path, monkeypatch: Any) -> None:
    found, run = runlock.read(lock), lock.parent
    assert again.new_place(run, found, None) == run.with_name("tiny-reproduced")
    run.with_name("tiny-reproduced").mkdir()
    assert again.new_place(run, found, None) == run.with_name("tiny-reproduced-2")
    monkeypatch.chdir(run)
    assert again.new_place(Path("."), found, None) == run.with_name("tiny-reproduced-2")
    assert again.new_place(lock, found, None) == Path("runs/tiny-reproduced")
    shutil.copytree(run, tmp_path / "another")
    for wrong in (run, tmp_path / "another"):
        assert cli("reproduce", run, "--run", wrong).exit_code == 2
        assert cli("reproduce", lock, "--run", wrong).exit_code == 2


def test_a_new_run_follows_the_recorded_recipe(lock: Path, tmp_path: Path) -> None:
    found = runlock.read(lock)
    recipe = parse(found["recipe"], where="lock", base=Path("/"))
    path = again.make(tmp_path / "new", found, recipe, None)
    assert load(path) == recipe == open_run(tmp_path / "new").recipe()
    again.new_place(lock.parent, found, str(tmp_path / "new"))  # it may be gone on with
    found["verifier"]["id"] = "0" * 32
    with pytest.raises(Exception, match="another run"):
        again.new_place(lock.parent, found, str(tmp_path / "new"))


@pytest.mark.parametrize("name", [*sorted(p.name for p in (ROOT / "jobs").glob("*.toml")), "odd"])
def test_any_recipe_is_written_as_it_was(name: str, tmp_path: Path) -> None:
    recipe = load(ROOT / "jobs" / name if name != "odd" else TINY)
    if name == "odd":
        data = recipe.model_dump(mode="json", exclude_none=True)
        data["template"]["arguments"] = {"a b": 'q"\\\n\t\x7f\x01é', "t": True, "f": 1e-5, "i": -3}
        data["sources"].append({"path": "/x", "name": 'with "quotes"', "weight": 0.5})
        data["slurm"]["groups"] = [["regenerate", "prepare"], ["extract", "vocab"], ["train"]]
        data["slurm"]["groups"].append(["benchmark"])
        data["slurm"]["nodes"] = {"train": 2}
        recipe = parse(data, where="odd", base=tmp_path)
    path = tmp_path / "recipe.toml"
    path.write_text("\n".join(again.toml_lines(recipe)))
    assert load(path) == recipe


# -- the same comes out ----------------------------------------------------------------------------


@pytest.mark.campaign
def test_the_same_bytes_up_to_vocab(origin: Path, tmp_path: Path) -> None:
    """From a copy of the lock alone, into a run of another name; then verdicts on other bytes."""
    runlock.write(open_run(origin))
    copied, new = tmp_path / "last year.json", tmp_path / "new"
    shutil.copy(origin / "run.lock.json", copied)
    # The run may be older than the code as it is being worked on.
    allow = ("--allow", "code")
    done = eagle("reproduce", copied, "--run", new, *allow, "--json")
    result = json.loads(done.stdout)
    stages = ("regenerate", "prepare", "extract", "vocab")
    assert result["equal"] is True and [s["stage"] for s in result["stages"]] == list(stages)
    assert digests(new, *stages) == digests(origin, *stages)
    assert not (new / "train/records").exists()
    found, made = runlock.read(copied), runlock.read(new)
    found["stages"]["extract"]["files"]["00004/safetensors"] = "0" * 32
    found["stages"]["extract"]["result_digest"] = "0" * 32
    verdicts = {v.stage: (v.same, v.detail) for v in again.verdicts(found, made, "vocab")}
    assert verdicts["extract"] == (False, "1 of 12: 00004")
    assert verdicts["vocab"][0] is True


@pytest.mark.campaign
def test_a_whole_run(tmp_path: Path, verifier_dir: Path) -> None:
    """Draft and benchmark too: equal weights, equal acceptance."""
    eagle("run", TINY, "--run", tmp_path / "one")
    done = eagle("reproduce", tmp_path / "one")
    assert done.stdout.count("byte-equal") == 6, done.stdout
    one, two = (tmp_path / name for name in ("one", "one-reproduced"))
    results = [files.read_json(run / "bench/results.json") for run in (one, two)]
    assert results[0]["acceptance_length"] == results[1]["acceptance_length"]
    assert (one / "draft/model.safetensors").read_bytes() == (
        two / "draft/model.safetensors"
    ).read_bytes()
    assert cli("diff", one, two).exit_code == 0
