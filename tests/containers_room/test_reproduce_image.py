"""A run in a pinned image is made again in the same image, found by its digest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from stack import stack_image

from kimi_eagle import files
from kimi_eagle.images import pins

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.campaign
def test_the_same_bytes_in_the_same_image(
    apptainer: str, verifier_dir: Path, eagle: Callable, tmp_path: Path
) -> None:
    """The image lies elsewhere by then, and of the first run only the lock is left."""
    image = tmp_path / "then.sif"
    shutil.copy(stack_image(), image)
    pinned = pins.lock(image)
    recipe = ROOT / "tests/recipes/tiny.toml"
    words = ("run", recipe, "--run", tmp_path / "one", "--until", "prepare", "--image", image)
    done = eagle(*words)
    assert done.returncode == 0, done.stderr
    lock = json.loads((tmp_path / "one/run.lock.json").read_text())
    assert {c["image"] for c in lock["code"]["ran"]} == {f"sha256:{pinned.sha256}"}

    shutil.move(tmp_path / "one/run.lock.json", tmp_path / "lock.json")
    shutil.rmtree(tmp_path / "one")
    (tmp_path / "now").mkdir()
    moved = Path(shutil.move(image, tmp_path / "now/now.sif"))
    refused = eagle("reproduce", tmp_path / "lock.json", "--check")
    assert refused.returncode == 1 and "image (missing)" in refused.stderr
    pins.lock(moved)
    words = ("reproduce", tmp_path / "lock.json", "--image", moved, "--run", tmp_path / "two")
    done = eagle(*words, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert {s["stage"]: s["same"] for s in found["stages"]} == {"regenerate": True, "prepare": True}
    made = [files.read_json(p) for p in (tmp_path / "two").glob("*/records/*.json")]
    assert {r["provenance"]["image"] for r in made} == {f"sha256:{pinned.sha256}"}
