"""Kimi-K2.5-INT4 as it lies on disk, without its bytes: true headers over files full of holes.

Names, shapes, dtypes and the file of each tensor are those of the published checkpoint
(SOURCES.md, "Weights"): 208,550 tensors in 64 safetensors files, 595 GB apparent, 52 MB real (the
headers and the index). Whatever reads headers, sizes, names and configuration sees the real thing;
whoever reads a weight gets zeros. Needs a file system with sparse files.

By hand: `python tests/kimi/standin.py DIRECTORY`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
FILES = 64
COPIED = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
)
BYTES = {"BF16": 2, "F32": 4, "I32": 4}
GROUP, PACK = 32, 8
"""Weights a scale, and 4-bit weights an int32 (compressed-tensors' pack-quantized)."""
Tensor = tuple[str, str, tuple[int, ...]]
"""Name, dtype in safetensors' words, shape."""


def config() -> dict:
    """The published config.json."""
    return json.loads((HERE / "config.json").read_text())


def tensors() -> Iterator[tuple[int, Tensor]]:
    """(number of its file, tensor), file by file."""
    whole = config()
    text, vision = whole["text_config"], whole["vision_config"]
    for layer in range(text["num_hidden_layers"]):
        for name, dtype, shape in _layer(layer, text):
            yield layer + 1, (f"language_model.model.layers.{layer}.{name}", dtype, shape)
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    yield 62, ("language_model.model.embed_tokens.weight", "BF16", (vocab, hidden))
    yield 62, ("language_model.model.norm.weight", "BF16", (hidden,))
    yield 62, ("language_model.lm_head.weight", "BF16", (vocab, hidden))
    for tensor in _projector(vision):
        yield 63, tensor
    for tensor in _tower(vision):
        yield 64, tensor


def _layer(number: int, text: dict) -> Iterator[Tensor]:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    nope, rope, value = (text[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    q_rank, kv_rank = text["q_lora_rank"], text["kv_lora_rank"]
    shapes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_a_proj": (q_rank, hidden),
        "self_attn.q_a_layernorm": (q_rank,),
        "self_attn.q_b_proj": (heads * (nope + rope), q_rank),
        "self_attn.kv_a_proj_with_mqa": (kv_rank + rope, hidden),
        "self_attn.kv_a_layernorm": (kv_rank,),
        "self_attn.kv_b_proj": (heads * (nope + value), kv_rank),
        "self_attn.o_proj": (hidden, heads * value),
    }
    if number < text["first_k_dense_replace"]:
        shapes |= _mlp("mlp", hidden, text["intermediate_size"])
    else:
        width = text["moe_intermediate_size"]
        shapes |= _mlp("mlp.shared_experts", hidden, width * text["n_shared_experts"])
        experts = text["n_routed_experts"]
        shapes["mlp.gate"] = (experts, hidden)
        yield "mlp.gate.e_score_correction_bias", "F32", (experts,)
        for expert in range(experts):
            for name, shape in _mlp(f"mlp.experts.{expert}", hidden, width).items():
                yield from _packed(name, *shape)
    for name, shape in shapes.items():
        yield f"{name}.weight", "BF16", shape


def _mlp(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, int]]:
    return {
        f"{prefix}.gate_proj": (width, hidden),
        f"{prefix}.up_proj": (width, hidden),
        f"{prefix}.down_proj": (hidden, width),
    }


def _packed(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    """The three tensors that stand for a 4-bit matrix."""
    yield f"{name}.weight_packed", "I32", (rows, columns // PACK)
    yield f"{name}.weight_scale", "BF16", (rows, columns // GROUP)
    yield f"{name}.weight_shape", "I32", (2,)


def _projector(vision: dict) -> Iterator[Tensor]:
    width, out = vision["mm_hidden_size"], vision["text_hidden_size"]
    merged = width * math.prod(vision["merge_kernel_size"])
    for name, shape in {
        "pre_norm.weight": (width,),
        "pre_norm.bias": (width,),
        "proj.0.weight": (merged, merged),
        "proj.0.bias": (merged,),
        "proj.2.weight": (out, merged),
        "proj.2.bias": (out,),
    }.items():
        yield f"mm_projector.{name}", "BF16", shape


def _tower(vision: dict) -> Iterator[Tensor]:
    width, inner, patch = (
        vision[k] for k in ("vt_hidden_size", "vt_intermediate_size", "patch_size")
    )
    block = {
        "norm0.weight": (width,),
        "norm1.weight": (width,),
        "wqkv.weight": (3 * width, width),
        "wo.weight": (width, width),
        "mlp.fc0.weight": (inner, width),
        "mlp.fc1.weight": (width, inner),
    }
    shapes = {
        "patch_embed.proj.weight": (width, 3, patch, patch),
        "encoder.final_layernorm.weight": (width,),
    }
    for number in range(vision["vt_num_hidden_layers"]):
        shapes |= {f"encoder.blocks.{number}.{n}": shape for n, shape in block.items()}
    for name, shape in shapes.items():
        yield f"vision_tower.{name}", "BF16", shape
        yield f"vision_tower.{name.removesuffix('weight')}bias", "BF16", shape[:1]
    height, breadth = vision["init_pos_emb_height"], vision["init_pos_emb_width"]
    yield "vision_tower.patch_embed.pos_emb.weight", "BF16", (height, breadth, width)


def build(path: Path) -> Path:
    """Write the directory (a second or two, 52 MB real); returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        shutil.copy(HERE / name, path / name)
    # Stand-ins of three files that are Moonshot's: read by nothing that reads the weights.
    (path / "tiktoken.model").write_bytes(b"IQ== 0\n")
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if tools %}{{ tools_ts_str }}{% endif %}"
        "{% if add_generation_prompt %}<|im_assistant|>"
        "{% if thinking is false %}<think></think>{% else %}<think>{% endif %}{% endif %}"
    )
    code = "# Stands in for the code that makes tools_ts_str of a row's tools.\nraise ImportError\n"
    (path / "tokenization_kimi.py").write_text(code)
    places: dict[int, list[Tensor]] = {number: [] for number in range(1, FILES + 1)}
    for number, tensor in tensors():
        places[number].append(tensor)
    where: dict[str, str] = {}
    total = 0
    for number, found in places.items():
        name = f"model-{number:05d}-of-{FILES:06d}.safetensors"
        total += _hollow(path / name, found)
        where |= {tensor[0]: name for tensor in found}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return path


def _hollow(file: Path, found: list[Tensor]) -> int:
    """A safetensors file of true header and length, all its data a hole; returns bytes of data."""
    header: dict = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in sorted(found, key=lambda t: (-BYTES[t[1]], t[0])):
        end = at + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + at)
    return at


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
