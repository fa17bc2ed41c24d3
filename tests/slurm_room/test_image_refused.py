"""The wrong image is refused before anything is queued, and again in a job before it starts.

The images are small: nothing in them is ever run.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "containers_room"))
from campaign import Case  # noqa: E402
from small_image import LABELS, build, other_arch, patch  # noqa: E402

from kimi_eagle.images import pins  # noqa: E402


@pytest.fixture(scope="module")
def good(place: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pinned image with our labels."""
    place("root")  # Apptainer is there, as the image of the stack is
    path = build(tmp_path_factory.mktemp("image") / "good.sif", LABELS)
    pins.lock(path)
    return path


def tampered(path: Path) -> None:
    patch(path, path.stat().st_size - 100, b"x")


def truncated(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def another(path: Path) -> None:
    build(path.with_name("other.sif"), LABELS | {"ai.kimi-eagle.flavour": "cuda"}).replace(path)


def unlabelled(path: Path) -> None:
    build(path.with_name("bare.sif"), {}).replace(path)
    pins.lock(path, replace=True)


def foreign_arch(path: Path) -> None:
    other_arch(path)
    pins.lock(path, replace=True)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "tampered": (tampered, "sha256"),
    "truncated": (truncated, "truncated"),
    "another": (another, "sha256"),
    "no labels": (unlabelled, "no label org.opencontainers.image.revision"),
    "another architecture": (foreign_arch, "another architecture"),
    "not pinned": (lambda path: path.with_name("images.lock.json").unlink(), "image lock"),
    "gone": (Path.unlink, "no such image"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_refused_before_anything_is_queued(case: Case, good: Path, damage: str) -> None:
    image = case.folder / good.name
    shutil.copy(good, image)
    shutil.copy(good.with_name("images.lock.json"), case.folder)
    harm, words = DAMAGES[damage]
    harm(image)
    case.configure(site={"image": str(image)})
    command = ("submit", case.recipe, "--site", case.site, "--run", case.run)
    done = case.eagle(*command, check=False)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and str(image) in done.stderr
    assert case.jobs() == {} and not (case.run / "run.json").exists()


def test_refused_in_the_job(case: Case, good: Path) -> None:
    """The image is replaced while the job waits; accept and submit go on with the new one."""
    image = case.folder / good.name
    shutil.copy(good, image)
    shutil.copy(good.with_name("images.lock.json"), case.folder)
    case.configure(site={"image": str(image), "extra": ["--hold"]})
    case.open(1)
    (entry,) = case.extract(hold=False)
    before = json.loads((case.run / "image.json").read_text())["image"]["sha256"]
    another(image)
    case.bed.run("scontrol", "release", entry["job_id"])
    case.bed.wait_state(entry["job_id"], "FAILED", "COMPLETED", seconds=60)
    said = case.log(entry)
    assert "extract ended with 2" in said and "is not the run's image" in said
    assert not list((case.run / "extract/attempts").glob("00001.2.json"))

    pins.lock(image, replace=True)
    command = ("submit", case.recipe, "--site", case.site, "--run", case.run)
    done = case.eagle(*command, check=False)
    assert done.returncode == 1 and f"pinned to image sha256:{before[:12]}" in done.stderr
    case.eagle("accept", case.run, "--image", image, "--reason", "a test")
    (again,) = case.extract(hold=False)
    assert again["job_id"] != entry["job_id"]
    after = json.loads((case.run / "run.lock.json").read_text())["image"]["sha256"]
    assert after != before and before in (case.run / "accepted.jsonl").read_text()
    case.bed.run("scancel", again["job_id"])
