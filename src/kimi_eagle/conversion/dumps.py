"""Dumps of speculators 0.3.0 and 0.4.0 (`data_{i}.pt`), as a source of `convert`.

What they are, by the packages themselves (speculators 0.3.0 and 0.4.0 on PyPI, and
scripts/data_generation_offline.py of that time):
- one `torch.save` a sample: `input_ids` int64 [T], `loss_mask` int64 [T], `hidden_states` a list
  of [T, H], one a layer (train/data.py, standardize_data_v1); beside them `data_config.json` with
  hidden_states.layer_ids, model.target_model_path, speculators_version (config_generator.py);
- id i is what leaves layer i, counted from 0 (data_generation/custom_worker.py takes
  `hidden_states + residual` after `layer(...)`), so it is what enters layer i + 1: our id i + 1.
  [2, 15, 27, 29] of 30 layers are our [3, 16, 28, 30];
- whatever the order in which ids were asked for, states come in the order of layers, each once
  (`_layer_ids` is a set, looked into while the layers run);
- the last layer is taken like all others, before the final norm, which comes a few lines later.
  Builds between 0.2.0 and 0.3.0 took it after the norm: with them, or where no config says which
  version it was, a verifier's own norm tells (`_normed`).
- 0.3.0 lays a batch's states end to end and cuts them by the samples' lengths. Where the engine
  computed fewer tokens than it was given (a prompt over the 8,192 tokens of a step, a cached
  prefix), every later sample of the batch is shifted and the last one is too short. So a short
  sample means that others are wrong, too, without a sign: that is refused, never skipped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle import files
from kimi_eagle.conversion.sources import Bad, Sample, Source, fault_of, guarded
from kimi_eagle.data.rows import sample_id
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.shards.codecs import finite

CONFIG = "data_config.json"
KNOWN = re.compile(r"0\.[34]\.\d+(\.post\d+)?")
"""Releases whose meaning is known."""
LOOKED_AT = 256
"""Tokens that `_normed` looks at."""


class DumpSource(Source):
    """data_{i}.pt in order of i; a number that is missing between others is `missing`."""

    kind = "pt"

    def __init__(
        self,
        path: Path,
        layers: Sequence[int] | None = None,
        num_layers: int | None = None,
        verifier: Any = None,
        meta: dict[str, str] | None = None,
    ):
        """layers: ids as the dumps' own writer counted them. verifier: an open Verifier.

        UsageError where the meaning is not sure, with what is missing.
        """
        self.path = path
        self._files = _listing(path)
        config = _config(path)
        self._version = str(config.get("speculators_version", ""))
        old_ids = self._old_ids(layers, config)
        count, how = _num_layers(num_layers, verifier, config)
        missing = []
        if old_ids is None:
            missing.append(f"the layer ids ({CONFIG}, or --layers as the dumps were made with)")
        if count is None:
            missing.append("how many layers the model has (--num-layers N or --verifier DIR)")
        if config and not KNOWN.fullmatch(self._version) and verifier is None:
            missing.append(
                f"what speculators {self._version or '?'} took of the last layer "
                "(--verifier DIR tells: its norm does)"
            )
        if missing:
            raise UsageError(f"not known: {'; '.join(missing)}", where=path)
        if old_ids[-1] != count - 1:
            raise UsageError(
                f"the last layer dumped is {old_ids[-1]} of 0..{count - 1} ({how})",
                where=path,
                expected=f"{count - 1}: what leaves the last layer is what a draft learns",
            )
        self.layers = tuple(i + 1 for i in old_ids)
        self._numbers = _numbers(path, self._files)
        self.weights = np.asarray([self._files.get(i, 0) for i in self._numbers], np.int64)
        self.bytes = int(self.weights.sum())
        first = self._first()
        self.hidden_size = first.shape[-1]
        self.notes = self._judge(first, verifier, config)
        self._meta = {**_engine(config), **(meta or {})}

    @property
    def state_bytes(self) -> int:
        # A file is the states, 16 bytes a token and a kilobyte or two of wrapping.
        return int(self.bytes * 0.95)

    def identity(self) -> dict[str, Any]:
        digest = files.digest(sorted(self._files.items()))
        return {"kind": self.kind, "digest": digest, "layers": list(self.layers)}

    def name(self, number: int) -> str:
        return str(self._path(number))

    @guarded
    def tokens_of(self, number: int) -> tuple[str, np.ndarray, np.ndarray] | Bad:
        data = self._read(number)
        if isinstance(data, Bad):
            return data
        ids, mask = data["input_ids"], data["loss_mask"]
        return sample_id(ids, mask), ids, mask

    def meta(self, number: int) -> Mapping[str, str]:
        return self._meta

    @guarded
    def load(self, number: int) -> Sample | Bad:
        import torch

        data = self._read(number)
        if isinstance(data, Bad):
            return data
        if fault := _flipped(self._path(number)):
            return Bad("damaged", fault)
        ids, mask, parts = data["input_ids"], data["loss_mask"], data["hidden_states"]
        lengths = {len(p) for p in parts}
        if lengths != {len(ids)}:
            what = f"states of {min(lengths)} tokens for {len(ids)} token ids"
            if KNOWN.fullmatch(self._version) and not self._version.startswith("0.3."):
                return Bad("damaged", what)
            return Bad("doubtful", f"{what}: the samples before it in its batch are shifted, too")
        try:
            states = torch.stack(parts, 1).contiguous()
        except RuntimeError as e:
            return Bad("damaged", str(e))
        bits = states.view(torch.int16).numpy().view(np.uint16)
        if bits.shape[2] != self.hidden_size:
            return Bad("damaged", f"hidden size {bits.shape[2]}, elsewhere {self.hidden_size}")
        if not finite(bits):
            return Bad("damaged", "inf or NaN in the states")
        return Sample(sample_id(ids, mask), bits, ids, mask, meta=self._meta)

    def _path(self, number: int) -> Path:
        return self.path / f"data_{self._numbers[number]}.pt"

    def _read(self, number: int) -> dict[str, Any] | Bad:
        """input_ids int32 [T], loss_mask bool [T], hidden_states [L] x bfloat16 [t, H] (mapped)."""
        path = self._path(number)
        if self._numbers[number] not in self._files:
            return Bad("missing", "it is not there")
        data = _load(path)
        if isinstance(data, str):
            return Bad("damaged", data)
        if fault := _form(data, len(self.layers)):
            return Bad("damaged", fault)
        for name in ("input_ids", "loss_mask"):
            if fault := _not_whole_numbers(data[name]):
                return Bad("damaged", f"{name}: {fault}")
        ids, mask = (data[k].numpy() for k in ("input_ids", "loss_mask"))
        if ids.shape != mask.shape or not len(ids):
            return Bad("damaged", f"token ids {ids.shape}, loss mask {mask.shape}")
        if ids.min() < 0 or ids.max() >= 2**31 or not np.isin(mask, (0, 1)).all():
            return Bad("damaged", "token ids or loss mask out of range")
        return {
            "input_ids": ids.astype(np.int32),
            "loss_mask": mask.astype(np.bool_),
            "hidden_states": data["hidden_states"],
        }

    def _old_ids(self, given: Sequence[int] | None, config: dict[str, Any]) -> list[int] | None:
        ids = given if given is not None else config.get("hidden_states", {}).get("layer_ids")
        if ids is None:
            return None
        listed = config.get("hidden_states", {}).get("layer_ids", ids)
        if sorted(set(ids)) != sorted(set(listed)):
            raise UsageError(
                f"--layers {list(ids)}", where=self.path, expected=f"{listed} ({CONFIG})"
            )
        return sorted(set(ids))

    def _first(self) -> Any:
        """The last layer's states of the first sample that can be read: bfloat16 [T, H]."""
        for number in range(min(len(self), 100)):
            if self._numbers[number] not in self._files:
                continue
            data = _load(self._path(number))
            if isinstance(data, str):
                continue
            if fault := _form(data, len(self.layers)):
                raise UsageError(fault, where=self._path(number))
            if len(last := data["hidden_states"][-1]):
                return last
        raise UsageError("no dump that can be read", where=self.path)

    def _judge(self, last: Any, verifier: Any, config: dict[str, Any]) -> list[str]:
        """Refuse what the verifier shows to be wrong; -> what is taken for granted."""
        size = config.get("model", {}).get("hidden_size", self.hidden_size)
        if verifier is not None:
            size = verifier.hidden_size
            if size == self.hidden_size and _normed(last, *verifier.final_norm()):
                raise UsageError(
                    "the last state was taken after the final norm",
                    where=self.path,
                    expected="before it, as speculators 0.3.0 and 0.4.0 do",
                    fix="there is no way back from normed states: extract them again",
                )
        if size != self.hidden_size:
            raise UsageError(
                f"states of hidden size {self.hidden_size}", where=self.path, expected=str(size)
            )
        if verifier is None and not config:
            return [
                "no data_config.json: taken as dumps of speculators 0.3.0 or 0.4.0, whose last "
                "state is before the final norm (--verifier DIR would show it)"
            ]
        return []


def _normed(states: Any, weight: Any, eps: float) -> bool:
    """Whether states [T, H] are what RMSNorm with this weight gives (plain, or 1 + weight).

    Divided by the weight, a normed state has a mean square of 1, whatever the token.
    """
    import torch

    x = states[:LOOKED_AT].float()
    for w in (torch.as_tensor(weight).float(), 1 + torch.as_tensor(weight).float()):
        sure = w.abs() > 1e-3
        rms = (x[:, sure] / w[sure]).square().mean(-1).sqrt()
        if bool(((rms - 1).abs() < 0.03).all()):
            return True
    return False


def _load(path: Path) -> Any:
    """What torch.save wrote, mapped; or what is wrong with it. Never runs code of the file."""
    import pickle

    import torch

    try:
        return torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError:
        return "holds more than plain tensors (or is cut short); it is not opened"
    except Exception as e:  # zlib.error, RuntimeError, KeyError, UnicodeDecodeError, ...
        return fault_of(e, path)


def _flipped(path: Path) -> str | None:
    """What the file's own CRC-32s (it is a zip) say; torch does not look at them."""
    import zipfile

    try:
        with zipfile.ZipFile(path) as file:
            name = file.testzip()
    except Exception as e:  # BadZipFile, zlib.error, NotImplementedError, OSError, ...
        return fault_of(e, path)
    return f"the bytes of {name} are not those that were written (CRC-32)" if name else None


def _form(data: Any, count: int) -> str | None:
    """What keeps a loaded dump from being one of 0.3.0's with `count` layers."""
    import torch

    if not isinstance(data, dict):
        return f"holds a {type(data).__name__}, expected a dict"
    if "hidden_state" in data or "target" in data:
        return (
            "a dump from before 0.3.0 (hidden_state, target): its layers are fused and nothing "
            "says which they are"
        )
    if lost := {"input_ids", "loss_mask", "hidden_states"} - set(data):
        return f"no {sorted(lost)[0]}"
    parts = data["hidden_states"]
    if not isinstance(parts, (list, tuple)) or not all(isinstance(p, torch.Tensor) for p in parts):
        return "hidden_states is not a list of tensors"
    if len(parts) != count:
        return f"states of {len(parts)} layers for {count} layer ids"
    if kinds := {p.dtype for p in parts} - {torch.bfloat16}:
        return f"states {kinds.pop()}, expected torch.bfloat16 (others would be rounded)"
    if any(p.ndim != 2 for p in parts):
        return f"states {[list(p.shape) for p in parts]}, expected [tokens, hidden] each"
    if any(p.is_meta or p.layout != torch.strided for p in parts):
        return "states without values (meta), or sparse"
    return None


def _not_whole_numbers(data: Any) -> str | None:
    """What keeps it from being [T] whole numbers; nothing is ever cast to them."""
    import torch

    if not isinstance(data, torch.Tensor):
        return f"a {type(data).__name__}, expected a tensor"
    if data.is_meta or data.layout != torch.strided or data.is_quantized:
        return "a tensor without plain values"
    if data.dtype.is_floating_point or data.dtype.is_complex or data.ndim != 1:
        return f"{data.dtype} {list(data.shape)}, expected whole numbers [tokens]"
    return None


def _config(path: Path) -> dict[str, Any]:
    """data_config.json, empty where there is none."""
    where = path / CONFIG
    if not where.exists():
        return {}
    data = files.read_json(where)
    if not isinstance(data, dict):
        raise UsageError("cannot be read", where=where, expected="speculators' data_config.json")
    for name in ("hidden_states", "model", "reproducibility"):
        if not isinstance(data.get(name, {}), dict):
            raise UsageError(f"{name} cannot be read", where=where, expected="an object")
    ids = data.get("hidden_states", {}).get("layer_ids", [0])
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise UsageError(
            f"hidden_states.layer_ids {ids} cannot be read", where=where, expected="layer ids"
        )
    return data


def _num_layers(given: int | None, verifier: Any, config: dict[str, Any]) -> tuple[int | None, str]:
    """(layers of the model, where that is from)."""
    if verifier is not None:
        if given not in (None, verifier.num_layers):
            raise UsageError(
                f"--num-layers {given}", where=verifier.path, expected=str(verifier.num_layers)
            )
        return verifier.num_layers, str(verifier.path)
    if given is not None:
        return given, "--num-layers"
    model = config.get("model", {}).get("target_model_path", "")
    if isinstance(model, str) and model and (Path(model) / "config.json").is_file():
        from kimi_eagle.verifier import Verifier

        return Verifier(Path(model)).num_layers, model
    return None, ""


def _engine(config: dict[str, Any]) -> dict[str, str]:
    """Metadata about who computed the states."""
    if not config:
        return {}
    versions = config.get("reproducibility", {}).get("package_versions", {})
    model = config.get("model", {}).get("target_model_path", "")
    return {"engine": files.to_json({"dumped_by": versions, "model": model})}


def _numbers(path: Path, found: dict[int, int]) -> list[int]:
    """From the first to the last, with those between that are missing."""
    first, last = min(found), max(found)
    if last - first > 10 * len(found) + 1000:
        raise UsageError(
            f"numbers run from {first} to {last}, {len(found)} files are there",
            where=path,
            fix="move the files that do not belong here",
        )
    return list(range(first, last + 1))


def _listing(path: Path) -> dict[int, int]:
    """i -> bytes of every data_{i}.pt."""
    found = {}
    for file in path.glob("data_*.pt"):
        if (number := file.stem.removeprefix("data_")).isdigit():
            found[int(number)] = file.stat().st_size
    if not found:
        raise RunError("no dumps here", where=path, expected="data_0.pt, ...")
    return found
