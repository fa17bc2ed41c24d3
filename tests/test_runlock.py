"""run.lock.json says what a run was made from, at every moment and whatever is broken."""
# ruff: noqa: F811 (fixtures that are imported)
from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kimi_eagle import accepted, files  # noqa: E402
from kimi_eagle.errors import RunError, UsageError  # noqa: E402
from kimi_eagle.images.pins import Image  # noqa: E402
from kimi_eagle.ledger import Unit  # noqa: E402
from kimi_eagle.lock import made_from, runlock, stage_facts  # noqa: E402
from kimi_eagle.recipe import STAGES, load  # noqa: E402
from kimi_eagle.rundir import RunDir, create_run, follow  # noqa: E402
from locked import copy, digests, finish, origin, recipe_file, record, tiny  # noqa: E402, F401


def written(run: RunDir, **how: Any) -> dict[str, Any]:
    runlock.write(run, **how)
    return runlock.read(run.path)


# -- its life --------------------------------------------------------------------------------------


def test_before_anything_is_done(tmp_path: Path, verifier_dir: Path) -> None:
    run, path = create_run(tmp_path / "run"), recipe_file(tmp_path / "tiny.toml")
    follow(run, load(path), path)
    lock = written(run)
    assert {s["state"] for s in lock["stages"].values()} == {"not started"}
    assert lock["recipe"]["train"]["lr"] == 2e-3 and lock["seeds"]["training"] == 7
    prompts = Path(lock["paths"]["inputs"]["sources.prompts.path"])
    assert lock["inputs"]["sources.prompts.path"]["sha256"] == files.sha256_file(prompts)
    assert len(lock["verifier"]["id"]) == 32
    assert lock["image"] is None and lock["site"] is None and lock["machines"] == []
    assert lock["code"]["command_line"]["kimi_eagle"]


def test_a_run_up_to_vocab(tiny: RunDir) -> None:
    lock = written(tiny)
    stages = lock["stages"]
    assert {n: s["state"] for n, s in stages.items()} == {
        **dict.fromkeys(STAGES[:4], "done"), "train": "not started", "benchmark": "not started",
    }  # fmt: skip
    assert (stages["extract"]["units"], stages["extract"]["samples"]) == (12, 24)
    real = digests(tiny.path, *STAGES[:4])
    left_out = ("index.parquet", "rejects.jsonl")
    noted = {f"{s}/{k}": v for s in STAGES[:4] for k, v in stages[s]["files"].items()}
    made = [files.read_json(p) for p in tiny.stage("extract").records.glob("*.json")]
    real |= {f"extract/{r['unit']}/safetensors": r["info"]["content"] for r in made}
    assert noted == {k: v for k, v in real.items() if not k.endswith(left_out)}
    parts = files.read_json(next(tiny.stage("extract").records.glob("*.json")))["parts"]
    assert lock["verifier"]["id"] == parts["verifier"]
    assert sum(m["units"] for m in lock["machines"]) == 26
    assert lock["environment"]["packages"]["torch"]
    assert lock["times"]["first_unit"] < lock["times"]["last_unit"] < lock["written"]


def test_paths_and_digests_are_apart(origin: Path, tmp_path: Path) -> None:
    """Only `paths` and the recipe itself know where anything lies."""
    lock = written(copy(origin, tmp_path / "some where"))
    recipe, paths = lock.pop("recipe"), lock.pop("paths")
    assert paths["run"] == str(tmp_path / "some where") and recipe["sources"][0]["path"]
    text = json.dumps(lock)
    for place in (str(tmp_path), *paths["inputs"].values()):
        assert place not in text


def test_training_and_benchmark_figures(tiny: RunDir) -> None:
    finish(tiny, acceptance=1.5, val_loss=3.25, weights=b"w")
    stages = written(tiny)["stages"]
    assert stages["train"]["validation"]["val_loss"] == 3.25
    assert list(stages["train"]["files"]) == ["all/draft/model.safetensors"]
    assert stages["benchmark"]["benchmark"]["figures"]["acceptance_length"] == 1.5
    before = stages["benchmark"]["result_digest"]
    path = next(tiny.stage("benchmark").files.iterdir())
    path.write_text(path.read_text().replace('"seconds": 3.25', '"seconds": 99'))
    for found in tiny.stage("benchmark").records.iterdir():
        touched(found)
    assert written(tiny)["stages"]["benchmark"]["result_digest"] == before
    path.write_text(path.read_text().replace('"drafts": 86', '"drafts": 87'))
    for found in tiny.stage("benchmark").records.iterdir():
        touched(found)
    assert written(tiny)["stages"]["benchmark"]["result_digest"] != before


def touched(path: Path) -> None:
    """The same content as another file: what is cached by inode is looked at again."""
    data = path.read_bytes()
    other = path.with_name("other")
    other.write_bytes(data)
    os.replace(other, path)


def test_attempts_are_not_in_the_digest_and_bytes_are(tiny: RunDir) -> None:
    before = written(tiny)["stages"]["extract"]
    path = next(tiny.stage("extract").records.glob("00003.*.json"))
    data = files.read_json(path)
    text = json.dumps(data).replace("00003.a1.", "00003.a4.")
    path.unlink()
    path.write_text(text)
    assert written(tiny)["stages"]["extract"]["result_digest"] == before["result_digest"]
    path.unlink()
    path.write_text(text.replace(data["info"]["content"], "content/1:0"))  # other states
    after = written(tiny)["stages"]["extract"]
    assert after["result_digest"] != before["result_digest"]
    assert after["keys_digest"] == before["keys_digest"]
    other = [k for k in after["files"] if after["files"][k] != before["files"][k]]
    assert other == ["00003/safetensors"]


def test_open_and_failed_units_are_counted(tiny: RunDir) -> None:
    records = sorted(tiny.stage("extract").records.glob("*.json"))
    records[0].unlink()
    data = files.read_json(records[1])
    records[1].unlink()
    records[1].write_text(json.dumps(data | {"state": "failed", "files": []}))
    found = written(tiny)["stages"]["extract"]
    assert (found["state"], found["units"], found["done"], found["failed"]) == ("part", 12, 10, 1)


def test_another_recipe_is_said(tiny: RunDir) -> None:
    path = recipe_file(tiny.path.parent / "b.toml", ("lr = 2e-3", "lr = 1e-3"))
    follow(tiny, load(path), path)
    found = written(tiny)["stages"]["extract"]
    assert found["current"] is False and "earlier recipe" in found["reason"]


# -- its price -------------------------------------------------------------------------------------


def test_it_needs_no_torch(tiny: RunDir) -> None:
    code = (
        "import sys; from kimi_eagle.lock import runlock; from kimi_eagle.rundir import open_run\n"
        f"runlock.write(open_run({str(tiny.path)!r}))\n"
        "print(*sorted(set(sys.modules) & {'torch', 'vllm', 'transformers', 'pyarrow'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
    assert runlock.read(tiny.path)["stages"]["vocab"]["state"] == "done"


def test_many_units_are_read_once_and_not_listed(tiny: RunDir, monkeypatch: Any) -> None:
    folder, count = tiny.stage("extract"), stage_facts.LISTED + 5
    first = files.read_json(next(folder.records.glob("00000.*.json")))
    shutil.rmtree(folder.records)
    folder.records.mkdir()
    units = [{"name": f"{n:05d}", "key": "k" * 16, "tokens": 1, "samples": 1} for n in range(count)]
    folder.plan.write_text(json.dumps(files.read_json(folder.plan) | {"units": units}))
    for unit in units:
        text = json.dumps(first | {"unit": unit["name"]})
        (folder.records / f"{unit['name']}.{unit['key']}.json").write_text(text)
    found = written(tiny)["stages"]["extract"]
    assert found["done"] == found["units"] == count
    assert "keys" not in found and "files" not in found and len(found["result_digest"]) == 32
    assert tiny.lock.stat().st_size < 60_000
    opened = []
    real = files.read_json
    monkeypatch.setattr(files, "read_json", lambda p: opened.append(p) or real(p))
    again = written(tiny)["stages"]["extract"]
    assert again == found
    assert [p for p in opened if p.parent == folder.records] == []


def test_inputs_are_read_again_only_when_they_changed(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("b.jsonl", "a.jsonl"):
        (folder / name).write_text(f'{{"prompt": "{name}"}}\n')
        os.utime(folder / name, (1000, 1000))
    hashed = []
    real = files.sha256_file
    monkeypatch.setattr(files, "sha256_file", lambda p: hashed.append(p.name) or real(p))
    first, read = made_from.digest_of(folder, {})
    assert hashed == ["a.jsonl", "b.jsonl"] and read == first["bytes"]
    assert made_from.digest_of(folder, first, written=2000) == (first, 0)
    (folder / "b.jsonl").write_text('{"prompt": "B.jsonl"}\n')
    os.utime(folder / "b.jsonl", (1999, 1999))
    second, _ = made_from.digest_of(folder, first, written=2000)
    assert second["sha256"] != first["sha256"] and hashed[2:] == ["b.jsonl"]
    # Changed within a moment of the look: its time may be the same after one more change.
    made_from.digest_of(folder, second, written=2000)
    assert hashed[3:] == ["b.jsonl"]
    made_from.digest_of(folder, second, written=2002)
    assert hashed[4:] == []


def test_a_command_does_not_read_terabytes(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.jsonl").write_text("x" * 100)
        os.utime(folder / f"{name}.jsonl", (1000, 1000))
    entry, read = made_from.digest_of(folder, {}, left=250)
    assert (entry["sha256"], read) == (None, 200) and "100 bytes in 1 files" in entry["reason"]
    entry, read = made_from.digest_of(folder, entry, written=2000, left=250)
    assert read == 100
    assert entry["sha256"] == made_from.digest_of(folder, {})[0]["sha256"]


# -- whatever is broken ----------------------------------------------------------------------------


def break_record(run: RunDir) -> None:
    next(run.stage("extract").records.glob("00002.*.json")).write_text('{"unit": "000')


def break_record_kind(run: RunDir) -> None:
    next(run.stage("extract").records.glob("00002.*.json")).write_text('{"unit": 2, "files": 3}')


def break_plan(run: RunDir) -> None:
    run.stage("extract").plan.write_text("{")


def break_plan_units(run: RunDir) -> None:
    run.stage("extract").plan.write_text('{"recipe": "x", "units": [1, {"name": 2}]}')


def break_spec(run: RunDir) -> None:
    run.spec.write_text('{"recipe": {"name": "x"}}')


def break_image(run: RunDir) -> None:
    run.image.write_text('{"image": {"sha256": "00')


def break_sources(run: RunDir) -> None:
    data = files.read_json(run.spec)
    data["recipe"]["sources"][0]["path"] = "/not/there"
    run.spec.write_text(json.dumps(data))


def break_verifier(run: RunDir) -> None:
    data = files.read_json(run.spec)
    data["recipe"]["verifier"]["path"] = str(run.path)
    run.spec.write_text(json.dumps(data))


def break_old_lock(run: RunDir) -> None:
    run.lock.write_text(json.dumps({"format": "lock/1", "written": 1, "stages": {"extract": 3}}))


def break_accepted(run: RunDir) -> None:
    run.accepted.write_bytes(b'\xff\xfe\n[1]\n{"stage": "extract", "sha')


@pytest.mark.parametrize(
    ("damage", "piece", "word"),
    [
        (break_record, ("stages", "extract", "damaged"), "00002"),
        (break_record_kind, ("stages", "extract", "damaged"), "00002"),
        (break_plan, ("stages", "extract", "reason"), "plan.json is not whole"),
        (break_plan_units, ("stages", "extract", "reason"), "TypeError"),
        (break_spec, ("recipe", "unknown"), "run.json"),
        (break_image, ("image", "unknown"), "not whole"),
        (break_sources, ("inputs", "sources.prompts.path", "reason"), "/not/there"),
        (break_verifier, ("verifier", "reason"), "without config.json"),
        (break_old_lock, ("stages", "extract", "state"), "done"),
        (break_accepted, ("accepted",), "[]"),
    ],
)
def test_a_damaged_piece_costs_only_itself(
    tiny: RunDir, damage: Any, piece: tuple[str, ...], word: str
) -> None:
    damage(tiny)
    lock = found = written(tiny)
    for name in piece:
        found = found[name]
    assert word in str(found)
    assert lock["stages"]["vocab"]["state"] == "done"


def test_what_is_gone_stays_as_it_was_noted(tiny: RunDir, tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    data = files.read_json(tiny.spec)
    shutil.copy(data["recipe"]["sources"][0]["path"], source)
    data["recipe"]["sources"][0]["path"] = str(source)
    tiny.spec.write_text(json.dumps(data))
    before = written(tiny)["inputs"]["sources.prompts.path"]
    source.unlink()
    after = written(tiny)["inputs"]["sources.prompts.path"]
    assert after["sha256"] == before["sha256"] and "No such file" in after["reason"]


def test_a_lock_that_cannot_be_written_ends_nothing(tiny: RunDir, capsys: Any) -> None:
    tiny.lock.mkdir()
    runlock.write(tiny)
    assert "not written" in capsys.readouterr().err


def test_a_record_that_comes_meanwhile_gets_in(tiny: RunDir, monkeypatch: Any) -> None:
    real, calls = runlock.compose, []
    def late(run: RunDir, **how: Any) -> dict[str, Any]:
        found = real(run, **how)
        if not calls:
            record(run, "train", Unit("all", {}), {"draft/model.safetensors": b"w"})
        calls.append(1)
        return found

    monkeypatch.setattr(runlock, "compose", late)
    assert written(tiny)["stages"]["train"]["done"] == 1 and len(calls) == 2


def test_a_stage_leaves_the_command_line_of_the_start(tiny: RunDir, monkeypatch: Any) -> None:
    mine = written(tiny)["code"]["command_line"]
    monkeypatch.setattr(runlock, "code", lambda: {"kimi_eagle": "9", "commit": "inside"})
    assert written(tiny, by="stage")["code"]["command_line"] == mine
    assert written(tiny)["code"]["command_line"]["kimi_eagle"] == "9"


@pytest.mark.parametrize("text", ["", "[]", '{"format": "lock/2"}', '{"format": "lock/1"}', "\0"])
def test_what_is_no_lock_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="not a lock"):
        runlock.read(path)
    with pytest.raises(UsageError, match="no lock here"):
        runlock.read(tmp_path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("stages", "extract", "units"), "twelve"),
        (("stages", "vocab", "state"), []),
        (("stages", "prepare", "files"), {"all/x": 3}),
        (("inputs", "benchmark.prompts", "sha256"), 0),
        (("paths", "inputs"), ["/x"]),
        (("code", "ran"), None),
        (("machines",), [{"units": None}]),
        (("verifier", "id"), True),
        (("written",), float("nan")),
    ],
)
def test_a_lock_that_was_edited_wrongly_says_where(
    tiny: RunDir, place: tuple[str, ...], value: object
) -> None:
    lock = found = written(tiny)
    for name in place[:-1]:
        found = found[name]
    found[place[-1]] = value
    tiny.lock.write_text(json.dumps(lock))
    with pytest.raises(UsageError, match=re.escape(".".join(place))):
        runlock.read(tiny.lock)
    # The run itself goes on with a new one.
    assert written(tiny)["stages"]["vocab"]["state"] == "done"


# -- the image of a run ----------------------------------------------------------------------------


def image_at(path: Path, sha256: str = "a" * 64) -> Image:
    path.write_bytes(b"SIF")
    return Image(str(path), path.stem, sha256, 3, "id", "amd64", {"x": "y"})


def test_a_run_keeps_its_image(tiny: RunDir, tmp_path: Path) -> None:
    assert runlock.pinned(tiny) is None
    one = image_at(tmp_path / "one.sif")
    runlock.pin_image(tiny, one)
    assert runlock.pinned(tiny) == one
    moved = image_at(tmp_path / "moved.sif")
    runlock.pin_image(tiny, moved)
    assert runlock.pinned(tiny) == moved
    with pytest.raises(RunError, match="pinned to image sha256:aaaaaaaaaaaa.*accept") as caught:
        runlock.pin_image(tiny, image_at(tmp_path / "two.sif", "b" * 64))
    assert caught.value.exit_code == 1 and runlock.pinned(tiny) == moved
    lock = written(tiny)
    assert lock["image"]["sha256"] == "a" * 64 and "path" not in lock["image"]
    assert lock["paths"]["image"] == moved.path


def test_a_torn_image_json_is_no_free_pass(tiny: RunDir, tmp_path: Path) -> None:
    tiny.image.write_text('{"image": {')
    for call in (
        lambda: runlock.pinned(tiny),
        lambda: runlock.pin_image(tiny, image_at(tmp_path / "one.sif")),
    ):
        with pytest.raises(RunError, match="accept"):
            call()


def test_accepted_images_stand_beside_losses(tiny: RunDir) -> None:
    accepted.add(tiny, "extract", 0.25, "a bad node", lost=1, samples=4)
    accepted.add_image(tiny, "sha256:" + "b" * 64, None, "new driver")
    assert accepted.share_of(tiny, "extract") == 0.25
    assert [e["reason"] for e in accepted.read(tiny)] == ["a bad node"]
    assert [e["reason"] for e in accepted.images(tiny)] == ["new driver"]
    assert [e["reason"] for e in written(tiny)["accepted"]] == ["a bad node", "new driver"]
