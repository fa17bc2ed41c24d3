"""What comes before the first stage, however a run is started: image, recipe, start script, lock.

`begin` is called by run, submit, --emit and --here. Nothing of the run is changed before the rules
hold that can be judged here, and the image is proven to be the pinned one. --emit, which starts
nothing and may be typed where the model is not, is told of broken rules and goes on: the stages
judge them again when they open.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import kimi_eagle
from kimi_eagle import files
from kimi_eagle.containers import start
from kimi_eagle.errors import UsageError
from kimi_eagle.recipe import STAGES, Recipe
from kimi_eagle.rundir import RunDir, follow
from kimi_eagle.site import Site

if TYPE_CHECKING:
    from kimi_eagle.images.pins import Image


def begin(
    run: RunDir,
    recipe: Recipe,
    recipe_path: Path,
    site: Site | None = None,
    *,
    judged: bool = True,
) -> Image | None:
    """Make the run follow the recipe, in the site's image (or the one it has); returns the image.

    UsageError / RunError for an image that is not pinned, damaged, or another than the run's, and
    for the first rule (contracts/RULES.md) that can be judged here and does not hold, unless
    `judged` is false.
    """
    from kimi_eagle import contracts
    from kimi_eagle.lock import runlock

    if judged:
        facts = contracts.Facts(recipe, site=site)
        contracts.enforce(facts, contracts.rules().values(), UsageError)
    if start.inside():
        image = None
        follow(run, recipe, recipe_path)
    else:
        image = use_image(run, recipe, site.image if site else None, site)
        follow(run, recipe, recipe_path)
        start.write(run, recipe, site, image)
    runlock.write(run)
    return image


def broken_rules(recipe: Recipe, site: Site | None) -> list[str]:
    """A line for each rule that can be judged here and does not hold."""
    from kimi_eagle import contracts

    verdicts = contracts.judge(contracts.Facts(recipe, site=site), contracts.rules().values())
    return [str(contracts.as_error(v)) for v in verdicts if v.state == contracts.PROBLEM]


def use_image(
    run: RunDir, recipe: Recipe, path: str | None, site: Site | None = None
) -> Image | None:
    """Prove the image and pin the run to it; None where neither the run nor the site has one."""
    from kimi_eagle.images import pins
    from kimi_eagle.lock import runlock

    pinned = runlock.pinned(run)
    path = path or (pinned.path if pinned else None)
    if path is None:
        return None
    image = pins.verified(path)
    start.settings(run, recipe, site, image)  # refuses what could not be started
    runlock.pin_image(run, image)
    return image


def warnings(run: RunDir, image: Image | None) -> list[str]:
    """What to tell about an image that is good and yet may surprise."""
    if image is None:
        return []
    found, version = [], image.labels.get("org.opencontainers.image.version", "")
    if version != kimi_eagle.__version__:
        found.append(
            f"the image holds kimi-eagle {version}, this command line is {kimi_eagle.__version__}"
        )
    if others := [name for name in STAGES if _made_elsewhere(run, name, image)]:
        found.append(
            f"units of {', '.join(others)} were made in another image or in none; they stay as they"
            " are where its vLLM and libraries are the same, and are made again where not"
        )
    return found


def _made_elsewhere(run: RunDir, stage: str, image: Image) -> bool:
    """By one record of the stage, whichever comes first: there may be thousands."""
    path = next(run.stage(stage).records.glob("*.json"), None)
    record = files.read_json(path) if path else None
    if not isinstance(record, dict):
        return False
    return (record.get("provenance") or {}).get("image") != f"sha256:{image.sha256}"
