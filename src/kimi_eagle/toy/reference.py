"""The toy through transformers: what its states should be, counted as vLLM counts them.

Computes in float32 from the bf16 weights as they lie, so that what an engine differs is the
engine's own rounding. INT4 experts are unpacked first: transformers then runs plain matrices.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle.errors import RunError

if TYPE_CHECKING:
    import torch


def load(folder: Path) -> Any:
    """transformers' Kimi_K25ForConditionalGeneration with the directory's weights, float32.

    RunError where a tensor of the model is not in the files, or one of the files not in the model:
    the published names are then not what both libraries take them for.
    """
    import torch
    from safetensors.torch import load_file
    from transformers import Kimi_K25ForConditionalGeneration

    from kimi_eagle.toy import int4
    from kimi_eagle.toy.shape import in_transformers

    config = in_transformers(json.loads((folder / "config.json").read_text()))
    named: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        named |= load_file(file)
    model, told = Kimi_K25ForConditionalGeneration.from_pretrained(
        None,
        config=config,
        state_dict=int4.unpack(named),
        dtype=torch.float32,
        output_loading_info=True,
    )
    if wrong := {k: sorted(v)[:3] for k, v in told.items() if v}:
        raise RunError(f"transformers and the checkpoint disagree: {wrong}", where=folder)
    return model.eval()


def states(model: Any, token_ids: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
    """float32 [T, len(layers), H]: the states entering these layers; the number of layers means
    what enters the final norm (transformers' own last hidden state is after it)."""
    import torch

    last: list[torch.Tensor] = []
    norm = model.model.language_model.norm
    hook = norm.register_forward_pre_hook(lambda _module, given: last.append(given[0]))
    try:
        with torch.no_grad():
            out = model(
                input_ids=torch.tensor([list(token_ids)]),
                output_hidden_states=True,
                use_cache=False,
            )
    finally:
        hook.remove()
    count = model.config.text_config.num_hidden_layers
    found = [last[0] if k == count else out.hidden_states[k] for k in layers]
    return torch.stack([x[0] for x in found], dim=1)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative L2 distance: |ours - theirs| / |theirs| over all elements."""
    ours, theirs = ours.float(), theirs.float()
    return float((ours - theirs).norm() / theirs.norm())
