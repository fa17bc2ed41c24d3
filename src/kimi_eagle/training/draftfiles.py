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
from kimi_eagle.training import draftkind
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
_WHOLE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "draft_vocab_size",
    "target_hidden_size",
)
NUMPY = ("BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "F32", "F64")
"""Types of safetensors that numpy has."""
_ROPE = ("rope_parameters", "rope_scaling")


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
        if fault := _odd_value(data):
            what, expected = fault
            raise UsageError(what, where=file, expected=expected, fix="correct config.json")
        return data

    @property
    def layer(self) -> dict[str, Any]:
        """The decoder's part of the config; all of it where the format is not speculators'."""
        return dict(draftkind.layer_of(self.config))

    @property
    def layer_type(self) -> str:
        return str(self.layer.get("model_type", "llama"))

    @property
    def names(self) -> list[str]:
        """The architectures that the config names."""
        return draftkind.architectures(self.config)

    @property
    def kind(self) -> str:
        """`eagle3` (speculators' format), `latent` (EAGLE-3 with latent attention), or what the
        config calls itself."""
        return draftkind.kind(self.config)

    @property
    def known_decoder(self) -> bool:
        """Whether the decoder is one that speculators 0.9.0 trains."""
        return self.layer_type in ("llama", "qwen3")

    @property
    def flat(self) -> bool:
        """An EAGLE-3 draft in vLLM's own format (one flat config), with a decoder that we know and
        its sizes told."""
        other = not self.config.get("speculators_model_type") and self.known_decoder
        sizes = all(self.config.get(k) for k in ("hidden_size", "num_attention_heads"))
        method = draftkind.speculative(self.config)
        return bool(other and sizes and method and method["method"] == "eagle3") and (
            self.kind != "latent"
        )

    @property
    def pickled(self) -> bool:
        """Whether its weights are *.bin alone: vLLM loads them, nothing here opens them."""
        return not any(self.path.glob("*.safetensors")) and any(self.path.glob("*.bin"))

    @property
    def target_hidden_size(self) -> int | None:
        """Hidden size of the verifier that it was made for."""
        return self.config.get("target_hidden_size") or self.shape().get("hidden_size")

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
    def named_verifier(self) -> str | None:
        """speculators_config.verifier.name_or_path; None where the config names none."""
        section = self.config.get("speculators_config")
        verifier = section.get("verifier") if isinstance(section, dict) else None
        return verifier.get("name_or_path") if isinstance(verifier, dict) else None

    @property
    def aux_layers(self) -> list[int]:
        """Ids of the states that feed the draft."""
        return [int(k) for k in _aux(self.config) or []]

    @property
    def draft_vocab_size(self) -> int:
        """As vLLM and speculators take it: that of the verifier where the config is silent."""
        found = self.config.get("draft_vocab_size") or self.shape().get("vocab_size")
        if not found:
            raise UsageError("no vocab_size in config.json", where=self.path, expected="a draft")
        return found

    @cached_property
    def tensors(self) -> dict[str, dict[str, Any]]:
        """Tensor name -> its entry in a safetensors header (dtype, shape); files with a wrong size,
        a torn header or a pointer in their place are UsageErrors."""
        found = {n: entry for header in self._headers.values() for n, entry in header.items()}
        found.pop("__metadata__", None)
        return found

    def array(self, name: str) -> np.ndarray | None:
        """d2t or t2d (numbers or bool, as numpy knows them); None where the weights hold none."""
        from safetensors import SafetensorError, safe_open

        if name not in self.tensors:
            return None
        kind = self.tensors[name]["dtype"]
        if kind not in NUMPY:
            raise UsageError(f"{name} is {kind}", where=self.path, expected="whole numbers or bool")
        try:
            with safe_open(self.path / self._files[name], framework="np") as f:
                return f.get_tensor(name)
        except (OSError, SafetensorError) as e:
            raise self._changed(e) from None

    def mapping(self, vocab_size: int) -> VocabMapping:
        """The draft's own mapping as it is, its coverage unknown (nan); t2d is made from d2t where
        it is missing. UsageError: no d2t though the draft's vocabulary is smaller.
        """
        self.config  # noqa: B018  a draft whose config cannot be read has no mapping either
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
            try:
                with open(self.path / self._files[name], "rb") as f:
                    length = int.from_bytes(f.read(8), "little")
                    start, end = entry["data_offsets"]
                    f.seek(8 + length + start)
                    h.update(f.read(min(SAMPLED, end - start)))
            except OSError as e:
                raise self._changed(e) from None
        return h.hexdigest()

    @cached_property
    def _headers(self) -> dict[str, Any]:
        """File name -> its header."""
        try:
            return Verifier(self.path).headers
        except UsageError as e:
            raise UsageError(
                e.what, where=e.where, expected=e.expected, fix="copy or export the draft again"
            ) from None
        except OSError as e:
            raise self._changed(e) from None

    @cached_property
    def _files(self) -> dict[str, str]:
        """Tensor name -> the file that holds it."""
        return {n: file for file, header in self._headers.items() for n in header}

    def _changed(self, error: Exception) -> UsageError:
        return UsageError(
            f"a weight file changed while it was read: {error}",
            where=self.path,
            expected="a draft that nobody writes to",
            fix="wait until it is written, or copy it again",
        )


def _aux(config: dict[str, Any]) -> Any:
    """Ids of the states, where either format has them."""
    key, nested = "eagle_aux_hidden_state_layer_ids", config.get("eagle_config")
    return config.get(key) or (nested.get(key) if isinstance(nested, dict) else None)


def _odd_value(config: dict[str, Any]) -> tuple[str, str] | None:
    """(The first value of a type that nobody expects there, what is expected), in words."""
    layer = config.get("transformer_layer_config")
    if layer is None and not config.get("speculators_model_type"):
        layer = config
    if not isinstance(layer, dict):
        return "transformer_layer_config holds no object", "the decoder's config"
    for part in (config, layer):
        for key in _WHOLE:
            value = part.get(key)
            if value is not None and (not _whole(value) or value < 1):
                return f"{key} {value!r}", "a whole number"
        for key in _ROPE:
            if not isinstance(part.get(key), dict | None):
                return f"{key} {part[key]!r}", "a table"
        found = [part, *(part.get(key) or {} for key in _ROPE)]
        for theta in (x.get("rope_theta") for x in found):
            if theta is not None and not _number(theta):
                return f"rope_theta {theta!r}", "a number"
        if not isinstance(part.get("layer_types"), list | None):
            return f"layer_types {part['layer_types']!r}", "a list of names"
    names, ids = config.get("architectures"), _aux(config)
    if not isinstance(names, list | str | None):
        return f"architectures {names!r}", "a list of names"
    if ids is not None and not (isinstance(ids, list) and all(_whole(k) for k in ids)):
        return f"eagle_aux_hidden_state_layer_ids {ids!r}", "a list of whole numbers"
    return None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: Any) -> bool:
    return _number(value) and float(value).is_integer()


def tensor_shapes(draft: DraftFiles) -> dict[str, list[int]]:
    """Name -> shape of every tensor that a draft of this config has, as speculators 0.9.0 saves it
    (models/eagle3/core.py, model_definitions.py) and vLLM 0.31.0 reads it; d2t where the vocabulary
    is reduced. t2d and the embedding may be there, too."""
    shape, config = draft.shape(), draft.config
    hidden, wide = shape["hidden_size"], shape["intermediate_size"]
    size = shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * size, shape["num_key_value_heads"] * size
    states, theirs = len(draft.aux_layers) or 3, draft.target_hidden_size
    found = {
        "fc.weight": [hidden, states * theirs],
        "norm.weight": [hidden],
        "lm_head.weight": [draft.draft_vocab_size, hidden],
    }
    if config.get("norm_before_fc"):
        found["input_norm.weight"] = [states * theirs]
    if config.get("fc_norm"):
        found |= {f"fc_norm.{i}.weight": [theirs] for i in range(states)}
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
