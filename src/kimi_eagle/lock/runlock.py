"""RUN/run.lock.json: everything that a run was made from; RUN/image.json: where its jobs run.

The lock is written at the start of each command and at the end of each stage process, from what is
there at that moment: run.json, records, image.json, the inputs. Nothing reads it to do the work; it
is what `reproduce` and `diff` read, a year later and maybe elsewhere. So it must be readable by a
person, whole on its own, and true at every moment: what is not known is null with a reason.

Digests stand apart from paths: two runs on the same content in other folders have equal digests.
No torch, no transformers: the command line of a login node writes it, too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kimi_eagle import accepted, files
from kimi_eagle.errors import KimiEagleError, RunError, UsageError
from kimi_eagle.lock import made_from, shape, stage_facts
from kimi_eagle.lock.shape import FORMAT
from kimi_eagle.provenance import code, environment_lock
from kimi_eagle.recipe import STAGES, Recipe, input_paths
from kimi_eagle.rundir import RunDir

if TYPE_CHECKING:
    from kimi_eagle.images.pins import Image

IMAGE_FORMAT = "run-image/1"
STAGE_BYTES = 1 << 30
"""Bytes of inputs that a stage's process reads at most, within a second: it may be on its way out
before a time limit. A command reads all, once (some 1.5 GB/s): later only what has changed."""

LOCK_LABEL = "ai.kimi-eagle.lock-sha256"


# -- the image of a run ------------------------------------------------------------------------


def pinned(run: RunDir) -> Image | None:
    """The image that the run's jobs have to run in; None for a run on the host's own Python.

    RunError where image.json is there and not whole: guessing would run other code.
    """
    if not run.image.exists():
        if run.proven.exists():
            raise _unknown_image(run, "is gone")
        return None
    from kimi_eagle.images.pins import Image

    data = files.read_json(run.image)
    try:
        return Image.from_json(data["image"])
    except (TypeError, KeyError, ValueError, AttributeError, KimiEagleError):
        raise _unknown_image(run, "is not whole") from None


def _unknown_image(run: RunDir, what: str) -> RunError:
    return RunError(
        f"{what}: the run's image is not known any more",
        where=run.image,
        fix=f"kimi-eagle accept {run.path} --image FILE --reason TEXT",
    )


def pin_image(run: RunDir, image: Image) -> None:
    """Let the run's jobs run in this image and in no other.

    The first time image.json is written; later the same image, wherever it lies now, only renews
    path and file times. RunError for another image, which a person has to accept.
    """
    if pinned(run) is None and files.create_exclusive(run.image, _image_text(image)):
        return
    before = pinned(run)
    if before is None or before.sha256 != image.sha256:
        have = f"sha256:{before.sha256[:12]}" if before else "another image"
        raise RunError(
            f"the run is pinned to image {have}; this is sha256:{image.sha256[:12]}",
            where=image.path,
            fix=f"kimi-eagle accept {run.path} --image {image.path} --reason TEXT",
        )
    replace_image(run, image)


def replace_image(run: RunDir, image: Image) -> None:
    """Write image.json whatever it said before; a no-op where it says so already."""
    text = _image_text(image)
    old = files.read_json(run.image)
    new = json.loads(text)
    if isinstance(old, dict) and all(old.get(k) == new[k] for k in ("format", "image", "stat")):
        return
    files.write_atomic(run.image, text)


def _image_text(image: Image) -> str:
    from kimi_eagle.images.pins import stat_line

    entry = {
        "format": IMAGE_FORMAT,
        "image": image.as_json(),
        "stat": stat_line(image.path),
        "pinned": time.time(),
    }
    return json.dumps(entry, indent=1, sort_keys=True) + "\n"


# -- the lock ----------------------------------------------------------------------------------


def read(path: str | Path) -> dict[str, Any]:
    """The lock in a run directory, or in a file of any name; UsageError where there is none."""
    path = Path(path)
    file = path / "run.lock.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            "no lock here",
            where=file,
            expected="a run directory with run.lock.json, or a copy of that file",
            fix="kimi-eagle run or submit writes it",
        )
    try:
        found = json.loads(file.read_bytes())
    except OSError as e:
        raise UsageError(f"cannot be read: {e.strerror}", where=file) from None
    except (ValueError, RecursionError):
        raise UsageError("not a lock: not whole JSON", where=file) from None
    if why := shape.fault(found):
        raise UsageError(f"not a lock: {why}", where=file, expected=f"format {FORMAT}")
    return found


def _read_quietly(path: Path) -> dict[str, Any]:
    """A whole lock, or {}."""
    try:
        found = files.read_json(path)
    except (OSError, RecursionError):
        return {}
    return {} if shape.fault(found) else found


def write(
    run: RunDir, *, by: Literal["command", "stage", "accept"] = "command", say: bool = True
) -> None:
    """Bring run.lock.json up to date; never fails, for no run should end because of its lock.

    by: `command` (submit, run: notes which code the command line is, asks Slurm's version, reads
    inputs that are new), `stage` (a stage's own process at its end: leaves that to the command),
    `accept` (inputs are left as they were noted).
    """
    try:
        for _ in range(3):
            before = _marks(run)
            lock = compose(run, by=by)
            files.write_atomic(run.lock, json.dumps(lock, indent=1, sort_keys=True) + "\n")
            # Workers that end together write one after the other: the last must know of all.
            if _marks(run) == before:
                return
    except Exception as e:
        if say:
            print(f"warning: {run.lock}: not written: {e}", file=sys.stderr)


def _marks(run: RunDir) -> Any:
    """Another value as soon as a record comes or goes."""
    return _or_reason(lambda: [stage_facts.listing(run.stage(name)) for name in STAGES])


def compose(
    run: RunDir, *, by: Literal["command", "stage", "accept"] = "command"
) -> dict[str, Any]:
    """The lock of the run as it is now; a piece that cannot be read is null with a reason."""
    before = _read_quietly(run.lock)
    recipe = _or_reason(run.recipe)
    known = recipe if isinstance(recipe, Recipe) else None
    digest = None
    if known:
        from kimi_eagle.stages.context import recipe_digest

        digest = recipe_digest(known)
    stages = stage_facts.describe(run, known, digest, before.get("stages") or {})
    image = _or_reason(lambda: _image(run))
    lock = {
        "format": FORMAT,
        "written": time.time(),
        "name": known.name if known else before.get("name"),
        "recipe": known.model_dump(mode="json", exclude_none=True) if known else recipe,
        "recipe_digest": digest,
        "seeds": _seeds(known) if known else None,
        "stages": stages,
        "image": _image_facts(image),
        "accepted": _or_reason(lambda: accepted.every(run)),
        "code": _code(before, stages, by),
        "environment": _environment(stages, image),
        "site": _or_reason(lambda: _site(run, before, by)),
        "machines": stage_facts.over_stages(stages, "machines"),
        "times": _times(stages),
        **_inputs(known, before, by),
    }
    lock["paths"] = _paths(run, known, image)
    return lock


def _or_reason(look: Callable[[], Any]) -> Any:
    """What `look` gives, or {"unknown": why}."""
    try:
        return look()
    except KimiEagleError as e:
        return {"unknown": e.line()[:300]}
    except Exception as e:
        return {"unknown": f"{type(e).__name__}: {e}"[:300]}


def unknown(value: Any) -> str | None:
    """Why a piece of a lock is not known, None where it is."""
    return value.get("unknown") if isinstance(value, dict) else None


def _seeds(recipe: Recipe) -> dict[str, Any]:
    greedy = recipe.regenerate.temperature == 0
    return {
        "recipe": recipe.seed,
        "order": recipe.seed,
        "sampling": "greedy" if greedy or not recipe.regenerate.enabled else recipe.seed,
        "training": recipe.seed,
    }


def _image(run: RunDir) -> dict[str, Any] | None:
    found = pinned(run)
    return None if found is None else found.as_json()


def _image_facts(image: Any) -> Any:
    """The image without its path."""
    if not isinstance(image, dict) or unknown(image):
        return image
    return {k: v for k, v in image.items() if k != "path"}


def _code(before: dict[str, Any], stages: dict[str, Any], by: str) -> dict[str, Any]:
    """ran: the code of the records, most units first. command_line: what started the run last."""
    mine = {k: v for k, v in code().items() if v is not None}
    last = (before.get("code") or {}).get("command_line")
    return {
        "command_line": mine if by == "command" or not last else last,
        "ran": stage_facts.over_stages(stages, "code"),
    }


def _environment(stages: dict[str, Any], image: Any) -> dict[str, Any]:
    """packages: versions by name, from the records, else from here. locks: sha256 of the lock files
    that the environments of image and records were installed from."""
    packages: dict[str, list[str]] = {}
    locks, ran = set(), stage_facts.over_stages(stages, "code")
    for entry in ran:
        for name, version in (entry.get("packages") or {}).items():
            packages.setdefault(name, [])
            packages[name] += [version] if version not in packages[name] else []
        locks |= {entry["lock"]} if entry.get("lock") else set()
    labels = image.get("labels") if isinstance(image, dict) else None
    if isinstance(labels, dict) and labels.get(LOCK_LABEL):
        locks.add(labels[LOCK_LABEL])
    elif not ran and (own := environment_lock()):
        locks.add(own)
    python = sorted({e["python"] for e in ran if e.get("python")})
    versions = {n: v[0] if len(v) == 1 else v for n, v in sorted(packages.items())}
    return {"packages": versions, "locks": sorted(locks), "python": python}


def _inputs(recipe: Recipe | None, before: dict[str, Any], by: str) -> dict[str, Any]:
    """`inputs` and `verifier`. What is gone now stays as it was noted, with the reason."""
    old, old_verifier = before.get("inputs") or {}, before.get("verifier") or {}
    if recipe is None or (by == "accept" and before):
        return {"inputs": old, "verifier": old_verifier}
    limit = STAGE_BYTES if by == "stage" else None
    found = made_from.describe(recipe, old, before.get("written", 0.0), limit)
    same = (before.get("paths") or {}).get("inputs") or {}
    now = input_paths(recipe)
    for key, entry in found.items():
        gone = entry["sha256"] is None and "bytes" not in entry
        if gone and (old.get(key) or {}).get("sha256") and same.get(key) == now[key]:
            found[key] = {**old[key], "reason": entry["reason"]}
    seen = made_from.verifier(recipe.verifier.path, old_verifier)
    if seen["id"] is None and old_verifier.get("id"):
        if same.get("verifier.path") == now["verifier.path"]:
            seen = {**old_verifier, "reason": seen["reason"]}
    return {"inputs": found, "verifier": seen}


def _site(run: RunDir, before: dict[str, Any], by: str) -> dict[str, Any] | None:
    """Slurm's version, site, partition, jobs; None for a run without jobs."""
    from kimi_eagle.site import load_site
    from kimi_eagle.slurm import book

    if not run.slurm.path.is_dir():
        return None
    old = before.get("site") if isinstance(before.get("site"), dict) else {}
    found: dict[str, Any] = {"slurm": (_slurm() if by == "command" else None) or old.get("slurm")}
    entries = [e for e in book.read_book(run) if "damaged" not in e]
    submitted = [e for e in entries if e.get("job_id")]
    found |= {
        "jobs": len(submitted),
        "nodes": max((e.get("nodes", 1) for e in submitted), default=0),
    }
    source = str(entries[-1].get("site") or "") if entries else ""
    found["name"] = Path(source).stem or None
    try:
        site = load_site(source)
        found |= {"partition": site.partition, "constraint": site.constraint}
    except (KimiEagleError, OSError):
        found |= {k: old.get(k) for k in ("partition", "constraint")}
    return found


def _slurm() -> str | None:
    if shutil.which("sinfo") is None:
        return None
    try:
        done = subprocess.run(["sinfo", "--version"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\d+\.\S+", done.stdout)  # `slurm 24.11.5`, `slurm-wlm 22.05.8`
    return found[0] if found else None


def _times(stages: dict[str, Any]) -> dict[str, Any]:
    """Seconds since 1970."""
    started = [s["started"] for s in stages.values() if s.get("started")]
    ended = [s["ended"] for s in stages.values() if s.get("ended")]
    return {"first_unit": min(started, default=None), "last_unit": max(ended, default=None)}


def _paths(run: RunDir, recipe: Recipe | None, image: Any) -> dict[str, Any]:
    """Where everything lay when the lock was written."""
    own = _or_reason(run.recipe_path)
    return {
        "run": str(run.path),
        "image": image.get("path") if isinstance(image, dict) else None,
        "recipe": str(own) if isinstance(own, os.PathLike) else None,
        "inputs": input_paths(recipe) if recipe else {},
    }
