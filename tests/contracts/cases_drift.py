"""Records that say something else than the recipe does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from place import Case, Place

from kimi_eagle.capture.settings import settings
from kimi_eagle.ledger import Ledger, Unit
from kimi_eagle.recipe import parse
from kimi_eagle.rundir import create_run, follow
from kimi_eagle.verifier import open_verifier


def begun(place: Place, **parts: dict[str, Any]) -> None:
    """A run with a record each of prepare and extract, as the stages would write their keys;
    `parts`: stage -> key parts that differ."""
    recipe = parse(place.recipe, where="recipe.toml", base=place.path)
    run = create_run(place.path / "run")
    (place.path / "recipe.toml").write_text("")  # kept beside run.json; nobody reads it here
    follow(run, recipe, place.path / "recipe.toml")
    verifier = open_verifier(recipe.verifier.path)
    engine = settings(recipe.engine_for("extract"))
    told = {
        "prepare": {"tokenizer": verifier.tokenizer_digest(), "template": None},
        "extract": {
            "verifier": verifier.id(),
            "layers": list(recipe.extract.layers),
            "engine": engine,
        },
    }
    for stage, own in told.items():
        unit = Unit(name="00000", parts=own | parts.get(stage, {}))
        ledger = Ledger(run.stage(stage).make())
        number = ledger.start_attempt(unit, {})
        data = {
            "unit": unit.name,
            "key": unit.key,
            "state": "done",
            "parts": unit.parts,
            "attempt": number,
            "files": [],
            "counts": {},
            "info": {"parts": []},
        }
        assert ledger.create_record(unit, data)
    place.given["run"] = run


def with_template(place: Place) -> None:
    """The template's digest needs transformers: for the heavy case alone."""
    begun(place, prepare={"template": place.facts(heavy=True).template.digest()})


def broken(stage: str, **parts: Any) -> Callable[[Place], None]:
    return lambda place: begun(place, **{stage: parts})


def other_engine(place: Place) -> None:
    begun(place)
    place.recipe["engine"]["dtype"] = "float32"


def other_training(place: Place) -> None:
    begun(place)
    place.recipe["train"]["lr"] = 3e-3


CASES = [
    Case("drift-tokenizer", broken("prepare", tokenizer="0" * 32), "of prepare", begun),
    Case("drift-verifier", broken("extract", verifier="0" * 32), "of extract", begun),
    Case("drift-layers", broken("extract", layers=[0, 1, 2, 4]), "[0, 1, 2, 4]", begun),
    Case(
        "drift-template",
        broken("prepare", template="0" * 32),
        "with template 000",
        with_template,
        heavy=True,
    ),
    Case("drift-engine", other_engine, "dtype: 'bfloat16' -> 'float32'", begun),
    Case("drift-recipe", other_training, "train.lr: 0.0001 -> 0.003", begun),
]
