"""Libraries of other versions than the pinned ones, and names that are gone."""

from __future__ import annotations

from collections.abc import Callable

from cases_engine import versions
from place import Case, Place

from kimi_eagle.contracts.facts import Facts


def without(name: str) -> Callable[[Place], None]:
    """Everything is found but this."""

    def change(place: Place) -> None:
        look_up = Facts.look_up
        place.given["look_up"] = lambda asked: None if asked.endswith(name) else look_up(asked)

    return change


def taking(name: str, other: Callable[..., None]) -> Callable[[Place], None]:
    """What has this name takes other parameters."""

    def change(place: Place) -> None:
        look_up = Facts.look_up
        place.given["look_up"] = lambda asked: other if asked.endswith(name) else look_up(asked)

    return change


def of_0_3_0(t2d: object, d2t: object, config: object) -> None:
    """A model that is given its mappings at once."""


CASES = [
    Case("libraries-agree", versions(transformers="4.57.1"), "transformers 4.57.1"),
    Case("libraries-pinned", versions(vllm="0.30.0"), "vllm 0.30.0"),
    Case(
        "libraries-speculators",
        without("Eagle3DraftModel.load_vocab_mappings"),
        "has no speculators.models.eagle3:Eagle3DraftModel.load_vocab_mappings",
        heavy=True,
    ),
    Case(
        "libraries-speculators",
        taking("losses:resolve_loss_config", of_0_3_0),
        "takes no implementation, spec",
        heavy=True,
    ),
    Case(
        "libraries-vllm",
        without("ExampleHiddenStatesConnector._submit_async_write"),
        "_submit_async_write",
        heavy=True,
    ),
]
