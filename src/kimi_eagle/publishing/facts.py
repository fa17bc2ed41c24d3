"""What a run tells of its draft and its data: records, results, lock; read, never computed anew.

Only the records under the keys of the stages' plans are taken, and results.json only where its
record says that it measured this draft: a figure of another draft is worse than none. No path of
this machine is among what cards are given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_eagle import files
from kimi_eagle.errors import KimiEagleError, RunError, UsageError
from kimi_eagle.lock import runlock
from kimi_eagle.publishing.licences import Licence, of_model
from kimi_eagle.recipe import CardSection, Recipe, load
from kimi_eagle.record import Record, why_none
from kimi_eagle.rundir import RunDir


@dataclass(frozen=True)
class Source:
    """A source of the recipe: its name, its licence as the recipe gives it, samples it gave."""

    name: str
    licence: str | None
    samples: int | None


@dataclass(frozen=True)
class Facts:
    """All that a card may say of a run."""

    run: RunDir
    recipe: Recipe
    card: CardSection
    verifier: Licence
    sources: list[Source]
    prepared: Record | None
    trained: Record | None
    results: dict[str, Any] | None
    lock: dict[str, Any]
    warnings: list[str] = field(default_factory=list)

    @property
    def licence(self) -> Licence:
        """That of the draft: the recipe's word, else the verifier's."""
        if name := self.card.license:
            return Licence(name, "", "[card] license of the recipe")
        return self.verifier

    @property
    def verifier_name(self) -> str:
        """Its name on the hub where the recipe tells it, else that of its folder."""
        return self.card.base_model or Path(self.recipe.verifier.path).name


def look(run: RunDir, recipe_path: str | Path | None = None) -> Facts:
    """Read all of it. recipe_path: the recipe whose cards and licences count; default the file that
    the run was started from where it still is one, else what the run noted.

    UsageError for a recipe_path that is no recipe.
    """
    recipe, warnings = run.recipe(), []
    said, own = recipe, run.recipe_path()
    if recipe_path is not None:
        said = load(recipe_path)
    elif own is not None and own.is_file():
        try:
            now = load(own)
            if (now.name, now.verifier.path) != (recipe.name, recipe.verifier.path):
                raise UsageError("is another run's recipe now", where=own, fix="give --recipe")
            said = now
        except KimiEagleError as e:
            warnings.append(f"[card] and licences are those that the run noted: {e.line()}")
    prepared, trained, measured = (current(run, s) for s in ("prepare", "train", "benchmark"))
    results = files.read_json(run.bench / "results.json")
    if results is not None and not _measured_this(measured, trained):
        warnings.append("bench/results.json is of another draft: left out of the card")
        results = None
    return Facts(
        run=run,
        recipe=recipe,
        card=said.card,
        verifier=of_model(Path(recipe.verifier.path)),
        sources=_sources(recipe, said, prepared),
        prepared=prepared,
        trained=trained,
        results=results if isinstance(results, dict) else None,
        lock=_lock(run),
        warnings=warnings,
    )


def current(run: RunDir, stage: str) -> Record | None:
    """The record of a stage of one unit under the key of its plan; None while there is none."""
    folder = run.stage(stage)
    plan = files.read_json(folder.plan)
    units = plan.get("units") if isinstance(plan, dict) else None
    if not units:
        return None
    name = f"{units[0]['name']}.{units[0]['key']}"
    data = files.read_json(folder.records / f"{name}.json")
    if why_none(data, name) is not None or data["state"] != "done":
        return None
    return Record(folder, data)


def draft_record(facts: Facts) -> Record:
    """The record behind RUN/draft; RunError where there is no draft, or it is not the current."""
    run = facts.run
    if not run.draft.is_dir() or facts.trained is None:
        raise RunError(
            "the run has no draft yet",
            where=run.path,
            fix=f"kimi-eagle status {run.path} says how far it is",
        )
    marker = f"{facts.trained.key}.a{facts.trained.data['attempt']}"
    if files.read_json(run.draft / "record.json") != marker:
        raise RunError(
            "draft/ is not the one that the run's records name",
            where=run.draft,
            expected=marker,
            fix=f"kimi-eagle retry {run.path}, then run it again: it is put there anew",
        )
    return facts.trained


def _measured_this(measured: Record | None, trained: Record | None) -> bool:
    """Whether the benchmark's record is of the draft of the training's (stages/benchmark.py)."""
    if measured is None or trained is None:
        return False
    own = files.digest([f["xxh3"] for f in trained.data["files"] if "/" in f["name"]])
    return (measured.data.get("parts") or {}).get("draft") == own


def _sources(recipe: Recipe, said: Recipe, prepared: Record | None) -> list[Source]:
    counted = (prepared.info.get("by_source") if prepared else None) or {}
    told = {s.name: s.license for s in said.sources}
    return [
        Source(
            s.name or "",
            told.get(s.name) or s.license,
            counted.get(s.name, 0) if prepared else None,
        )
        for s in recipe.sources
    ]


def _lock(run: RunDir) -> dict[str, Any]:
    """run.lock.json, {} where it is missing or broken: a card says less then."""
    try:
        return runlock.read(run.path)
    except KimiEagleError:
        return {}
