"""Layer ids that name other states than are meant, and shards that hold others than they say."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from place import HIDDEN, Case, Place

LAYERS = [1, 2, 3, 4]


def with_states(
    place: Place,
    layers: list[int] = LAYERS,
    agreement: float = 0.98,
    positions: int = 64,
    **meta: Any,
) -> None:
    """One shard with its record, of two samples; the record says LAYERS."""
    from kimi_eagle.shards import ShardWriter
    from kimi_eagle.shards.store import ShardSet

    with ShardWriter(place.path, "00000.1", layers, HIDDEN, meta) as writer:
        for number in range(2):
            states = np.full((3, len(layers), HIDDEN), 0x3F80, np.uint16)
            ids, mask = np.arange(3, dtype=np.int32), np.array([False, True, True])
            writer.add(f"sample-{number}", states, ids, mask)
    record = SimpleNamespace(
        unit="00000",
        kinds={"safetensors": writer.path},
        data={"parts": {"layers": LAYERS}},
        info={"probe": {"agreement": agreement, "positions": positions}},
    )
    place.given["states"] = ShardSet([writer.path])
    place.given["records"] = lambda stage: [record] if stage == "extract" else []


def states(**changes: Any) -> Callable[[Place], None]:
    return lambda place: with_states(place, **changes)


def layers(*ids: int) -> Callable[[Place], None]:
    def change(place: Place) -> None:
        place.recipe["extract"]["layers"] = list(ids)

    return change


def one_layer_more(place: Place) -> None:
    place.change_text(num_hidden_layers=5)


CASES = [
    Case("layers-in-range", layers(1, 2, 3, 9), "layer id 9 out of range"),
    Case("layers-last", one_layer_more, "ends with 4"),
    Case("layers-not-the-embedding", layers(0, 1, 2, 4), "holds 0"),
    Case("layers-states", states(layers=[1, 3, 2, 4]), "layers [1, 3, 2, 4]", with_states),
    Case("layers-before-the-norm", states(agreement=0.125), "agrees at 12.5% of 64", with_states),
    Case("layers-before-the-norm", states(positions=0), "of 0 positions", with_states),
]
