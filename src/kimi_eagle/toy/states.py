"""The engine's states of the toy beside transformers': one process, one JSON file of distances.

    python -m kimi_eagle.toy.states SPEC.json OUT.json

A process of its own because vLLM cannot be loaded twice reliably in one. Sequences go through the
engine alone, then all together, then all in the other order: how much two batch compositions
differ is the engine's own noise, the yardstick for how much it may differ from transformers.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kimi_eagle.recipe import EngineSection

ALL = 0.03
"""Relative L2 over all tokens of a layer that engine and transformers may differ by in bf16."""
EACH = 0.05
"""The same for each single sample."""


def compare(
    model: Path, batch: Sequence[Sequence[int]], layers: Sequence[int], engine: EngineSection
) -> dict[str, Any]:
    """Distances by layer between this engine's states and transformers'.

    -> {"all": {layer: relative L2 over all tokens of sequences run alone}, "each": {layer: the
    worst sample's}, "noise": {layer: together against alone}, "noise_order": {layer: the other
    order}, "samples", "tokens", "tp", "load_seconds", "tokens_per_second" (together)}.
    """
    import torch

    from kimi_eagle.capture.engine import ExtractionEngine
    from kimi_eagle.toy import reference

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kimi-eagle-") as spool:
        with ExtractionEngine(model, engine, layers, Path(spool)) as e:
            loaded = time.monotonic()
            alone = [next(e.extract([ids]))[1] for ids in batch]
            begun = time.monotonic()
            together = [s for _, s, _ in e.extract(batch)]
            seconds = time.monotonic() - begun
            turned = [s for _, s, _ in e.extract(list(batch)[::-1])][::-1]
    true_model = reference.load(model)
    truth = [reference.states(true_model, ids, layers) for ids in batch]

    def by_layer(ours: list[Any], theirs: list[Any]) -> dict[str, float]:
        a, b = torch.cat(ours), torch.cat(theirs)
        return {
            str(k): round(reference.relative(a[:, i], b[:, i]), 5) for i, k in enumerate(layers)
        }

    each = [by_layer([a], [b]) for a, b in zip(alone, truth, strict=True)]
    tokens = sum(map(len, batch))
    return {
        "all": by_layer(alone, truth),
        "each": {str(k): max(d[str(k)] for d in each) for k in layers},
        "noise": by_layer(together, alone),
        "noise_order": by_layer(turned, together),
        "samples": len(batch),
        "tokens": tokens,
        "tp": engine.tp,
        "dtype": engine.dtype,
        "load_seconds": round(loaded - started, 1),
        "tokens_per_second": round(tokens / seconds, 1),
    }


def main(argv: list[str]) -> int:
    """Child: SPEC.json {model, batch, layers, engine} in, OUT.json out."""
    spec = json.loads(Path(argv[0]).read_text())
    found = compare(
        Path(spec["model"]), spec["batch"], spec["layers"], EngineSection(**spec["engine"])
    )
    Path(argv[1]).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
