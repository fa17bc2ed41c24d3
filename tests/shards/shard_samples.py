"""Samples by chance, and shards of them, for the tests of this room."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from kimi_eagle.shards import ShardWriter

LAYERS, HIDDEN = (2, 15, 27, 30), 24
META = {"verifier_id": "abc", "engine": {"vllm": "0.31.0", "dtype": "bfloat16"}}


def make(count: int = 7, seed: int = 0) -> list[tuple[str, torch.Tensor, np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        n = int(rng.integers(1, 40))
        states = torch.from_numpy(rng.normal(size=(n, len(LAYERS), HIDDEN)) * 300).bfloat16()
        ids = rng.integers(0, 49152, n).astype(np.int32)
        found.append((f"{seed}-{i}", states, ids, rng.random(n) < 0.5))
    return found


CODECS = ("raw", "lossless", "fp8")


def write(folder: Path, samples, stem: str = "u0", **more) -> Path:
    with ShardWriter(folder, stem, LAYERS, HIDDEN, META, **more) as writer:
        for sample in samples:
            writer.add(*sample)
    return folder / f"{stem}.safetensors"


def bits(states: torch.Tensor) -> np.ndarray:
    return states.view(torch.int16).numpy().view(np.uint16)
