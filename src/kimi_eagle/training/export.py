"""`export`: a checkpoint as `draft/`, the directory that vLLM loads.

Reads `model.safetensors` and `config.json` of a checkpoint and the verifier's embedding; writes
config.json and model.safetensors to a temporary folder that is fsynced and then renamed. Form as
vLLM 0.31.0 wants it (transformers_utils/configs/speculators, models/llama_eagle3.py): the
speculators config with `speculators_config.verifier.name_or_path` absolute, tensors without a
`model.` prefix, `d2t` as int64 offsets. The embedding is written although vLLM shares an equal
one with the verifier: with pipeline parallelism it cannot. The price: for SmolLM2 56 of 70 MB.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from speculators.utils.loading import load_model_layers

from kimi_eagle import files
from kimi_eagle.errors import RunError
from kimi_eagle.vocab import offset_fault

_EMBEDDING = "embed_tokens.weight"


def export(
    checkpoint: Path, out: Path, verifier: Any, dtype: Literal["bfloat16", "float32"]
) -> Path:
    """Write `out` from a checkpoint of `loop.train`; gives `out`. An older `out` is replaced.

    verifier: an open Verifier (its `path` is used). dtype: type of the floating-point weights.
    Raises RunError for a checkpoint that is torn, has a weight that is not finite, or whose d2t
    does not name ascending tokens of the verifier.
    """
    try:
        tensors = load_file(checkpoint / "model.safetensors")
        config = json.loads((checkpoint / "config.json").read_bytes())
    except (OSError, ValueError, SafetensorError) as e:
        raise RunError(f"not a whole checkpoint: {e}", where=checkpoint) from None
    path = Path(verifier.path).resolve()
    if _EMBEDDING not in tensors:
        tensors.update(load_model_layers([_EMBEDDING], str(path)))
    kind = getattr(torch, dtype)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            if not torch.isfinite(tensor).all():
                raise RunError(f"weight {name} is not finite", where=checkpoint)
            tensors[name] = tensor.to(kind).contiguous()
    vocab_size = config["transformer_layer_config"]["vocab_size"]
    if "d2t" in tensors:
        check_d2t(tensors["d2t"], vocab_size, where=checkpoint, t2d=tensors.get("t2d"))
    elif config["draft_vocab_size"] != vocab_size:
        raise RunError("no d2t in the weights", where=checkpoint)

    # save_pretrained names the Python class and a copied source file; neither is needed to load.
    config["architectures"] = ["Eagle3Speculator"]
    config.pop("auto_map", None)
    config["dtype"] = dtype
    config["transformer_layer_config"]["dtype"] = dtype
    config["speculators_config"]["verifier"]["name_or_path"] = str(path)

    out.parent.mkdir(parents=True, exist_ok=True)
    temp = files.temporary_name(out)
    try:
        temp.mkdir()
        save_file(tensors, temp / "model.safetensors", metadata={"format": "pt"})
        (temp / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for file in temp.iterdir():
            file.chmod(0o644)  # safetensors makes its files readable by the owner alone
            files.fsync_file(file)
        files.fsync_dir(temp)
        _replace(temp, out)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    return out


def check_d2t(
    d2t: torch.Tensor, vocab_size: int, *, where: object, t2d: torch.Tensor | None = None
) -> None:
    """Refuse a mapping that is not offsets (target = i + d2t[i]) to ascending tokens.

    vLLM adds arange to d2t itself: absolute ids would be silently wrong.
    """
    if fault := offset_fault(d2t.numpy(), vocab_size, None if t2d is None else t2d.numpy()):
        raise RunError(
            f"d2t does not map to ascending tokens of the verifier: {fault}",
            where=where,
            expected=f"offsets, i + d2t[i] in [0, {vocab_size})",
        )


def _replace(temp: Path, out: Path) -> None:
    """Rename `temp` to `out`; an older `out` is moved away first and then removed."""
    old = files.temporary_name(out)
    if out.exists():
        out.rename(old)
    temp.rename(out)
    files.fsync_dir(out.parent)
    shutil.rmtree(old, ignore_errors=True)
