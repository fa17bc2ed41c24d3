"""RUN/start.sh: what it mounts, whose it is, and when commands refuse it. Nothing is started."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kimi_eagle
from kimi_eagle import begin
from kimi_eagle import recipe as recipes
from kimi_eagle.containers import start
from kimi_eagle.errors import KimiEagleError, UsageError
from kimi_eagle.images.pins import Image
from kimi_eagle.lock import runlock
from kimi_eagle.rundir import RunDir
from kimi_eagle.site import Site

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def image(tmp_path: Path) -> Image:
    path = tmp_path / "x.sif"
    path.write_bytes(b"never started")
    return Image(str(path), "x", "ab" * 32, 13, "id", "amd64", {})


@pytest.fixture
def recipe(tmp_path: Path) -> recipes.Recipe:
    """The tiny recipe, with a verifier whose weights are links into a store, as hubs keep them."""
    store, model = tmp_path / "hub/blobs", tmp_path / "hub/snapshots/1"
    store.mkdir(parents=True)
    model.mkdir(parents=True)
    (store / "abc").write_text("weights")
    (model / "model.safetensors").symlink_to("../../blobs/abc")
    (tmp_path / "hub/latest").symlink_to("snapshots/1")
    (store / "def").write_text('{"prompt": "Hello"}\n')
    (tmp_path / "prompts.jsonl").symlink_to("hub/blobs/def")
    text = (ROOT / "tests/recipes/tiny.toml").read_text()
    text = text.replace("~/.cache/kimi-eagle/models/SmolLM2-135M-Instruct", "hub/latest")
    text = text.replace("../../jobs/data/prompts.jsonl", "prompts.jsonl")
    (tmp_path / "tiny.toml").write_text(text.replace("../../", f"{ROOT}/"))
    return recipes.load(tmp_path / "tiny.toml")


@pytest.fixture
def run(tmp_path: Path, recipe: recipes.Recipe, image: Image) -> RunDir:
    """A run that is pinned to the image."""
    made = RunDir(tmp_path / "it's a run")
    made.path.mkdir()
    runlock.pin_image(made, image)
    start.write(made, recipe, None, image)
    return made


def refused(run: RunDir) -> str:
    with pytest.raises(KimiEagleError) as error:
        start.enter(run, ["explain"])
    assert "\n" not in error.value.line()
    return error.value.line()


def test_mounts(run: RunDir, recipe: recipes.Recipe, image: Image, tmp_path: Path) -> None:
    site = Site(name="s", mounts=("/shared:/shared:ro", f"{tmp_path}/prompts.jsonl:/p", "/data"))
    found = {m.target: m for m in start.settings(run, recipe, site, image).mounts}
    assert not found[str(run.path)].read_only
    for path in ("hub/snapshots/1", "hub/blobs", "prompts.jsonl"):  # the link keeps its ending
        assert found[f"{tmp_path}/{path}"].read_only
    assert found["/shared"].read_only and not found["/data"].read_only
    assert found["/p"].source == f"{tmp_path}/prompts.jsonl"
    with pytest.raises(UsageError, match="would hide what a job needs"):
        start.settings(run, recipe, Site(name="s", mounts=("/mine:/opt",)), image)


def test_a_script_that_is_not_whole_or_of_another_place(run: RunDir, tmp_path: Path) -> None:
    text = run.start.read_text()
    assert subprocess.run(["bash", "-n", run.start]).returncode == 0
    for bad in ("", text[: len(text) // 2], text[:-3]):
        run.start.write_text(bad)
        assert "cut short" in refused(run)
    run.start.write_text(text)
    moved = RunDir(run.path.rename(tmp_path / "moved"))
    assert "moved run" in refused(moved)
    moved.start.unlink()
    assert "is missing" in refused(moved)


def test_the_accepted_image_and_the_script_differ(run: RunDir, image: Image) -> None:
    runlock.replace_image(run, dataclasses.replace(image, sha256="cd" * 32))
    assert "before the one that was accepted" in refused(run) and "submit again" in refused(run)


def test_a_run_that_had_an_image_has_not_got_none(run: RunDir, image: Image) -> None:
    run.image.unlink()
    assert "is gone" in refused(run)
    with pytest.raises(KimiEagleError, match="is gone"):
        runlock.pin_image(run, image)
    run.image.write_text("{")
    assert "is not whole" in refused(run)


def test_a_shell_that_exports_our_names_is_in_no_image(
    run: RunDir, recipe: recipes.Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIMI_EAGLE_IMAGE", "sha256:" + "ab" * 32)
    monkeypatch.setenv("KIMI_EAGLE_ASKED_RECIPE", "{}")
    assert not start.inside()
    run.start.write_text("")
    assert "cut short" in refused(run)
    assert recipes.load(ROOT / "tests/recipes/tiny.toml").name == "tiny"


def test_no_stage_outside_of_the_image(run: RunDir, recipe: recipes.Recipe, eagle: Any) -> None:
    spec = {"format": "run/1", "recipe": recipe.model_dump(mode="json", exclude_none=True)}
    run.spec.write_text(json.dumps(spec))
    done = eagle("stage", "prepare", "--run", run.path)
    assert done.returncode == 78 and "the run works in an image" in done.stderr
    assert not list(run.path.glob("prepare/records/*"))


def test_without_an_image_the_script_starts_this_python(
    tmp_path: Path, recipe: recipes.Recipe
) -> None:
    run = RunDir(tmp_path / "a 'run'")
    run.path.mkdir()
    start.write(run, recipe, None, None)
    argv = ["bash", run.start, "--version"]
    env = {"PATH": os.environ["PATH"]}
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "kimi-eagle, version" in done.stdout, done.stderr
    assert sys.executable in run.start.read_text()


def test_units_of_other_images_are_told(run: RunDir, image: Image) -> None:
    ours = dataclasses.replace(
        image, labels={"org.opencontainers.image.version": kimi_eagle.__version__}
    )
    assert begin.warnings(run, ours) == [] and begin.warnings(run, None) == []
    for stage, made in (("regenerate", f"sha256:{image.sha256}"), ("extract", None)):
        folder = run.stage(stage).make().records
        (folder / "00000.k.json").write_text(json.dumps({"provenance": {"image": made}}))
    (told,) = begin.warnings(run, ours)
    assert "units of extract were made in another image or in none" in told
    assert "the image holds kimi-eagle " in begin.warnings(run, image)[0]
