"""What a lock says of each stage: keys, digests of the results, and who made them.

Reads plan.json and the records of a stage, and of the results themselves only results.json and the
last lines of curves.jsonl; no tokenizer, no torch. A stage whose folder lists as before is taken
from the previous lock, so that a run of 10,000 units costs a listing a time, not 10,000 files.

The *result digest* stands for the bytes of all files that the records of done units name, without
the numbers of attempts. Left out are files whose bytes hold a time or a path (`LEFT_OUT`): they
differ between any two runs.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kimi_eagle import files
from kimi_eagle.recipe import STAGES, Recipe
from kimi_eagle.record import CONTENT
from kimi_eagle.rundir import RunDir, StageDir

RULES = 1
"""To be raised when an entry is made in another way: earlier ones are then not taken over."""
LISTED = 1000
"""Units, or files, of a stage that a lock names one by one; of more it holds the digest."""
MACHINES_NAMED = 16
"""Hosts of equal machines that are named; of more only the number."""

LEFT_OUT = {
    "index.parquet": "of one codec; what it says of the samples is in the record, as `content`",
    "rejects.jsonl": "names the files of the sources",
    "draft/config.json": "names the verifier's folder; the rest follows from the recipe",
    "curves.jsonl": "holds times; its last validation stands in the lock",
    "results.json": "holds times; its figures stand in the lock and are in the digest",
}
"""Ends of file names that are in no result digest, with the reason."""

_CODE = ("kimi_eagle", "commit", "dirty", "source", "image", "python", "packages", "lock")
_MACHINE = ("cpu", "cpus", "gpus", "driver", "partition")


def describe(
    run: RunDir, recipe: Recipe | None, digest: str | None, before: dict[str, Any]
) -> dict[str, Any]:
    """Stage name -> what is known of it now; before: the same of the previous lock."""
    found = {}
    for name in STAGES:
        if name == "regenerate" and recipe is not None and not recipe.regenerate.enabled:
            found[name] = {"state": "skipped"}
            continue
        try:
            found[name] = _stage(run.stage(name), digest, before.get(name) or {})
        except Exception as e:  # a damaged piece must not cost the rest of the lock
            found[name] = {"state": "unknown", "reason": f"{type(e).__name__}: {e}"[:300]}
    return found


def _stage(folder: StageDir, digest: str | None, before: dict[str, Any]) -> dict[str, Any]:
    plan = files.read_json(folder.plan)
    if not isinstance(plan, dict) or not isinstance(plan.get("units"), list):
        there = folder.plan.exists()
        return {"state": "unknown", "reason": "plan.json is not whole"} if there else _NOT_STARTED
    current = {"current": plan.get("recipe") == digest}
    if not current["current"]:
        current["reason"] = "planned by an earlier recipe; `kimi-eagle explain` says what is open"
    seen = files.digest([RULES, plan["units"], listing(folder)])
    if before.get("seen") == seen:
        kept = {k: v for k, v in before.items() if k not in ("current", "reason")}
        return kept | current
    keys = sorted(f"{u['name']}.{u['key']}" for u in plan["units"])
    records, damaged = read_records(folder, keys)
    done = [r for r in records if r["state"] == "done"]
    complete = len(done) == len(keys)
    entry: dict[str, Any] = {
        "state": "done" if complete else "part" if records else "open",
        "units": len(keys),
        "done": len(done),
        "failed": len(records) - len(done),
        "keys_digest": files.digest(keys),
        "seen": seen,
        **current,
        **results(folder, done),
        **_counts(done),
        **_made_by(records),
    }
    if damaged:
        entry["damaged"] = damaged[:20]
    if len(keys) <= LISTED:
        entry["keys"] = keys
    return entry


_NOT_STARTED: dict[str, Any] = {"state": "not started"}


def listing(folder: StageDir) -> list[list[Any]]:
    """Name, inode and time of every record: changes whenever a record comes or goes.

    The inode alone would not do: file systems give a freed one to the next file.
    """
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder.records) as entries:
        for entry in entries:
            if entry.name.endswith(".json") and not entry.name.startswith(files.TEMPORARY):
                with contextlib.suppress(FileNotFoundError):
                    stat = entry.stat(follow_symlinks=False)
                    found.append([entry.name, stat.st_ino, stat.st_mtime_ns])
    return sorted(found)


def read_records(folder: StageDir, keys: Iterable[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The whole records under these names (`UNIT.KEY`), and the names of those that are not."""
    found, damaged = [], []
    for name in keys:
        path = folder.records / f"{name}.json"
        data = files.read_json(path)
        if isinstance(data, dict) and _whole(data):
            found.append(data)
        elif data is not None or path.exists():
            damaged.append(name)
    return found, damaged


def _whole(record: dict[str, Any]) -> bool:
    entries = record.get("files")
    return (
        isinstance(record.get("unit"), str)
        and record.get("state") in ("done", "failed")
        and isinstance(entries, list)
        and all(isinstance(e, dict) and {"name", "xxh3"} <= e.keys() for e in entries)
    )


def results(folder: StageDir, done: list[dict[str, Any]]) -> dict[str, Any]:
    """result_digest, `files` ({UNIT/KIND: xxh3}, where they are few), and the figures of the stage.

    Nothing where nothing is done.
    """
    named, figures = {}, {}
    for record in done:
        for entry in record["files"]:
            kind = kind_of(entry["name"])
            if not kind.endswith(tuple(LEFT_OUT)):
                named[f"{record['unit']}/{kind}"] = _stands_for(record, entry)
            elif kind == "results.json":
                figures["benchmark"] = benchmark_figures(folder.files / entry["name"])
            elif kind == "curves.jsonl":
                figures["validation"] = last_validation(folder.files / entry["name"])
    if not done:
        return {}
    measured = (figures.get("benchmark") or {}).get("figures")
    entry = {"result_digest": files.digest([sorted(named.items()), measured]), **figures}
    if "benchmark" in figures and measured is None:
        entry["result_digest"] = None  # what was measured cannot be read any more
    if len(named) <= LISTED:
        entry["files"] = named
    return entry


def _stands_for(record: dict[str, Any], entry: dict[str, Any]) -> str | None:
    """The digest of a file's bytes; of a shard, whose entry is of its header alone, that of all its
    samples (equal for raw and lossless: a codec makes no other result). None where a record of
    such a shard lacks it."""
    if "of" not in entry:
        return entry["xxh3"]
    info = record.get("info")
    content = info.get("content") if isinstance(info, dict) else None
    return content if str(content).startswith(CONTENT) else None  # others mean something else


def kind_of(name: str) -> str:
    """`00003.a2.safetensors` -> `safetensors`; `all.a1.draft/x.json` -> `draft/x.json`."""
    return name.split(".", 2)[-1]


def benchmark_figures(path: Path) -> dict[str, Any] | None:
    """What results.json says: `figures` depend on draft and prompts alone, `speed` on the machine.

    None where it cannot be read.
    """
    data = files.read_json(path)
    if not isinstance(data, dict) or not isinstance(data.get("details"), dict):
        return None
    names = ("acceptance_length", "acceptance_per_position", "identical_outputs", "k", "workload")
    rows = data["details"].get("batch_sizes")
    counted = ("batch_size", "drafts", "draft_tokens", "accepted_tokens", "output_tokens")
    figures = {k: data.get(k) for k in names}
    figures["counts"] = [
        {k: row.get(k) for k in counted} for row in rows or () if isinstance(row, dict)
    ]
    return {"figures": figures, "speed": {"tokens_per_second": data.get("tokens_per_second")}}


def last_validation(path: Path) -> dict[str, Any] | None:
    """The last validation line of curves.jsonl (step, epoch, val_loss, val_accuracy, ...)."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    for text in reversed(lines):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "val_loss" in line:
            return line
    return None


def _counts(done: list[dict[str, Any]]) -> dict[str, Any]:
    """Samples and tokens added up, and when the first unit began and the last one ended."""
    found: dict[str, Any] = {}
    for name in ("samples", "tokens", "rejected"):
        values = [r.get("counts", {}).get(name) for r in done]
        if any(isinstance(v, int) for v in values):
            found[name] = sum(v for v in values if isinstance(v, int))
    for name, pick in (("started", min), ("ended", max)):
        values = [r[name] for r in done if isinstance(r.get(name), int | float)]
        if values:
            found[name] = round(pick(values), 3)
    return found


def _made_by(records: list[dict[str, Any]]) -> dict[str, Any]:
    """`code` and `machines`: distinct facts of the records' provenance, most units first."""
    # Ten thousand units have few provenances: told apart once, then taken to pieces.
    texts = Counter(files.to_json(_of(r)) for r in records)
    every = [(json.loads(text), count) for text, count in texts.items()]
    return {
        "code": add_up(({k: p.get(k) for k in _CODE}, n, []) for p, n in every),
        "machines": add_up(({k: p.get(k) for k in _MACHINE}, n, [p.get("host")]) for p, n in every),
    }


def _of(record: dict[str, Any]) -> dict[str, Any]:
    found = record.get("provenance")
    return found if isinstance(found, dict) else {}


def add_up(
    parts: Iterable[tuple[dict[str, Any], int, list[str | None]]],
) -> list[dict[str, Any]]:
    """[(facts, units, hosts)] -> one entry a set of equal facts, with `units`, `hosts`, `names`."""
    groups: dict[str, tuple[dict[str, Any], int, set[str]]] = {}
    for facts, units, hosts in parts:
        facts = {k: v for k, v in facts.items() if v is not None}
        _, so_far, names = groups.setdefault(files.to_json(facts), (facts, 0, set()))
        groups[files.to_json(facts)] = (facts, so_far + units, names | {h for h in hosts if h})
    found = []
    for facts, units, names in sorted(groups.values(), key=lambda g: (-g[1], files.to_json(g[0]))):
        entry = {**facts, "units": units}
        if names:
            entry["hosts"] = len(names)
            entry["names"] = sorted(names)[:MACHINES_NAMED]
        found.append(entry)
    return found


def over_stages(stages: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """`code` or `machines` of all stages together: distinct facts, each with its units."""
    parts = []
    for stage in stages.values():
        for entry in stage.get(kind) or ():
            facts = {k: v for k, v in entry.items() if k not in ("units", "hosts", "names")}
            parts.append((facts, entry.get("units", 0), entry.get("names", [])))
    return add_up(parts)
