"""Small stores of hidden states in every format that `convert` reads: what its tests share.

The foreign ones are written as their own tools write them: the dataset through `datasets` and
safetensors, as speculators 0.9.0; the dumps through torch.save, as speculators 0.3.0's
scripts/data_generation_offline.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle.data.rows import sample_id
from kimi_eagle.shards import Shard, ShardWriter
from kimi_eagle.shards.folder import open_folder

LAYERS, HIDDEN = (3, 15, 27, 30), 24
OLD_IDS, DEPTH = [2, 14, 26, 29], 30
META = {"verifier_id": "v1", "engine": {"vllm": "0.31.0"}}


@dataclass(frozen=True)
class Sample:
    """states uint16 [T, L, H], ids int32 [T], mask bool [T]."""

    states: np.ndarray
    ids: np.ndarray
    mask: np.ndarray

    @property
    def id(self) -> str:
        return sample_id(self.ids, self.mask)


def make(count: int, seed: int = 0, hidden: int = HIDDEN, longest: int = 40) -> list[Sample]:
    """Samples of 2 to `longest` tokens, with the outliers that real states have."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        n = int(rng.integers(2, longest))
        values = rng.standard_normal((n, len(LAYERS), hidden), np.float32) * 3
        values[..., 0] *= 300
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        ids = rng.integers(0, 49152, n).astype(np.int32)
        found.append(Sample(bits, ids, rng.random(n) < 0.6))
    return found


def write_shards(
    folder: Path,
    samples: Sequence[Sample],
    codecs: Sequence[str] = ("raw",),
    each: int = 5,
    meta: dict[str, Any] = META,
) -> Path:
    """A folder of shards, `each` samples in one, their codecs in turn; no manifest."""
    folder.mkdir(parents=True)
    for k, start in enumerate(range(0, len(samples), each)):
        codec = codecs[k % len(codecs)]
        width = samples[0].states.shape[2]
        with ShardWriter(folder, f"u{k:03d}", LAYERS, width, meta, codec=codec) as writer:
            for s in samples[start : start + each]:
                writer.add(s.id, s.states, s.ids, s.mask)
    return folder


def write_speculators(folder: Path, samples: Sequence[Sample]) -> Path:
    """What speculators prepare-data and generate-offline-data leave."""
    import torch
    from datasets import Dataset, disable_progress_bars
    from safetensors.torch import save_file

    disable_progress_bars()
    rows = {
        "input_ids": [s.ids.tolist() for s in samples],
        "loss_mask": [s.mask.astype(int).tolist() for s in samples],
        "seq_len": [len(s.ids) for s in samples],
    }
    data = Dataset.from_dict(rows)
    data.set_format("torch")
    data.save_to_disk(str(folder))
    (folder / "hidden_states").mkdir()
    for i, s in enumerate(samples):
        tensors = {"hidden_states": as_torch(s.states), "token_ids": torch.from_numpy(s.ids).long()}
        save_file(tensors, folder / f"hidden_states/hs_{i}.safetensors")
    return folder


def as_torch(states: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(states.view(np.int16).copy()).view(torch.bfloat16)


def dump_of(s: Sample) -> dict[str, Any]:
    """What speculators 0.3.0 gives to torch.save."""
    import torch

    states = as_torch(s.states)
    return {
        "input_ids": torch.from_numpy(s.ids).long(),
        "hidden_states": [states[:, k].contiguous() for k in range(states.shape[1])],
        "loss_mask": torch.from_numpy(s.mask).long(),
    }


def write_dumps(
    folder: Path, samples: Sequence[Sample], config: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """data_{i}.pt and data_config.json. config: instead of 0.3.0's; {}: none. changes: in it."""
    import torch

    folder.mkdir()
    for i, s in enumerate(samples):
        torch.save(dump_of(s), folder / f"data_{i}.pt")
    if config is None:
        config = {
            "version": "2.0",
            "speculators_version": "0.3.0",
            "model": {"target_model_path": "org/model", "hidden_size": HIDDEN},
            "hidden_states": {"layer_ids": OLD_IDS},
            "reproducibility": {"package_versions": {"vllm": "0.11.0", "speculators": "0.3.0"}},
        }
    if config:
        (folder / "data_config.json").write_text(json.dumps({**config, **changes}))
    return folder


def contents(folder: Path) -> dict[str, str]:
    """sample_id -> content digest of every sample of a folder of shards, each read and proven."""
    found = {}
    for path in open_folder(folder):
        shard = Shard(path)
        assert list(shard.faults()) == []
        found |= dict(zip(shard.sample_ids, shard.index.digests, strict=True))
    return found


def same(folder: Path, samples: Sequence[Sample]) -> None:
    """The folder holds exactly these samples, bit for bit, in this order."""
    from kimi_eagle.shards import ShardSet

    store = ShardSet(open_folder(folder))
    assert store.ids == [s.id for s in samples]
    for number, s in enumerate(samples):
        found = store.at(number)
        assert np.array_equal(found["hidden_states"], s.states)
        assert np.array_equal(found["token_ids"], s.ids)
        assert np.array_equal(found["loss_mask"], s.mask)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes, but for what goes by temporary names."""
    paths = [p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".tmp-")]
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}
