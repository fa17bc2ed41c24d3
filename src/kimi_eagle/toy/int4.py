"""Routed experts in INT4, as compressed-tensors packs them and the published checkpoint has them.

A matrix [N, K] becomes `weight_packed` int32 [N, K / 8], `weight_scale` bf16 [N, K / 32] and
`weight_shape` int32 [2]; values are round(w / scale) in -8..7, scale = max |w| of 32 neighbours
over 7.5 (compressed-tensors 0.17.0: quantization/utils, compressors/pack_quantized).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kimi_eagle.toy.shape import GROUP

if TYPE_CHECKING:
    import torch


def is_expert(name: str) -> bool:
    """A published name of a routed expert's matrix."""
    return ".mlp.experts." in name and name.endswith(".weight")


def pack(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The three tensors of one matrix [N, K] under their published names."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    rows, columns = weight.shape
    groups = weight.float().reshape(rows, columns // GROUP, GROUP)
    scale = (groups.abs().amax(-1) / 7.5).to(torch.bfloat16)
    whole = (groups / scale.float()[..., None]).round().clamp(-8, 7)
    stem = name.removesuffix(".weight")
    return {
        f"{stem}.weight_packed": pack_to_int32(
            whole.reshape(rows, columns).to(torch.int8), num_bits=4
        ),
        f"{stem}.weight_scale": scale,
        f"{stem}.weight_shape": torch.tensor([rows, columns], dtype=torch.int32),
    }


def unpack(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint with every packed matrix as the bf16 one that it stands for."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    found = {n: t for n, t in tensors.items() if not n.endswith(("_packed", "_scale", "_shape"))}
    for name, packed in tensors.items():
        if name.endswith(".weight_packed"):
            stem = name.removesuffix("_packed")
            shape = torch.Size(tensors[f"{stem}_shape"].tolist())
            whole = unpack_from_int32(packed, 4, shape).float()
            scale = tensors[f"{stem}_scale"].float().repeat_interleave(GROUP, dim=1)
            found[stem] = (whole * scale).to(torch.bfloat16)
    return found
