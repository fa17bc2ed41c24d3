"""A directory with a draft model, read without torch: its config, its tensors' headers, its d2t.

Reads config.json, the safetensors headers, `d2t` and `t2d`; nothing else of the weights. Judges
little: it says what is there, and raises where that cannot be read at all. The forms are those of
speculators 0.9.0 (models/eagle3/config.py, model.py) and of what vLLM 0.31.0 loads
(model_executor/models/llama_eagle3.py, transformers_utils/configs/speculators).
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle.errors import UsageError
from kimi_eagle.verifier import Verifier
from kimi_eagle.vocab import VocabMapping, from_offsets

SAMPLED = 1 << 20
"""Bytes of each tensor that the digest reads: training changes all of a tensor, and a whole
Kimi-K2.5 draft is 7 GB."""

# What transformers 5.17.0 leaves out when it writes a config (to_diff_dict): its defaults.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
}
LATENT = ("deepseek", "kimi", "mistrallarge3", "mistral_large_3")
"""Words in the names of draft architectures with latent attention (vLLM 0.31.0, registry.py)."""


class DraftFiles:
    """One draft directory. Every property raises UsageError where the file behind it cannot be
    read."""

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser().absolute()

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json as it stands."""
        file = self.path / "config.json"
        try:
            data = json.loads(file.read_bytes())
        except FileNotFoundError:
            raise UsageError(
                "no config.json", where=self.path, expected="a draft directory"
            ) from None
        except (OSError, ValueError) as e:
            raise UsageError(f"config.json cannot be read: {e}", where=self.path) from None
        if not isinstance(data, dict):
            raise UsageError("config.json holds no object", where=self.path)
        return data

    @property
    def layer(self) -> dict[str, Any]:
        """The decoder's part of the config; all of it where the format is not speculators'."""
        found = self.config.get("transformer_layer_config")
        return found if isinstance(found, dict) else self.config

    @property
    def layer_type(self) -> str:
        return str(self.layer.get("model_type", "llama"))

    @property
    def names(self) -> list[str]:
        """The architectures that the config names."""
        return [str(name) for name in self.config.get("architectures") or []]

    @property
    def kind(self) -> str:
        """`eagle3` (speculators' format), `latent` (latent attention, whatever the format), or
        what the config calls itself."""
        words = [*self.names, self.layer_type]
        if self.layer.get("kv_lora_rank") or any(w in n.lower() for n in words for w in LATENT):
            return "latent"
        own = self.config.get("speculators_model_type")
        return str(own or ", ".join(self.names) or self.config.get("model_type") or "unnamed")

    def shape(self) -> dict[str, Any]:
        """The decoder in the words of LlamaConfig, with the defaults that the file leaves out."""
        found = {"hidden_act": "silu", "rms_norm_eps": 1e-6}
        found |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        found |= _DEFAULTS.get(self.layer_type, {}) | self.layer
        heads = found.get("num_attention_heads")
        found["num_key_value_heads"] = found.get("num_key_value_heads") or heads
        if not found.get("head_dim") and heads and found.get("hidden_size"):
            found["head_dim"] = found["hidden_size"] // heads
        return found

    @property
    def aux_layers(self) -> list[int]:
        """Ids of the states that feed the draft."""
        return [int(k) for k in self.config.get("eagle_aux_hidden_state_layer_ids") or []]

    @property
    def draft_vocab_size(self) -> int:
        """As vLLM and speculators take it: that of the verifier where the config is silent."""
        return self.config.get("draft_vocab_size") or self.shape()["vocab_size"]

    @cached_property
    def tensors(self) -> dict[str, dict[str, Any]]:
        """Tensor name -> its entry in a safetensors header (dtype, shape); files with a wrong size,
        a torn header or a pointer in their place are UsageErrors."""
        try:
            headers = Verifier(self.path).headers
        except UsageError as e:
            raise UsageError(
                e.what, where=e.where, expected=e.expected, fix="copy or export the draft again"
            ) from None
        found = {n: entry for header in headers.values() for n, entry in header.items()}
        found.pop("__metadata__", None)
        return found

    def array(self, name: str) -> np.ndarray | None:
        """d2t or t2d (a whole-number or bool tensor); None where the weights hold none."""
        from safetensors import safe_open

        if name not in self.tensors:
            return None
        with safe_open(self.path / self._files[name], framework="np") as f:
            return f.get_tensor(name)

    def mapping(self, vocab_size: int) -> VocabMapping:
        """The draft's own mapping as it is, its coverage unknown (nan); t2d is made from d2t where
        it is missing. UsageError: no d2t though the draft's vocabulary is smaller.
        """
        d2t = self.array("d2t")
        if d2t is None and self.draft_vocab_size != vocab_size:
            raise UsageError(
                "no d2t in the weights",
                where=self.path,
                expected=f"d2t [{self.draft_vocab_size}]",
                fix="export the draft again from a checkpoint that has it",
            )
        if d2t is None:
            d2t = np.zeros(vocab_size, np.int64)
        return from_offsets(d2t, vocab_size, self.array("t2d"))

    def digest(self) -> str:
        """blake2b-128 hex over config, headers with their files' sizes, and the first MiB of each
        tensor. Does not depend on where the directory lies."""
        h = hashlib.blake2b(json.dumps(self.config, sort_keys=True).encode(), digest_size=16)
        for name, entry in sorted(self.tensors.items()):
            h.update(json.dumps([name, entry]).encode())
            with open(self.path / self._files[name], "rb") as f:
                length = int.from_bytes(f.read(8), "little")
                start, end = entry["data_offsets"]
                f.seek(8 + length + start)
                h.update(f.read(min(SAMPLED, end - start)))
        return h.hexdigest()

    @cached_property
    def _files(self) -> dict[str, str]:
        """Tensor name -> the file that holds it."""
        headers = Verifier(self.path).headers
        return {n: file for file, header in headers.items() for n in header}


def tensor_shapes(draft: DraftFiles) -> dict[str, list[int]]:
    """Name -> shape of every tensor that a draft of this config has, as speculators 0.9.0 saves it
    (models/eagle3/core.py, model_definitions.py) and vLLM 0.31.0 reads it; d2t where the vocabulary
    is reduced. t2d and the embedding may be there, too."""
    shape, config = draft.shape(), draft.config
    hidden, wide = shape["hidden_size"], shape["intermediate_size"]
    size = shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * size, shape["num_key_value_heads"] * size
    states = len(draft.aux_layers) or 3
    found = {
        "fc.weight": [hidden, states * hidden],
        "norm.weight": [hidden],
        "lm_head.weight": [draft.draft_vocab_size, hidden],
    }
    if config.get("norm_before_fc"):
        found["input_norm.weight"] = [states * hidden]
    if config.get("fc_norm"):
        found |= {f"fc_norm.{i}.weight": [hidden] for i in range(states)}
    if draft.draft_vocab_size != shape["vocab_size"]:
        found["d2t"] = [draft.draft_vocab_size]
    for number in range(shape["num_hidden_layers"]):
        entry = 2 * hidden if number == 0 else hidden  # embedding and state side by side
        layer = {
            "self_attn.q_proj.weight": [queries, entry],
            "self_attn.k_proj.weight": [keys, entry],
            "self_attn.v_proj.weight": [keys, entry],
            "self_attn.o_proj.weight": [hidden, queries],
            "mlp.gate_proj.weight": [wide, hidden],
            "mlp.up_proj.weight": [wide, hidden],
            "mlp.down_proj.weight": [hidden, wide],
            "input_layernorm.weight": [hidden],
            "post_attention_layernorm.weight": [hidden],
        }
        if number == 0:
            layer["hidden_norm.weight"] = [hidden]
        if draft.layer_type == "qwen3":
            layer |= {f"self_attn.{x}_norm.weight": [size] for x in "qk"}
        if shape.get("attention_bias"):
            sizes = {"q": queries, "k": keys, "v": keys, "o": hidden}
            layer |= {f"self_attn.{x}_proj.bias": [n] for x, n in sizes.items()}
        found |= {f"layers.{number}.{name}": s for name, s in layer.items()}
    return found
