"""The `shards` backend: speculators' own command line reads our hidden-state shards through this.

Our own training does not need it (dataset.py). `write_view` writes the arrow view that goes with
it, one row a sample (`input_ids`, `loss_mask`, `seq_len`, `sample_id`), in the order of training;
conversion writes one, too. speculators asks for row numbers; `ShardsTransfer` turns
a row into its `sample_id` and reads that sample from the shards, so that no store is ever keyed
by a row number (rows move when data are shuffled or split, contents do not). The states go
from the memory map into torch without a copy. The price: the view repeats the token ids, 5
bytes a token against some 4,600 (SmolLM2) or 57,000 (Kimi-K2.5) of states.

Importing this module registers the backend; it must come before `speculators.train.config`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, disable_progress_bars, load_from_disk
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer

from kimi_eagle import files
from kimi_eagle.errors import RunError
from kimi_eagle.training.tensors import bfloat16_view

VIEW_FORMAT = "view/1"


class ShardsTransfer(HiddenStatesTransfer):
    """Reads samples by the `sample_id` that the arrow view gives for a row.

    Opens view and shards at the first read, in the process that reads (data workers are
    spawned and get a pickled copy without open files).
    """

    def __init__(self, view: str | Path, shards: Sequence[str | Path]):
        self.view, self.shards = str(view), [str(p) for p in shards]
        self._ids: Any = None
        self._set: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"view": self.view, "shards": self.shards, "_ids": None, "_set": None}

    def setup(self) -> None:
        """Open the view's `sample_id` column and the shards, once a process."""
        if self._set is None:
            from kimi_eagle.shards.store import ShardSet

            self._ids = load_from_disk(self.view).with_format(None).data.column("sample_id")
            self._set = ShardSet(self.shards)

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor]:
        """Sample of row `file_idx`: hidden_states bfloat16 [T, L, H], token_ids int64 [T].

        hidden_states of raw shards is a view of the memory map: read it, never write to it. Raises
        RunError when no shard has the sample or its bytes are damaged: a hole in the data must not
        pass as a skipped row.
        """
        self.setup()
        sample = self._set.proven(self._set.number(self._ids[file_idx].as_py()))
        return {
            "hidden_states": bfloat16_view(sample["hidden_states"]),
            "token_ids": torch.from_numpy(np.asarray(sample["token_ids"], dtype=np.int64)),
        }

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> None:
        """Nothing is generated while training: every sample is in a shard."""
        raise RunError("the shards backend cannot generate hidden states")


def write_view(shards: Sequence[str | Path], order: Sequence[str], out: Path) -> int:
    """Write the arrow view of the samples `order` (ids) to the folder `out`; tokens in it.

    Needs the token ids of all samples in memory once. A view of the same samples from the same
    shards that is already there is kept. Raises RunError for a sample that no shard has, and
    when there are fewer than 2 (one to learn from, one to validate with).
    """
    from kimi_eagle.shards.store import ShardSet

    if len(order) < 2:
        raise RunError(f"{len(order)} samples to train on", expected="at least 2")
    want = {
        "format": VIEW_FORMAT,
        "digest": files.digest([sorted(Path(p).name for p in shards), list(order)]),
    }
    have = files.read_json(out / "view.json")
    if isinstance(have, dict) and want.items() <= have.items():
        return have["tokens"]

    store = ShardSet([str(p) for p in shards])
    ids, masks, lengths = [], [], []
    for sample_id in order:
        token_ids, mask = store.tokens_at(store.number(sample_id))
        ids.append(np.asarray(token_ids, dtype=np.int32))
        masks.append(np.asarray(mask, dtype=np.int8))
        lengths.append(len(ids[-1]))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    table = pa.table(
        {
            "input_ids": pa.LargeListArray.from_arrays(offsets, np.concatenate(ids)),
            "loss_mask": pa.LargeListArray.from_arrays(offsets, np.concatenate(masks)),
            "seq_len": pa.array(lengths, pa.int32()),
            "sample_id": pa.array(list(order), pa.string()),
        }
    )
    disable_progress_bars()
    data = Dataset(table)
    # As speculators' preprocessing leaves it (0.9.0): rows come as int64 tensors.
    data.set_format("torch")
    temp = files.temporary_name(out)
    try:
        data.save_to_disk(str(temp))
        (temp / "view.json").write_text(json.dumps({**want, "tokens": int(offsets[-1])}))
        for file in temp.iterdir():
            files.fsync_file(file)
        files.fsync_dir(temp)
        if out.exists():
            shutil.rmtree(out)
        temp.rename(out)
        files.fsync_dir(out.parent)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    return int(offsets[-1])


class ShardsBackend(HiddenStatesBackend):
    """speculators' plug-in hooks."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """`--shards FOLDER`: where the shards of the run lie (one value: nargs is not kept)."""
        parser.add_argument("--shards", type=str, default=".", help="folder of shards")

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """No server is launched for this backend."""

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> ShardsTransfer:
        """The transfer for speculators' own command line: view at `data_path`."""
        return ShardsTransfer(data_path, sorted(Path(args.shards).glob("*.safetensors")))

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """Shards are written by the extract stage, not by a running server."""
        raise RunError("shards are written by the extract stage")


if "shards" not in HiddenStatesBackend.registry:
    HiddenStatesBackend.register("shards")(ShardsBackend)
