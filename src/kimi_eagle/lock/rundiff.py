"""Two runs side by side: what they were made from, and what came out.

Works on what `compose` says of a run directory, or on lock files alone. One row a fact, named as in
the recipe or the lock (`recipe.train.lr`, `benchmark.acceptance_length`). Paths are compared by
what lies there: two runs on the same prompts in other folders do not differ.

Rows of the kind `beside` (machines, tokens per second, how many jobs) are shown, marked ~, and do
not make two runs different: they are never the same twice, or change no result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kimi_eagle.lock import runlock
from kimi_eagle.lock.stage_facts import MACHINES_NAMED
from kimi_eagle.recipe import STAGES
from kimi_eagle.rundir import open_run

HASH_DIGITS = 12
"""Digits of a digest that are shown; --json has all."""
UNITS_SHOWN = 5
MISSING = "-"

PATH_FIELDS = ("verifier.path", "template.chat_template", "benchmark.prompts")
"""Recipe fields that are compared as inputs, by content; so are the paths of all sources."""

LABELS = ("ai.kimi-eagle.", "org.opencontainers.image.")
"""Labels that say what an image holds; Apptainer adds others of its own."""
MADE_ELSEWHERE = ("slurm", "notify", "container", "card")
"""Sections that say how jobs are made, who is told and what cards say, and change no result."""


@dataclass(frozen=True)
class Row:
    """One fact of two runs. same is None where one of the two is not known."""

    what: str
    a: Any
    b: Any
    same: bool | None
    beside: bool = False
    note: str = ""

    @property
    def differs(self) -> bool:
        """Whether this makes the two runs different."""
        return self.same is not True and not self.beside


def side(path: str | Path) -> dict[str, Any]:
    """What is to be compared: a run as it is now, or a lock file. UsageError for neither.

    A run's inputs are taken as its lock notes them; without a lock they are read.
    """
    path = Path(path)
    if (path / "run.json").is_file():
        return runlock.compose(open_run(path), by="accept")
    return runlock.read(path)


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[Row]:
    """Every fact of two locks, the recipe first, results last."""
    rows = [*_recipe(a, b), *_inputs(a, b), *_made_of(a, b)]
    return [*rows, *_results(a, b), *_beside(a, b)]


def equal(rows: list[Row]) -> bool:
    """No row says that the two runs differ."""
    return not any(row.differs for row in rows)


def as_json(rows: list[Row]) -> dict[str, Any]:
    return {"equal": equal(rows), "rows": [asdict(row) for row in rows]}


# -- what the runs were made from ----------------------------------------------------------------


def _recipe(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Row]:
    one, two = (flat_recipe(lock) for lock in (a, b))
    if one is None or two is None:
        reasons = [runlock.unknown(lock.get("recipe")) for lock in (a, b)]
        yield Row("recipe", *(r or "known" for r in reasons), None)
        return
    for name in _names(one, two):
        row = _row(f"recipe.{name}", one, two, name)
        said = name.startswith("sources.") and name.endswith(".license")
        yield replace(row, beside=said or name.partition(".")[0] in MADE_ELSEWHERE)


def flat_recipe(lock: dict[str, Any]) -> dict[str, Any] | None:
    """`train.lr` -> 0.002, for every field but paths; None where the lock knows no recipe."""
    recipe = lock.get("recipe")
    if not isinstance(recipe, dict) or runlock.unknown(recipe):
        return None
    found: dict[str, Any] = {}
    parts = dict(recipe)
    if isinstance(benchmark := parts.get("benchmark"), dict):
        parts["benchmark"] = {k: v for k, v in benchmark.items() if k != "sources"}
        parts["benchmark.sources"] = benchmark.get("sources")
    for name, value in parts.items():
        if name in ("sources", "benchmark.sources") and isinstance(value, list):
            for i, source in enumerate(value):
                source = source if isinstance(source, dict) else {"?": source}
                inner = {k: v for k, v in source.items() if k not in ("path", "name")}
                _flatten(inner, f"{name}.{source.get('name', i)}", found)
                found[f"{name}.{source.get('name', i)}"] = "present"
        else:
            _flatten(value, name, found)
    return {k: v for k, v in found.items() if k not in PATH_FIELDS}


def _flatten(value: Any, name: str, into: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _flatten(inner, f"{name}.{key}", into)
    elif value != {}:
        into[name] = value


def _inputs(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Row]:
    one, two = a["inputs"], b["inputs"]
    for key in sorted(one.keys() | two.keys()):
        entries = [lock.get(key) for lock in (one, two)]
        digests = [(e or {}).get("sha256") for e in entries]
        notes = [f"{n}: {e['reason']}" for n, e in zip("ab", entries, strict=True) if _why(e)]
        note = "; ".join(notes)
        if None not in entries and None in digests:
            yield Row(f"inputs.{key}", *(d or "not known" for d in digests), None, note=note)
        else:
            yield Row(f"inputs.{key}", *digests, digests[0] == digests[1], note=note)
    for name in ("id", "tokenizer_digest"):
        values = [lock["verifier"].get(name) for lock in (a, b)]
        same = values[0] == values[1] if None not in values else None
        yield Row(f"verifier.{name}", *values, same)


def _why(entry: Any) -> bool:
    return bool(isinstance(entry, dict) and entry.get("reason") and not entry.get("sha256"))


def _made_of(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Row]:
    one: dict[str, Any] = {}
    two: dict[str, Any] = {}
    for found, lock in ((one, a), (two, b)):
        image = lock.get("image")
        found["image.sha256"] = image.get("sha256") if isinstance(image, dict) else None
        if isinstance(image, dict):
            for name, value in (image.get("labels") or {}).items():
                if name.startswith(LABELS):
                    found[f"image.labels.{name}"] = value
        ran = [e for e in lock["code"].get("ran") or () if isinstance(e, dict)]
        for name in ("kimi_eagle", "commit", "dirty", "source"):
            found[f"code.{name}"] = _one_or_all([e.get(name) for e in ran])
        environment = lock.get("environment") or {}
        for name, value in (environment.get("packages") or {}).items():
            found[f"packages.{name}"] = value
        found["environment.locks"] = _one_or_all(environment.get("locks") or [])
        found["python"] = _one_or_all(environment.get("python") or [])
    same_code = one["code.source"] == two["code.source"] is not None
    for name in sorted(one.keys() | two.keys()):
        row = _row(name, one, two, name)
        # The commit may differ by a text or a test, which no run is made of.
        beside = same_code and name in ("code.commit", "code.dirty")
        yield replace(row, beside=beside or name.startswith("image.labels."))


def _one_or_all(values: list[Any]) -> Any:
    known = sorted({v for v in values if v is not None})
    return known[0] if len(known) == 1 else known or None


# -- what came out ---------------------------------------------------------------------------------

_PLANNED = {True: "by this recipe", False: "by an earlier recipe of the run"}


def _results(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Row]:
    for name in STAGES:
        one, two = ((lock["stages"].get(name) or {}) for lock in (a, b))
        if {one.get("state"), two.get("state")} & {None, "not started", "skipped", "unknown"}:
            yield _state(name, one, two)
            continue
        planned = [_PLANNED.get(stage.get("current")) for stage in (one, two)]
        if planned != [_PLANNED[True]] * 2:
            yield Row(f"{name}.planned", *planned, planned[0] == planned[1], beside=True)
        for key in ("state", "units", "done", "failed", "rejected", "samples", "tokens"):
            if key in one or key in two:
                yield _row(f"{name}.{key}", one, two, key)
        for key in ("keys_digest", "result_digest"):
            if one.get(key) or two.get(key):
                note = _which(one, two) if key == "result_digest" else ""
                row = _row(f"{name}.{key}", one, two, key)
                yield replace(row, note=note if not row.same else "")
        ones, twos = _figures(one), _figures(two)
        for key in _names(ones, twos):
            yield _row(f"{name}.{key}", ones, twos, key)
        if name == "benchmark":
            yield from _speed(one, two)


def _state(name: str, one: dict[str, Any], two: dict[str, Any]) -> Row:
    """The one row of a stage that one of the two has not done, or of which nothing is known."""
    states = [one.get("state"), two.get("state")]
    known = None not in states and "unknown" not in states
    note = "; ".join(str(s["reason"]) for s in (one, two) if s.get("reason"))
    return Row(f"{name}.state", *states, states[0] == states[1] if known else None, note=note)


def _which(one: dict[str, Any], two: dict[str, Any]) -> str:
    """Which units of a stage have other bytes, where both locks name them."""
    files = [one.get("files"), two.get("files")]
    if not all(isinstance(f, dict) and f for f in files):
        return ""
    names = sorted(
        n for n in files[0].keys() | files[1].keys() if files[0].get(n) != files[1].get(n)
    )
    units = sorted({n.split("/")[0] for n in names})
    every = {n.split("/")[0] for n in files[0].keys() | files[1].keys()}
    if len(every) == 1:
        units = [n.split("/", 1)[1] for n in names]
        every = {n.split("/", 1)[1] for n in files[0].keys() | files[1].keys()}
    more = ", ..." if len(units) > UNITS_SHOWN else ""
    return f"{len(units)} of {len(every)}: {', '.join(units[:UNITS_SHOWN])}{more}"


def _figures(stage: dict[str, Any]) -> dict[str, Any]:
    """validation.val_loss, acceptance_length, acceptance_per_position.1, ... of a stage."""
    found: dict[str, Any] = {}
    for source in (
        {"validation": stage.get("validation") or {}},
        (stage.get("benchmark") or {}).get("figures") or {},
    ):
        for name, value in source.items():
            if name != "counts":
                _flatten(value, name, found)
    for name, value in list(found.items()):
        if isinstance(value, list):
            del found[name]
            found |= {f"{name}.{i}": v for i, v in enumerate(value, 1)}
    return found


def _speed(one: dict[str, Any], two: dict[str, Any]) -> Iterator[Row]:
    found: list[dict[str, Any]] = [{}, {}]
    for into, stage in zip(found, (one, two), strict=True):
        _flatten((stage.get("benchmark") or {}).get("speed") or {}, "", into)
    for name in _names(*found):
        row = _row(f"benchmark{name}", *found, name)
        yield replace(row, beside=True)


def _beside(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Row]:
    """Site, machines, what was accepted: shown, and never the reason why runs differ."""
    found: list[dict[str, Any]] = [{}, {}]
    for into, lock in zip(found, (a, b), strict=True):
        site = lock.get("site") if isinstance(lock.get("site"), dict) else {}
        into |= {f"site.{k}": v for k, v in site.items() if v is not None}
        into["machines"] = [machine_text(m) for m in lock.get("machines") or ()]
        for accepted in lock.get("accepted") if isinstance(lock.get("accepted"), list) else ():
            if isinstance(accepted, dict):
                about = accepted.get("stage") or str(accepted.get("image"))[:19]
                into[f"accepted.{about}"] = accepted.get("reason")
    for name in _names(*found):
        row = _row(name, *found, name)
        yield replace(row, beside=True)


def machine_text(machine: dict[str, Any]) -> str:
    """`4 x AMD EPYC, 128 CPUs, 8 NVIDIA H200, driver 570.1 (n1, n2, ...)`."""
    parts = [f"{machine.get('hosts', 1)} x {machine.get('cpu', 'unknown CPU')}"]
    parts += [f"{machine['cpus']} CPUs"] if "cpus" in machine else []
    parts += [f"{n} {model}" for model, n in (machine.get("gpus") or {}).items()]
    parts += [f"driver {machine['driver']}"] if "driver" in machine else []
    names = machine.get("names") or []
    more = ", ..." if machine.get("hosts", 0) > MACHINES_NAMED else ""
    return ", ".join(parts) + (f" ({', '.join(names)}{more})" if names else "")


# -- rows and text ---------------------------------------------------------------------------------


def _names(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    return sorted(one.keys() | two.keys())


def _row(what: str, one: dict[str, Any], two: dict[str, Any], name: str) -> Row:
    a, b = one.get(name), two.get(name)
    return Row(what, a, b, a == b and type(a) is type(b) or _same_number(a, b))


def _same_number(a: Any, b: Any) -> bool:
    """1 and 1.0 are one value; true and 1 are not."""
    kinds = (int, float)
    return type(a) in kinds and type(b) in kinds and a == b


def lines(rows: list[Row], *, every: bool = False) -> list[str]:
    """`recipe.train.lr  0.002 -> 0.001`: what differs, or with `every` all."""
    found = [row for row in rows if every or row.same is not True]
    width = max((len(row.what) for row in found), default=0)
    return [
        f"{'~' if row.beside else ' '} {row.what:<{width}}  {_change(row)}".rstrip()
        for row in found
    ]


def _change(row: Row) -> str:
    exact = row.what.startswith("recipe.")
    a, b = shown(row.a, exact=exact), shown(row.b, exact=exact)
    text = a if row.same else f"{a} -> {b}"
    both = (row.a, row.b)
    if not row.same and not exact and all(isinstance(v, float) for v in both):
        text += f"  ({row.b - row.a:+.4g})"
    return text + (f"  ({row.note})" if row.note else "")


def shown(value: Any, *, exact: bool = False) -> str:
    """A value as a person reads it: digests cut, and floats rounded unless `exact`."""
    if value is None:
        return MISSING
    if isinstance(value, str):
        digits = value.removesuffix("+dirty")
        if len(digits) >= 32 and set(digits) <= set("0123456789abcdef"):
            return digits[:HASH_DIGITS] + value[len(digits) :]
        return value if value.isprintable() else json.dumps(value)
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or MISSING
    if isinstance(value, float) and not exact:
        return f"{value:.6g}"
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
