"""Drift: what a run's records say they were made from, against what its recipe says now.

No stage judges these: a stage under a changed recipe makes again what changed, and reads nothing
else (DESIGN, promise 2). They are for the person at the keyboard: a slip in a recipe can cost a
week of nodes without any fault. Records of the newest make of each unit count, whatever their key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import Note, Problem, rule
from kimi_eagle.errors import UsageError
from kimi_eagle.recipe_train import NOT_IN_KEY

AGAIN = "change it back, or let them be made again: `kimi-eagle explain RUN` lists them"
ENGINE_STAGES = ("regenerate", "extract", "benchmark")


def _made_with(facts: Facts, stages: tuple[str, ...], part: str, now: Any) -> Iterator[Problem]:
    """One problem for each stage whose done units were made with another value of a key part."""
    for stage in stages:
        values = [r.data["parts"].get(part) for r in facts.records(stage)]
        if others := [v for v in values if v is not None and v != now]:
            yield Problem(
                f"{_units(others)} of {stage} were made with {part} {_short(others[0])}",
                where=str(facts.run.path),
                expected=f"{part} {_short(now)}, as the recipe has it now",
            )


def _units(values: list[Any]) -> str:
    return f"{len(values):,} done unit{'s' if len(values) > 1 else ''}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@rule(
    "drift-tokenizer",
    what="The samples of the run were made with the tokenizer that the verifier has now.",
    why="Samples are token ids. After a tokenizer's update the same ids mean other words; prepare "
    "and all that follows is made again, a teacher's pass over everything.",
    how="Digest of the tokenizer's files against that in the record of prepare.",
    fix=AGAIN,
    needs=("run",),
    after=("verifier-directory",),
)
def tokenizer(facts: Facts) -> Iterator[Problem]:
    yield from _made_with(facts, ("prepare",), "tokenizer", facts.verifier.tokenizer_digest())


@rule(
    "drift-verifier",
    what="Answers and states of the run come from the checkpoint that the recipe names now.",
    why="A draft trained on the states of one checkpoint and served on another (a re-quantised "
    "one, say) is accepted less often, and nothing else shows it.",
    how="Verifier id (configuration, index, tokenizer, every safetensors header with its size) "
    "against those in the records. Weights changed in place keep the id: `kimi-eagle verifier "
    "hash` tells.",
    fix=AGAIN,
    needs=("run",),
    after=(
        "verifier-directory",
        "verifier-weights-present",
        "verifier-weights-fetched",
        "verifier-weights-whole",
        "drift-tokenizer",
    ),
)
def verifier(facts: Facts) -> Iterator[Problem]:
    yield from _made_with(facts, ENGINE_STAGES, "verifier", facts.verifier.id())


@rule(
    "drift-layers",
    what="The states of the run are of the layers that the recipe names now.",
    why="States of other layers have the same shape and load without a word; here they are never "
    "read, but extracting again is the dearest step of a run (57,344 bytes a token for Kimi-K2.5).",
    how="Layer ids in the records of extract.",
    fix=AGAIN,
    needs=("run",),
)
def layers(facts: Facts) -> Iterator[Problem]:
    yield from _made_with(facts, ("extract",), "layers", list(facts.recipe.extract.layers))


@rule(
    "drift-template",
    what="The samples of the run were rendered by the template that the recipe gives now.",
    why="Thinking on or off, tools, or an updated template change every prompt; the draft then "
    "learns text that the server never sees.",
    how="Digest of the template's text and arguments against that in the record of prepare.",
    fix=AGAIN,
    needs=("run", "transformers"),
    after=("verifier-directory", "drift-tokenizer"),
)
def template(facts: Facts) -> Iterator[Problem]:
    yield from _made_with(facts, ("prepare",), "template", facts.template.digest())


@rule(
    "drift-engine",
    what="Answers and states of the run were made with the engine settings of the recipe.",
    why="dtype, lengths and parallel sizes are part of a unit's key: a change of one of them "
    "opens all units of the stage again.",
    how="Engine settings in the records against the recipe's, and against the version of vLLM "
    "where one is installed here.",
    fix=AGAIN,
    needs=("run",),
)
def engine(facts: Facts) -> Iterator[Problem | Note]:
    from kimi_eagle.survey import differences

    for stage in ENGINE_STAGES:
        records = [r for r in facts.records(stage) if r.data["parts"].get("engine")]
        if not records:
            continue
        now = _engine_now(facts, stage)
        changed = [
            text
            for record in records
            for text in differences(_known(record.data["parts"]["engine"], now), now)[:1]
        ]
        if changed:
            yield Problem(
                f"{_units(changed)} of {stage} were made with other engine settings: {changed[0]}",
                where=str(facts.run.path),
            )


def _engine_now(facts: Facts, stage: str) -> dict[str, Any]:
    """What the engine would be told; without a vLLM here, what the recipe alone says."""
    from kimi_eagle.capture.settings import settings

    section = facts.recipe.engine_for(stage)
    try:
        told = settings(section)
    except UsageError:
        told = section.model_dump(mode="json", exclude={"device", "cpu_kv_cache_gib"})
        told.pop("gpu_memory_utilization")
    # The stage's own business, compared by other rules or not at all.
    return {k: v for k, v in told.items() if k not in ("seed", "layers")}


def _known(recorded: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in recorded.items() if k in now}


@rule(
    "drift-recipe",
    what="The run was begun with the recipe as it is now.",
    why="A changed sampling, length, vocabulary or training key makes that stage and all that "
    "stand on it again.",
    how="The recipe that the run holds against the file, key by key; layers, engine and template "
    "have rules of their own, keys that change no bytes are left out.",
    fix="look at `kimi-eagle explain RUN` after the next `run` or `submit`, or change it back",
    needs=("run",),
)
def recipe(facts: Facts) -> Iterator[Problem]:
    from kimi_eagle.survey import differences

    if changed := differences(_comparable(facts.run.recipe()), _comparable(facts.recipe)):
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        yield Problem(f"{changed[0]}{more}", where=str(facts.run.path))


def _comparable(recipe: Any) -> dict[str, Any]:
    data = recipe.model_dump(
        mode="json",
        exclude={
            "name": True,
            "allow_rejected": True,
            "verifier": True,
            "template": True,
            "engine": True,
            "contracts": True,
            "slurm": True,
            "notify": True,
            "container": True,
            "card": True,
            "sources": {"__all__": {"license"}},
            "regenerate": {"engine"},
            "extract": {"engine", "layers"},
            "train": set(NOT_IN_KEY),
            "benchmark": {"engine"},
        },
    )
    # raw and lossless hold the same bits.
    data["extract"]["codec"] = "fp8" if recipe.extract.codec == "fp8" else "exact"
    return data
