"""Layer ids that name other states than are meant, and shards that hold others than they say."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cases_verifier import beside
from place import HIDDEN, Case, Place

from kimi_eagle.record import Record
from kimi_eagle.rundir import StageDir

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

    with ShardWriter(place.path, "00000.1", layers, HIDDEN, meta) as writer:
        for number in range(2):
            states = np.full((3, len(layers), HIDDEN), 0x3F80, np.uint16)
            ids, mask = np.arange(3, dtype=np.int32), np.array([False, True, True])
            writer.add(f"sample-{number}", states, ids, mask)
    files = [{"name": p.name, "bytes": p.stat().st_size} for p in place.path.glob("00000.1.*")]
    data = {
        "unit": "00000",
        "key": "0123",
        "state": "done",
        "attempt": 1,
        "files": files,
        "parts": {"layers": LAYERS},
        "info": {"probe": {"agreement": agreement, "positions": positions}},
    }
    record = Record(FilesBeside(place.path), data)
    place.given["records"] = lambda stage: [record] if stage == "extract" else []
    place.given["freed"] = set()


class FilesBeside(StageDir):
    """A stage whose files lie in its own folder."""

    @property
    def files(self) -> Path:
        return self.path


def states(**changes: Any) -> Callable[[Place], None]:
    return lambda place: with_states(place, **changes)


def layers(*ids: int) -> Callable[[Place], None]:
    def change(place: Place) -> None:
        place.recipe["extract"]["layers"] = list(ids)

    return change


def one_layer_more(place: Place) -> None:
    """Five layers, with ids for four."""
    place.change_text(num_hidden_layers=5)
    beside(place, "language_model.model.layers.4.input_layernorm.weight")


def shard_gone(place: Place) -> None:
    with_states(place)
    (place.path / "00000.1.safetensors").unlink()


def shard_cut(place: Place) -> None:
    with_states(place)
    os.truncate(place.path / "00000.1.safetensors", 100)


def other_index(place: Place) -> None:
    """As large as recorded, and no index."""
    with_states(place)
    file = place.path / "00000.1.index.parquet"
    file.write_bytes(bytes(file.stat().st_size))


CASES = [
    Case("layers-in-range", layers(1, 2, 3, 9), "layer id 9 out of range"),
    Case("layers-last", one_layer_more, "ends with 4"),
    Case("layers-last", layers(1, 2, 3), "fix: write [1, 2, 3, 4]"),
    Case("layers-not-the-embedding", layers(0, 1, 2, 4), "holds 0"),
    Case("layers-states-whole", shard_gone, "states: missing", with_states),
    Case("layers-states-whole", shard_cut, "states: 100 bytes, recorded", with_states),
    Case("layers-states-whole", other_index, "index", with_states),
    Case("layers-states", states(layers=[1, 3, 2, 4]), "layers [1, 3, 2, 4]", with_states),
    Case("layers-before-the-norm", states(agreement=0.125), "agrees at 12.5% of 64", with_states),
    Case("layers-before-the-norm", states(positions=0), "of 0 positions", with_states),
]
