"""speculators' prepared dataset with one file of states a row, as a source of `convert`.

Reads DIR/*.arrow (`input_ids`, `loss_mask`) and DIR/hidden_states/hs_{i}.safetensors
(`hidden_states` BF16 [T, L, H], `token_ids` [T]), i being the number of the row: what speculators
0.5 to 0.9 write and its FileTransfer reads (hs_connectors 0.9.0, transfer.py). Neither says which
layers the states are of, so the user has to, unless a `states.json` of ours lies beside
(`to_speculators.py`). Their ids are vLLM's and ours: the state entering layer k, and the number of
layers for what leaves the last one, before the final norm.

A file of a row that was shuffled since would give another text's states without a word: rows
whose token ids differ are left out by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle import files
from kimi_eagle.conversion.sources import Bad, Sample, Source, fault_of, guarded
from kimi_eagle.data.rows import sample_id
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.shards.codecs import finite
from kimi_eagle.shards.layout import digest64

STATES = "hidden_states"
SIGN = "states.json"
FORMAT = "states/1"
COLUMNS = ("input_ids", "loss_mask")
PROOF = "kimi_eagle"
"""Metadata key of files of states that we wrote: JSON with sample_id and xxh3."""


def states_file(folder: Path, row: int) -> Path:
    """Where FileTransfer looks for a row's states."""
    return folder / STATES / f"hs_{row}.safetensors"


class SpeculatorsSource(Source):
    """Rows of the dataset, in order."""

    kind = "speculators"

    def __init__(
        self, path: Path, layers: Sequence[int] | None = None, meta: dict[str, str] | None = None
    ):
        """UsageError where layer ids are not known, or do not fit the states.

        layers: ids of the states, in order. meta: metadata that goes into the shards.
        """
        self.path = path
        self._data = _dataset(path)
        self._sizes = _listing(path / STATES)
        sign = _sign(path / SIGN)
        own = sign.get("layers")
        if layers is None and own is None:
            raise UsageError(
                "nothing here says which layers the states are of",
                where=path,
                fix="give --layers, as the server was told them (for example 2,15,27,30)",
            )
        if layers is not None and own is not None and list(layers) != list(own):
            raise UsageError(f"--layers {list(layers)}", where=path, expected=f"{own} ({SIGN})")
        self.layers = tuple(layers or own)
        self._meta = {**sign.get("meta", {}), **(meta or {})}
        count, self.hidden_size = self._shape()
        if count != len(self.layers):
            raise UsageError(
                f"{len(self.layers)} layer ids for states of {count} layers", where=path / STATES
            )
        lengths = [len(x) if x.is_valid else 0 for x in self._column("input_ids")]
        self.weights = np.asarray(lengths, np.int64)
        self.tokens = int(self.weights.sum())
        self.bytes = sum(self._sizes.values())

    @property
    def state_bytes(self) -> int:
        return self.tokens * len(self.layers) * self.hidden_size * 2

    def identity(self) -> dict[str, Any]:
        rows = [files.file_digest(Path(f["filename"])) for f in self._data.cache_files]
        digest = files.digest([rows, sorted(self._sizes.items())])
        return {"kind": self.kind, "digest": digest, "layers": list(self.layers)}

    def name(self, number: int) -> str:
        return f"{self.path}, row {number}"

    @guarded
    def tokens_of(self, number: int) -> tuple[str, np.ndarray, np.ndarray] | Bad:
        row = self._data[number : number + 1]
        if any(row.column(c).null_count for c in COLUMNS):
            return Bad("damaged", "no token ids or no loss mask")
        ids, mask = (_values(row.column(c)) for c in COLUMNS)
        if ids is None or mask is None:
            return Bad("damaged", "holes in token ids or loss mask")
        if len(ids) != len(mask) or not len(ids):
            return Bad("damaged", f"{len(ids)} token ids, loss mask of {len(mask)}")
        if ids.min() < 0 or ids.max() >= 2**31 or not np.isin(mask, (0, 1)).all():
            return Bad("damaged", "token ids or loss mask out of range")
        ids, mask = ids.astype(np.int32), mask.astype(np.bool_)
        return sample_id(ids, mask), ids, mask

    def meta(self, number: int) -> Mapping[str, str]:
        return self._meta

    @guarded
    def load(self, number: int) -> Sample | Bad:
        row = self.tokens_of(number)
        if isinstance(row, Bad):
            return row
        own_id, ids, mask = row
        path = states_file(self.path, number)
        if not path.exists():
            return Bad("missing", f"{path.name} is not there")
        if path.with_name(f"{path.name}.lock").exists():
            return Bad("missing", f"{path.name} is still being written ({path.name}.lock)")
        found = read_states(path)
        if isinstance(found, str):
            return Bad("damaged", f"{path.name}: {found}")
        states, own, proof = found
        if own.dtype.kind not in "iu" or own.ndim != 1:
            return Bad("damaged", f"{path.name}: token_ids {own.dtype} {list(own.shape)}")
        if not np.array_equal(own, ids):
            return Bad("missing", f"{path.name} holds the states of other token ids")
        if states.shape != (len(ids), len(self.layers), self.hidden_size):
            return Bad("damaged", f"{path.name}: states {states.shape} for {len(ids)} tokens")
        if not finite(states):
            return Bad("damaged", f"{path.name}: inf or NaN in the states")
        if proof.get("sample_id") == own_id:
            if digest64([states, ids, mask.view(np.uint8)]) != proof.get("xxh3"):
                return Bad("damaged", f"{path.name}: the bytes are not those that were written")
        return Sample(own_id, states, ids, mask, meta=self._meta)

    def _column(self, name: str) -> Any:
        for batch in self._data.select_columns([name]).iter(1000):
            yield from batch.column(name)

    def _shape(self) -> tuple[int, int]:
        """(layers, hidden size), from the first file that there is."""
        from safetensors import SafetensorError, safe_open

        for number in sorted(self._sizes)[:100]:
            path = states_file(self.path, number)
            try:
                with safe_open(path, "pt") as f:
                    if STATES not in f.keys():
                        continue
                    part = f.get_slice(STATES)
                    dtype, shape = part.get_dtype(), part.get_shape()
                    keys = set(f.keys())
            except (SafetensorError, OSError):
                continue
            if f"{STATES}_scales" in keys:
                raise UsageError(
                    "states of speculators' fp8 backend cannot be converted",
                    where=path,
                    expected="hidden_states in bfloat16",
                )
            if dtype != "BF16" or len(shape) != 3:
                raise UsageError(
                    f"states {dtype} {shape}", where=path, expected="BF16 [tokens, layers, hidden]"
                )
            return shape[1], shape[2]
        raise UsageError("no file of states that can be read", where=self.path / STATES)


def read_states(path: Path) -> tuple[np.ndarray, np.ndarray, dict[str, str]] | str:
    """(states uint16 [T, L, H], token ids, proof) of an hs file, or what is wrong with it."""
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as f:
            if missing := {STATES, "token_ids"} - set(f.keys()):
                return f"no {sorted(missing)[0]}"
            states, ids = f.get_tensor(STATES), f.get_tensor("token_ids")
            proof = proof_of(f.metadata())
    except SafetensorError as e:
        return f"{e}"
    except Exception as e:
        return fault_of(e, path)
    if states.dtype != torch.bfloat16:
        return f"states {states.dtype}, expected bfloat16"
    if ids.dtype.is_floating_point or ids.dtype.is_complex:
        return f"token_ids {ids.dtype}, expected whole numbers"
    return states.view(torch.int16).numpy().view(np.uint16), ids.numpy(), proof


def proof_of(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """{sample_id, xxh3} of a file that we wrote, else empty."""
    try:
        found = json.loads((metadata or {}).get(PROOF, "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _dataset(path: Path) -> Any:
    """The arrow dataset in a folder, rows as arrow tables."""
    from datasets import Dataset, load_from_disk

    try:
        data = load_from_disk(str(path))
    except Exception as e:  # datasets: FileNotFoundError, ArrowInvalid, KeyError, JSON errors, ...
        raise UsageError(f"not a dataset on disk: {e}", where=path) from None
    if not isinstance(data, Dataset):
        raise UsageError(f"a {type(data).__name__}", where=path, expected="one dataset")
    if lost := {"input_ids", "loss_mask"} - set(data.column_names):
        raise UsageError(
            f"no column {sorted(lost)[0]}",
            where=path,
            expected="what speculators prepare-data wrote",
        )
    for name in COLUMNS:
        if not _whole_numbers(found := data.features.arrow_schema.field(name).type):
            raise UsageError(
                f"column {name} is {found}", where=path, expected="a list of whole numbers a row"
            )
    return data.select_columns(list(COLUMNS)).with_format("arrow")


def _whole_numbers(kind: Any) -> bool:
    import pyarrow as pa

    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    lists = lists or pa.types.is_fixed_size_list(kind)
    return lists and (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type))


def _sign(where: Path) -> dict[str, Any]:
    """What we wrote beside the states: `layers` and `meta`; empty where nothing of ours is."""
    if not where.exists():
        return {}
    sign = files.read_json(where)
    if not isinstance(sign, dict):
        raise UsageError("cannot be read", where=where, expected=f"JSON of format {FORMAT}")
    if sign.get("format") != FORMAT:
        return {}
    layers, meta = sign.get("layers"), sign.get("meta", {})
    if not isinstance(layers, list) or not layers or not all(type(i) is int for i in layers):
        raise UsageError(f"layers {layers} cannot be read", where=where, expected="layer ids")
    if not isinstance(meta, dict) or not all(isinstance(v, str) for v in meta.values()):
        raise UsageError("meta cannot be read", where=where, expected="texts by name")
    return sign


def _listing(folder: Path) -> dict[int, int]:
    """Row -> bytes of every hs_{row}.safetensors."""
    found = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                number = entry.name.removeprefix("hs_").removesuffix(".safetensors")
                if entry.name == f"hs_{number}.safetensors" and number.isdigit():
                    found[int(number)] = entry.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            "no folder of states", where=folder, expected=f"hs_0.safetensors, ... in {STATES}/"
        ) from None
    return found


def _values(column: Any) -> np.ndarray | None:
    """The one list of a one-row column as int64; None where one of its values is none."""
    import pyarrow as pa

    values = column.combine_chunks().flatten()
    if values.null_count:
        return None
    return values.cast(pa.int64()).to_numpy(zero_copy_only=False)
