"""Make a run again from its lock, and say whether the same came out.

Reads one run.lock.json; makes a new run directory beside it, which follows the recorded recipe, and
starts it as a user would: `kimi-eagle run`, or a submit. The new run goes as far as the first one
did. What stands in the way is found before anything is made (`checking`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle import files
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.lock import runlock
from kimi_eagle.lock.rundiff import Row, compare
from kimi_eagle.recipe import STAGES, Recipe, load
from kimi_eagle.rundir import RunDir, create_run, follow, open_run
from kimi_eagle.stages.context import recipe_digest

if TYPE_CHECKING:
    from kimi_eagle.images.pins import Image

MARK = "# kimi-eagle reproduce: lock "
"""Begins a recipe written here, with the digest of the lock: who finds it may go on with it."""

_BARE = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Verdict:
    """What a new run of a stage gave. same: None where the first run has no result to compare."""

    stage: str
    same: bool | None
    detail: str = ""


# -- how far, and where ----------------------------------------------------------------------------


def last_stage(lock: dict[str, Any]) -> str | None:
    """The last stage of the unbroken row of finished ones; None where there is none."""
    last = None
    for name in STAGES:
        stage = lock["stages"].get(name) or {}
        # Given-up units end a stage, too, where the recipe or a person lets them pass.
        ended = (stage.get("done") or 0) + (stage.get("failed") or 0) == stage.get("units")
        if stage.get("state") == "done" or (ended and stage.get("done")):
            last = name
        elif stage.get("state") != "skipped":
            break
    return last


def new_place(source: Path, lock: dict[str, Any], wanted: str | None) -> Path:
    """Where the new run goes: `wanted`, else RUN-reproduced, -2, ... beside the first one.

    For a copy of a lock: runs/NAME-reproduced. UsageError for the run itself and for a folder with
    another run.
    """
    own = {source.resolve(), source.resolve().parent if source.is_file() else source.resolve()}
    if wanted is not None:
        place = Path(wanted)
        if place.resolve() in own:
            raise UsageError("is the run that is to be reproduced", where=place, fix="--run NEW")
        if (place / "run.json").exists() and not _begun(place, lock):
            raise UsageError(
                "there is another run", where=place, fix="--run NEW for a folder that is not there"
            )
        return place
    name = re.sub(r"[^A-Za-z0-9._-]", "-", str(lock.get("name") or "run"))
    base = source if source.is_dir() else Path("runs") / name
    base = base.resolve() if base.name in ("", ".", "..") else base
    number = 1
    while True:
        suffix = "-reproduced" if number == 1 else f"-reproduced-{number}"
        place = base.with_name(base.name + suffix)
        if not os.path.lexists(place):
            return place
        number += 1


def _begun(place: Path, lock: dict[str, Any]) -> bool:
    """Whether a reproduction of this very lock was begun here."""
    try:
        with open(place / "recipe.toml", encoding="utf-8") as f:
            return f.readline().strip() == _mark(lock)
    except (OSError, ValueError):
        return False


def _mark(lock: dict[str, Any]) -> str:
    """The first line of the recipe: stands for what is made again, not for when it was noted."""
    inputs = {key: entry.get("sha256") for key, entry in lock["inputs"].items()}
    image = (lock.get("image") or {}).get("sha256")
    return MARK + files.digest([lock.get("recipe"), inputs, lock["verifier"].get("id"), image])


# -- the new run -----------------------------------------------------------------------------------


def make(place: Path, lock: dict[str, Any], recipe: Recipe, image: Image | None) -> Path:
    """The new run directory, pinned to the image; returns the recipe file in it.

    RunError where the written recipe would not be read as the recorded one.
    """
    begun = _begun(place, lock)
    run = create_run(place) if not begun else RunDir(place.resolve())
    path = run.path / "recipe.toml"
    text = "\n".join([_mark(lock), *toml_lines(recipe)]) + "\n"
    files.write_atomic(path, text)
    if recipe_digest(load(path)) != recipe_digest(recipe):
        raise RunError("the recorded recipe cannot be written as TOML", where=path)
    if image is not None:
        runlock.pin_image(run, image)
    follow(run, recipe, path)
    return path


def run_here(recipe_path: Path, until: str, *, quiet: bool) -> RunDir:
    """Do the stages on this machine with `kimi-eagle run`; RunError where it does not get through.

    A process of its own: in an image it becomes another Python.
    """
    place = recipe_path.parent
    words = ["run", str(recipe_path), "--run", str(place), "--until", until]
    argv = [sys.executable, "-m", "kimi_eagle", *words, *(["--quiet"] if quiet else [])]
    out = subprocess.DEVNULL if quiet else None
    done = subprocess.run(argv, env={**os.environ, "PYTHONSAFEPATH": "1"}, stdout=out)
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise RunError(
            "the new run did not get through; why is said above",
            where=place,
            fix=f"mend the cause, then the same with --run {place}",
        )
    return open_run(place)


def submit_to(
    recipe_path: Path, recipe: Recipe, site_source: str, image: Image | None
) -> dict[str, Any]:
    """Submit the new run as jobs of a site; what `submit` gives."""
    from kimi_eagle.site import load_site
    from kimi_eagle.slurm.submit import submit

    site = load_site(site_source)
    # The lock says in which image, whatever the site uses by now.
    site = site.model_copy(update={"image": image.path if image else None})
    run = create_run(recipe_path.parent)
    source = str(Path(site_source).resolve()) if Path(site_source).is_file() else site_source
    return submit(run, recipe, recipe_path, site, site_source=source)


# -- what came out ---------------------------------------------------------------------------------


def verdicts(lock: dict[str, Any], new: dict[str, Any], until: str) -> list[Verdict]:
    """Stage by stage, whether the recorded files have the same digests, up to a stage."""
    rows = {row.what: row for row in compare(lock, new)}
    found = []
    for name in STAGES[: STAGES.index(until) + 1]:
        then, now = lock["stages"].get(name) or {}, new["stages"].get(name) or {}
        if then.get("state") == "skipped":
            continue
        if not then.get("result_digest"):
            found.append(Verdict(name, None, "the lock has no digest of its results"))
        elif then["result_digest"] == now.get("result_digest"):
            found.append(Verdict(name, True, _counted(then)))
        else:
            found.append(Verdict(name, False, _detail(name, then, now, rows)))
    return found


def _counted(stage: dict[str, Any]) -> str:
    units = stage.get("units", 0)
    return f"{units} unit{'s' if units != 1 else ''}"


def _detail(name: str, then: dict[str, Any], now: dict[str, Any], rows: dict[str, Row]) -> str:
    if then.get("keys_digest") != now.get("keys_digest"):
        why = "its keys are others: inputs, settings or versions were not the same"
    else:
        why = rows[f"{name}.result_digest"].note
    return why or f"state {now.get('state')}"


# -- the recipe as TOML ----------------------------------------------------------------------------


def toml_lines(recipe: Recipe) -> list[str]:
    """The resolved recipe as a TOML file, which `recipe.load` reads back as the same."""
    return _table(recipe.model_dump(mode="json", exclude_none=True), "")


def _table(data: dict[str, Any], prefix: str) -> list[str]:
    """Plain values first, as TOML wants it, then tables and arrays of tables."""
    lines, later = [], []
    for key, value in data.items():
        name = prefix + (key if _BARE.fullmatch(key) else _text(key))
        if isinstance(value, dict):
            later += ["", f"[{name}]", *_table(value, f"{name}.")]
        elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
            for item in value:
                later += ["", f"[[{name}]]", *_table(item, f"{name}.")]
        else:
            lines.append(f"{name.removeprefix(prefix)} = {_value(value)}")
    return lines + later


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)


def _text(value: str) -> str:
    # JSON's escapes are TOML's; it leaves only DEL as it is, which TOML refuses.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
