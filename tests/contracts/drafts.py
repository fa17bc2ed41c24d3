"""A draft for the small world, as our export would write it, to break in one place at a time.

Written byte by byte (header, zeros, d2t, t2d), so that the cases need no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from place import BOS, HIDDEN, TURN, VOCAB, Place

from kimi_eagle.vocab import VocabMapping, from_offsets

TOKENS = np.array([*range(3, 124), *range(256, 263)])
"""The draft's 128 tokens: bytes, and all special tokens of the small world."""
D = len(TOKENS)
D2T = TOKENS - np.arange(D)
T2D = np.isin(np.arange(VOCAB), TOKENS)
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "I32": 4, "BOOL": 1}


def mapping(d2t: np.ndarray = D2T, t2d: np.ndarray | None = T2D, size: int = VOCAB) -> VocabMapping:
    return from_offsets(d2t, size, t2d)


@dataclass
class Draft:
    """config: config.json. tensors: name -> (dtype, shape, bytes or None for zeros)."""

    config: dict[str, Any]
    tensors: dict[str, tuple[str, list[int], bytes | None]]

    def set_d2t(self, d2t: np.ndarray) -> None:
        kind = {np.dtype("<i8"): "I64", np.dtype("<i4"): "I32"}[d2t.dtype]
        self.tensors["d2t"] = kind, [len(d2t)], d2t.tobytes()

    def set_t2d(self, t2d: np.ndarray) -> None:
        self.tensors["t2d"] = "BOOL", [len(t2d)], t2d.astype(bool).tobytes()

    def all_of_type(self, dtype: str) -> None:
        for name, (_, shape, _data) in self.tensors.items():
            if name not in ("d2t", "t2d"):
                self.tensors[name] = dtype, shape, None

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
        header, data = {}, b""
        for name, (dtype, shape, content) in self.tensors.items():
            block = bytes(math.prod(shape) * SIZES[dtype]) if content is None else content
            offsets = [len(data), len(data) + len(block)]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            data += block
        text = json.dumps(header).encode()
        whole = len(text).to_bytes(8, "little") + text + data
        (folder / "model.safetensors").write_bytes(whole)
        return folder


def good(place: Place) -> Draft:
    """The draft of the small world's recipe and verifier."""
    layer = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "intermediate_size": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": BOS,
        "eos_token_id": TURN,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 64.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": D,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "norm_before_fc": True,
        "norm_before_residual": True,
        "norm_output": True,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": str(place.model.resolve()), "architectures": []},
        },
    }
    shapes = {
        "fc.weight": [HIDDEN, 3 * HIDDEN],
        "input_norm.weight": [3 * HIDDEN],
        "norm.weight": [HIDDEN],
        "lm_head.weight": [D, HIDDEN],
        "embed_tokens.weight": [VOCAB, HIDDEN],
        "layers.0.hidden_norm.weight": [HIDDEN],
        "layers.0.input_layernorm.weight": [HIDDEN],
        "layers.0.post_attention_layernorm.weight": [HIDDEN],
        "layers.0.self_attn.q_proj.weight": [64, 2 * HIDDEN],
        "layers.0.self_attn.k_proj.weight": [64, 2 * HIDDEN],
        "layers.0.self_attn.v_proj.weight": [64, 2 * HIDDEN],
        "layers.0.self_attn.o_proj.weight": [HIDDEN, 64],
        "layers.0.mlp.gate_proj.weight": [128, HIDDEN],
        "layers.0.mlp.up_proj.weight": [128, HIDDEN],
        "layers.0.mlp.down_proj.weight": [HIDDEN, 128],
    }
    draft = Draft(config, {name: ("BF16", shape, None) for name, shape in shapes.items()})
    draft.set_d2t(D2T)
    draft.set_t2d(T2D)
    return draft


def with_draft(change: Callable[[Draft], None] = lambda _: None) -> Callable[[Place], None]:
    """The world with a draft and the run's mapping; `change` breaks the draft."""

    def apply(place: Place) -> None:
        draft = good(place)
        change(draft)
        place.given |= {"draft": draft.write(place.path / "draft"), "mapping": mapping()}

    return apply


def starting(change: Callable[[Draft], None] = lambda _: None) -> Callable[[Place], None]:
    """The world whose recipe starts from a draft; `change` breaks the draft."""

    def apply(place: Place) -> None:
        draft = good(place)
        change(draft)
        place.recipe["train"]["from"] = str(draft.write(place.path / "earlier"))

    return apply


def set_layer(**values: Any) -> Callable[[Draft], None]:
    """Keys of the decoder's config; None removes one."""

    def change(draft: Draft) -> None:
        layer = draft.config["transformer_layer_config"]
        layer.update(values)
        for key in [k for k, v in values.items() if v is None]:
            del layer[key]

    return change


def set_rope(**values: Any) -> Callable[[Draft], None]:
    """Keys of the rotary parameters; None removes one."""

    def change(draft: Draft) -> None:
        rope = draft.config["transformer_layer_config"]["rope_parameters"]
        rope.update(values)
        for key in [k for k, v in values.items() if v is None]:
            del rope[key]

    return change


def set_config(**values: Any) -> Callable[[Draft], None]:
    return lambda draft: draft.config.update(values)


def rename(old: str, new: str | None) -> Callable[[Draft], None]:
    """A tensor under another name; None: no longer there."""

    def change(draft: Draft) -> None:
        found = draft.tensors.pop(old)
        if new is not None:
            draft.tensors[new] = found

    return change


def latent(draft: Draft) -> None:
    """As vLLM serves a draft with the verifier's own kind of attention."""
    layer = draft.config.pop("transformer_layer_config")
    del draft.config["speculators_model_type"]
    draft.config |= layer | {"model_type": "deepseek_v3", "kv_lora_rank": 32}
    draft.config["architectures"] = ["Eagle3DeepseekV2ForCausalLM"]


def other_format(draft: Draft) -> None:
    """EAGLE-3 as its first authors write it: one flat config."""
    layer = draft.config.pop("transformer_layer_config")
    del draft.config["speculators_model_type"]
    draft.config |= layer | {"architectures": ["LlamaForCausalLMEagle3"]}


def published(draft: Draft) -> None:
    """As SpecForge and the first authors publish it: flat, `midlayer`, no names of ours."""
    other_format(draft)
    for key in ("speculators_config", "eagle_aux_hidden_state_layer_ids"):
        del draft.config[key]
    for key in ("norm_before_fc", "norm_before_residual", "norm_output"):
        del draft.config[key]
    del draft.tensors["input_norm.weight"], draft.tensors["embed_tokens.weight"]
    for name in [n for n in draft.tensors if n.startswith("layers.0.")]:
        rename(name, name.replace("layers.0.", "midlayer."))(draft)


def both(*changes: Callable[[Draft], None]) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        for one in changes:
            one(draft)

    return change


def pickled(place: Place) -> None:
    """Weights as torch wrote them long ago."""
    with_draft(published)(place)
    folder = place.path / "draft"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"weights")
