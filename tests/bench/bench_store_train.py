"""Training steps a second out of lossless (and fp8) shards, beside raw ones.

    python tests/bench/bench_store_train.py [--steps 24] [--pairs 6]

The same real states of SmolLM2 (24 samples of 512 tokens) as shards of each codec; the draft of
the embedded default, float32, one sample a step; every turn is a training of its own in a process
of its own. Counted is the time between the end of the fourth and of the last step. The codecs take
turns; medians of the pairs. The share of a step that waited for data is printed. Goal: lossless
0.98 of raw.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from states import SMOLLM2, smollm2, tokens_of_text
from turns import arguments, compared, in_turns, tell, trained

from kimi_eagle.shards import ShardSet, ShardWriter

CODECS = ("raw", "lossless", "fp8")
SAMPLES, LENGTH, DRAFT = 24, 512, 4096
WARM = 4


def make(folder: Path) -> None:
    states = smollm2(SAMPLES * LENGTH, LENGTH)
    ids = np.array(tokens_of_text(SAMPLES * LENGTH)).reshape(SAMPLES, LENGTH)
    for codec in CODECS:
        with ShardWriter(folder, codec, SMOLLM2, 576, {}, codec=codec) as writer:
            for i in range(SAMPLES):
                writer.add(f"{i:032x}", states[i], ids[i], np.arange(LENGTH) >= 16)
    counts = np.bincount(ids.ravel(), minlength=49152)
    kept = np.sort(np.argsort(-counts, kind="stable")[:DRAFT])
    np.save(folder / "d2t.npy", kept.astype(np.int64) - np.arange(DRAFT))
    np.save(folder / "t2d.npy", np.isin(np.arange(49152), kept))


def train(folder: Path, codec: str, steps: int) -> None:
    """Child: one training; prints seconds a step and the share of waiting."""
    from kimi_eagle.demo_model import ensure
    from kimi_eagle.recipe import parse
    from kimi_eagle.training.loop import train
    from kimi_eagle.verifier import open_verifier

    model = ensure()
    recipe = parse(
        {
            "name": "bench",
            "verifier": {"path": str(model)},
            "sources": [{"path": "unused.jsonl"}],
            "extract": {"layers": list(SMOLLM2)},
            "vocab": {"draft_vocab_size": DRAFT},
            "train": {
                "epochs": 10, "max_steps": steps, "seq_len": LENGTH, "optimizer": "muon",
                "lr": 2e-3, "dtype": "float32", "device": "cpu",
            },
            "benchmark": {"prompts": "unused.jsonl"},
        },
        where="bench",
        base=folder,
    )  # fmt: skip
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as work:
        result = train(
            recipe,
            open_verifier(model),
            ShardSet([folder / f"{codec}.safetensors"]),
            folder / "d2t.npy",
            folder / "t2d.npy",
            Path(work),
            should_stop=lambda: False,
            on_progress=lambda step: ends.append(time.perf_counter()),
        )
        lines = [json.loads(x) for x in result.curves.read_text().splitlines()]
    waits = [x["data_wait"] for x in lines if "data_wait" in x][WARM:]
    each = (ends[-1] - ends[WARM - 1]) / (len(ends) - WARM)
    tell([each, statistics.mean(waits)])


def main() -> int:
    args = arguments(__doc__, CODECS, pairs=6)
    if args.train:
        train(args.folder, args.train, args.steps)
        return 0
    with tempfile.TemporaryDirectory() as temp:
        make(Path(temp))
        found = in_turns(
            CODECS, args.pairs, lambda codec: trained(__file__, codec, Path(temp), args.steps)
        )
    good = 0.0
    for codec in CODECS:
        ratio, spread = compared([x[0] for x in found["raw"]], [x[0] for x in found[codec]])
        seconds, wait = (statistics.median(x) for x in zip(*found[codec], strict=True))
        print(
            f"{codec:8} {1 / seconds:.3f} steps/s  to raw {ratio:.3f} ({spread})"
            f"  waiting for data {wait:.2%}"
        )
        good = ratio if codec == "lossless" else good
    return 0 if good >= 0.98 else 1


if __name__ == "__main__":
    raise SystemExit(main())
