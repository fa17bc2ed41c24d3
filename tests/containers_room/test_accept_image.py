"""A run goes on in another image only when a person says so, and that is noted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from small_image import LABELS, build

from kimi_eagle import accepted, files
from kimi_eagle.cli import main
from kimi_eagle.errors import RunError
from kimi_eagle.images import pins
from kimi_eagle.lock import checking, runlock
from kimi_eagle.recipe import load
from kimi_eagle.rundir import RunDir, create_run, follow

pytestmark = pytest.mark.usefixtures("nobodys_home")

TINY = Path(__file__).resolve().parents[1] / "recipes/tiny.toml"


def cli(*args: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


@pytest.fixture
def images(small: Path, tmp_path: Path) -> list[Path]:
    """Two pinned images."""
    one = Path(shutil.copy(small, tmp_path / "one.sif"))
    two = build(tmp_path / "two.sif", LABELS | {"ai.kimi-eagle.flavour": "other"})
    for path in (one, two):
        pins.lock(path)
    return [one, two]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = create_run(tmp_path / "run")
    follow(made, load(TINY), TINY)
    runlock.write(made)
    return made


def accept(run: RunDir, image: Path, *words: str) -> Result:
    return cli("accept", run.path, "--image", image, "--reason", "the new\ndriver", *words)


def test_who_when_why_old_and_new(run: RunDir, images: list[Path]) -> None:
    one, two = (pins.verified(path) for path in images)
    runlock.pin_image(run, one)
    with pytest.raises(RunError, match="accept"):
        runlock.pin_image(run, two)
    done = accept(run, images[1])
    assert done.exit_code == 0, done.output
    assert f"instead of sha256:{one.sha256[:12]}" in done.output and "next submit" in done.output
    assert runlock.pinned(run) == two
    assert files.read_json(run.image)["stat"] == pins.stat_line(two.path)
    (entry,) = accepted.images(run)
    assert (entry["before"], entry["image"]) == (f"sha256:{one.sha256}", f"sha256:{two.sha256}")
    assert entry["reason"] == "the new driver" and entry["user"] and entry["host"] and entry["time"]
    lock = runlock.read(run.path)
    assert lock["image"]["sha256"] == two.sha256 and lock["accepted"] == [entry]
    runlock.pin_image(run, two)


def test_the_same_image_is_refused(run: RunDir, images: list[Path]) -> None:
    runlock.pin_image(run, pins.verified(images[0]))
    done = accept(run, images[0])
    assert done.exit_code == 2 and "already" in done.output
    assert accepted.every(run) == []


def test_an_image_that_is_not_pinned_is_refused(run: RunDir, small: Path, tmp_path: Path) -> None:
    loose = Path(shutil.copy(small, tmp_path / "loose.sif"))
    done = accept(run, loose)
    assert done.exit_code == 2 and "pinned in no lock file" in done.output
    assert not run.image.exists() and accepted.every(run) == []


def test_a_run_without_image_and_a_torn_note(run: RunDir, images: list[Path]) -> None:
    entry = json.loads(accept(run, images[0], "--json").stdout)
    assert entry["before"] is None
    run.image.write_text('{"image"')
    assert accept(run, images[1]).exit_code == 0
    assert accepted.images(run)[-1]["before"] == "unknown"
    assert runlock.pinned(run) == pins.verified(images[1])


@pytest.mark.parametrize(
    "words",
    [
        ("extract", "--image", "x.sif", "--reason", "r"),
        ("--image", "x.sif", "--share", "0.1", "--reason", "r"),
        ("--reason", "r"),
        ("extract", "--reason", "r"),
        ("--share", "0.1", "--reason", "r"),
        ("--image", "x.sif", "--reason", " "),
        ("--image", "x.sif"),
        ("--image", "not-there.sif", "--reason", "r"),
    ],
)
def test_wrong_use(run: RunDir, words: tuple[str, ...]) -> None:
    assert cli("accept", run.path, *words).exit_code == 2
    assert accepted.every(run) == []


def test_reproduce_finds_the_image_and_knows_it_again(
    run: RunDir, images: list[Path], tmp_path: Path
) -> None:
    """Where it lay, by --image, or by any lock file here; another one is refused."""
    one = pins.verified(images[0])
    runlock.pin_image(run, one)
    runlock.write(run)
    lock = runlock.read(run.path)

    def look(**where: str) -> checking.Check:
        found = checking.look(lock, **where)
        assert (found.image is None) == (found.checks[1].verdict == "missing")
        return found.checks[1]

    assert (look().what, look().verdict) == ("image", "ok")
    assert look(image_file=str(images[1])).verdict == "differs"
    moved = tmp_path / "containers"
    moved.mkdir()
    shutil.move(images[0], moved / "renamed.sif")
    assert look().verdict == "missing"
    assert look(image_file=str(moved / "renamed.sif")).verdict == "missing"  # pinned nowhere there
    pins.lock(moved / "renamed.sif")
    assert look(image_file=str(moved / "renamed.sif")).verdict == "ok"
    assert look().note == str(moved / "renamed.sif")  # ./containers is looked through


def test_units_of_two_images_are_no_one_image(run: RunDir, images: list[Path]) -> None:
    one, two = (pins.verified(path) for path in images)
    runlock.pin_image(run, two)
    runlock.write(run)
    lock = runlock.read(run.path)

    def refused(*allow: str) -> list[tuple[str, str]]:
        found = checking.look(lock).refused(allow)
        return [(c.what, c.then) for c in found if c.what.startswith("image")]

    lock["code"]["ran"] = [{"image": f"sha256:{two.sha256}", "units": 3}]
    assert refused() == []
    lock["code"]["ran"].append({"image": f"sha256:{one.sha256}", "units": 1})
    assert refused() == [("image of all units", f"sha256:{one.sha256}")]
    assert refused("units") == []
    lock["code"]["ran"][1] = {"units": 1}  # made before the run had an image
    assert refused() == [("image of all units", "none")]
