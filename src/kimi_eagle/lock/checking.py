"""What a lock says against what is here now: can this run be made again?

One check a thing, each with the word by which `reproduce --allow` lets it pass. Inputs are read in
full, never believed by their times: a year lies in between. What decides bytes must be the same;
the machines are only warned about, because it is a CPU's type, and on GPUs even less, that decides
the last bits of a number (DESIGN promise 3).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle.errors import KimiEagleError, UsageError
from kimi_eagle.lock import made_from, runlock
from kimi_eagle.lock.rundiff import shown
from kimi_eagle.provenance import code, environment_lock, provenance, version
from kimi_eagle.recipe import Recipe, input_paths, parse

if TYPE_CHECKING:
    from kimi_eagle.images.pins import Image

OK, DIFFERS, MISSING, UNKNOWN, WARNING = "ok", "differs", "missing", "not known", "warning"

BYTES = "bytes may differ"


@dataclass(frozen=True)
class Check:
    """One thing then and now. allow: the word that lets it pass; none for what is not there."""

    what: str
    then: str
    now: str
    verdict: str
    allow: str = ""
    note: str = ""

    @property
    def stops(self) -> bool:
        return self.verdict in (DIFFERS, MISSING, UNKNOWN)


@dataclass(frozen=True)
class Found:
    """The checks, and what a new run would follow: None where that is not to be had."""

    checks: list[Check]
    recipe: Recipe | None
    image: Image | None

    def refused(self, allow: tuple[str, ...]) -> list[Check]:
        """What stands in the way. UsageError for a word of `allow` that no check knows."""
        words = {c.allow for c in self.checks if c.allow}
        if unknown := [w for w in allow if w not in words]:
            raise UsageError(
                f"--allow {unknown[0]}", expected=f"one of {', '.join(sorted(words)) or 'nothing'}"
            )
        return [c for c in self.checks if c.stops and not (c.allow and c.allow in allow)]

    def as_json(self) -> list[dict[str, Any]]:
        return [asdict(c) for c in self.checks]


def look(
    lock: dict[str, Any],
    *,
    image_file: str | None = None,
    at: dict[str, str] | None = None,
    on_nodes: str | None = None,
) -> Found:
    """Compare a lock with what is here. Reads all inputs.

    image_file: the image, where it lies elsewhere now. at: recipe keys (`verifier.path`) -> where
    that lies now. on_nodes: name of the site whose nodes will do it, so that this machine's CPU
    says nothing.
    """
    checks, recipe = _recipe(lock, at or {})
    found, image = _image(lock, image_file)
    checks += found
    had = _had_image(lock)
    if had is None and image is None:
        checks += _code(lock)
    elif had and (others := {e.get("image") for e in _ran(lock)} - {f"sha256:{had}"}):
        several = ", ".join(sorted(o or "none" for o in others))
        note = "some were made in another image, or in none"
        checks.append(Check("image of all units", several, "one image", DIFFERS, "units", note))
    checks += _inputs(lock, recipe)
    earlier = [n for n, s in lock["stages"].items() if s.get("current") is False and s.get("done")]
    if earlier:
        note = "planned by an earlier recipe of the run, and compared all the same"
        checks.append(Check("results", ", ".join(earlier), "", WARNING, note=note))
    losses = lock["accepted"] if isinstance(lock["accepted"], list) else []
    for entry in [e for e in losses if e.get("stage")]:
        note = "of the samples lost was accepted; the new run asks again if it loses any"
        then = f"{entry['stage']} {entry.get('share')}"
        checks.append(Check("accepted loss", then, "none", WARNING, note=note))
    checks += _machines(lock, on_nodes)
    return Found(checks, recipe, image)


def _had_image(lock: dict[str, Any]) -> str | None:
    image = lock.get("image")
    return image.get("sha256") if isinstance(image, dict) else None


def _ran(lock: dict[str, Any]) -> list[dict[str, Any]]:
    ran = lock["code"].get("ran")
    return [e for e in ran if isinstance(e, dict)] if isinstance(ran, list) else []


# -- recipe and inputs -----------------------------------------------------------------------------


def _recipe(lock: dict[str, Any], at: dict[str, str]) -> tuple[list[Check], Recipe | None]:
    """The recorded recipe, read by this version, its paths replaced by those of `at`."""
    from kimi_eagle.stages.context import recipe_digest

    data, then = lock.get("recipe"), str(lock.get("recipe_digest"))
    if not isinstance(data, dict) or runlock.unknown(data):
        why = runlock.unknown(data) or "not in the lock"
        return [Check("recipe", shown(then), "", MISSING, note=why)], None
    try:
        recipe = parse(data, where="the lock's recipe", base=Path("/"))
        digest = recipe_digest(recipe)
        moved = _moved(recipe, at) if at else recipe
    except KimiEagleError as e:
        if at and "--at" in e.line():
            raise
        note = f"this version cannot follow it: {e.line()}"
        return [Check("recipe", shown(then), "", MISSING, note=note)], None
    same = digest == then
    note = "" if same else "this version adds or reads fields in another way"
    verdict = OK if same else DIFFERS
    return [Check("recipe", shown(then), shown(digest), verdict, "recipe", note)], moved


def _moved(recipe: Recipe, at: dict[str, str]) -> Recipe:
    data = recipe.model_dump(mode="json", exclude_none=True)
    known = input_paths(recipe)
    for key, path in at.items():
        if key not in known:
            raise UsageError(f"--at {key}", expected=f"one of {', '.join(sorted(known))}")
        full = str(Path(path).expanduser().resolve())
        section, *rest = key.split(".")
        if section == "sources":
            name = key.removeprefix("sources.").removesuffix(".path")
            next(s for s in data["sources"] if s["name"] == name)["path"] = full
        else:
            data[section][rest[-1]] = full
    return parse(data, where="--at", base=Path("/"))


def _inputs(lock: dict[str, Any], recipe: Recipe | None) -> Iterator[Check]:
    then_paths = lock["paths"].get("inputs")
    paths = input_paths(recipe) if recipe else then_paths if isinstance(then_paths, dict) else {}
    for key in sorted({*lock["inputs"], *paths} - {"verifier.path"}):
        entry = lock["inputs"].get(key) or {}
        then, path = entry.get("sha256"), paths.get(key)
        if not path or not os.path.exists(path):
            note = f"{path or 'no path'}: not there; --at {key}=PATH says where it is now"
            yield Check(key, shown(then), "", MISSING, note=note)
            continue
        now, _ = made_from.digest_of(Path(path), {})
        if now["sha256"] is None:
            yield Check(key, shown(then), "", MISSING, note=now["reason"])
        elif then is None:
            note = f"not in the lock: {entry.get('reason', 'no entry')}"
            yield Check(key, shown(None), shown(now["sha256"]), UNKNOWN, key, note)
        else:
            same = now["sha256"] == then
            note = "" if same else _which(entry, now)
            yield Check(key, shown(then), shown(now["sha256"]), OK if same else DIFFERS, key, note)
    yield _verifier(lock, paths.get("verifier.path"))


def _which(then: dict[str, Any], now: dict[str, Any]) -> str:
    """The first file of a folder that is another one, by name."""
    old, new = ({f["name"]: f["sha256"] for f in e.get("files") or ()} for e in (then, now))
    if len(old) < 2 and len(new) < 2:
        return f"{then.get('bytes', '?')} bytes then, {now['bytes']} now"
    names = sorted(n for n in old.keys() | new.keys() if old.get(n) != new.get(n))
    return f"{len(names)} files, such as {names[0]}" if names else ""


def _verifier(lock: dict[str, Any], path: str | None) -> Check:
    """By headers and sizes, as keys have it; not by content."""
    then = lock["verifier"].get("id")
    now = made_from.verifier(path, {}) if path else {"id": None, "reason": "no path"}
    if now["id"] is None:
        note = f"{now['reason']}; --at verifier.path=DIR says where it is now"
        return Check("verifier", shown(then), "", MISSING, note=note)
    if then is None:
        note = f"not in the lock: {lock['verifier'].get('reason', 'no entry')}"
        return Check("verifier", shown(None), shown(now["id"]), UNKNOWN, "verifier", note)
    same = now["id"] == then
    note = "headers, sizes, tokenizer; not the weights' content" if same else ""
    if not same and now["tokenizer_digest"] != lock["verifier"].get("tokenizer_digest"):
        note = "the tokenizer is another one"
    return Check(
        "verifier", shown(then), shown(now["id"]), OK if same else DIFFERS, "verifier", note
    )


# -- image, or code and packages -------------------------------------------------------------------


def _image(lock: dict[str, Any], file: str | None) -> tuple[list[Check], Image | None]:
    """The image that a new run would be pinned to."""
    then = _had_image(lock)
    if then is None and file is None:
        if why := runlock.unknown(lock.get("image")):
            return [Check("image", "", "", UNKNOWN, "image", f"not in the lock: {why}")], None
        return [], None
    from kimi_eagle.images import pins

    words = f"sha256:{shown(then)}" if then else "none"
    faults = []
    for candidate in [file] if file else _candidates(lock, then):
        try:
            image = pins.verified(candidate)
        except (KimiEagleError, OSError) as e:
            faults.append(e.line() if isinstance(e, KimiEagleError) else str(e))
            continue
        verdict = OK if image.sha256 == then else DIFFERS
        now = f"sha256:{shown(image.sha256)}"
        return [Check("image", words, now, verdict, "image", image.path)], image
    note = "; ".join(faults) or "no file of it is known here"
    return [Check("image", words, "", MISSING, note=f"{note}; --image FILE says where it is")], None


def _candidates(lock: dict[str, Any], sha256: str | None) -> list[str]:
    """Where the image lay, and every file that the lock files here pin with its digest."""
    from kimi_eagle.images import pins

    recorded = lock["paths"].get("image")
    found = [recorded] if isinstance(recorded, str) and os.path.exists(recorded) else []
    try:
        found += [str(e.path) for e in pins.locked_at(str(sha256), pins.common_lock_files())]
    except (KimiEagleError, OSError):  # a damaged lock file elsewhere
        pass
    return list(dict.fromkeys(found))


def _code(lock: dict[str, Any]) -> list[Check]:
    """Without an image: code, environment and packages of this Python."""
    ran, now = _ran(lock), code()
    if not ran:
        return [Check("code", "", shown(now["commit"]), UNKNOWN, "code", "no unit was made")]
    checks = [_same_code(ran, now)]
    environment = lock.get("environment") if isinstance(lock.get("environment"), dict) else {}
    locks = environment.get("locks") or []
    if locks:
        here = environment_lock()
        verdict = OK if locks == [here] else UNKNOWN if here is None else DIFFERS
        checks.append(
            Check("environment's lock file", shown(locks), shown(here), verdict, "environment")
        )
    pythons = environment.get("python") or []
    here = platform.python_version()
    verdict = OK if pythons == [here] else DIFFERS
    checks.append(Check("python", shown(pythons), here, verdict, "python"))
    for name, then in sorted((environment.get("packages") or {}).items()):
        here = version(name)
        verdict = OK if then == here else MISSING if here is None else DIFFERS
        checks.append(Check(f"package {name}", shown(then), shown(here), verdict, "packages"))
    return checks


def _same_code(ran: list[dict[str, Any]], now: dict[str, Any]) -> Check:
    """By the digest of our own files where both have one, else by commit and change."""
    sources = {e.get("source") for e in ran}
    commits = sorted({str(e.get("commit")) for e in ran})
    then, here = ", ".join(map(shown, commits)), shown(now["commit"])
    if sources == {now["source"]} and now["source"]:
        note = "the package's files are the same"
        return Check("code", then, here, OK, "code", note)
    if len(ran) > 1 and len(sources) > 1:
        note = f"units were made by {len(sources)} states of the code"
        return Check("code", then, here, DIFFERS, "code", note)
    if None not in sources and now["source"]:
        note = "the package's files are others"
        return Check("code", then, here, DIFFERS, "code", note)
    changed = {e.get("dirty") for e in ran}
    if commits == [str(now["commit"])] and changed == {now["dirty"]} and now["commit"]:
        if "dirty" not in str(now["commit"]) or now["dirty"]:
            return Check("code", then, here, OK, "code")
    unknown = now["commit"] is None or "None" in commits
    return Check("code", then, here, UNKNOWN if unknown else DIFFERS, "code")


# -- machines --------------------------------------------------------------------------------------


def _machines(lock: dict[str, Any], on_nodes: str | None) -> Iterator[Check]:
    """CPU and GPU of the machines that made the units, against this one: only warnings."""
    machines = [m for m in lock.get("machines") or () if isinstance(m, dict)]
    here = provenance()
    facts = (
        ("CPU", "cpu", here["cpu"]),
        ("number of CPUs", "cpus", here["cpus"]),
        ("GPUs", "gpus", here.get("gpus")),
        ("GPU driver", "driver", here.get("driver")),
    )
    for what, key, now in facts:
        values: list[Any] = []
        for value in (m.get(key) for m in machines):
            values += [value] if value is not None and value not in values else []
        text = ", ".join(map(shown, values))
        if not values and (now is None or not machines):
            continue
        if on_nodes:
            yield Check(what, text, f"nodes of {on_nodes}", WARNING, note=f"not compared; {BYTES}")
        elif values == [now] or (not values and now is None):
            yield Check(what, text, shown(now), OK)
        else:
            yield Check(what, text or shown(None), shown(now), WARNING, note=BYTES)
