"""What kind of draft a config.json describes, and how vLLM is told to use it: the one table.

Read by the benchmark (bench/draftdir.py) and by the rules (contracts/draft.py). Needs no library.
The price: vLLM's methods are kept here by hand; one that is missing is refused though vLLM might
load it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# speculators' own formats, as vllm/transformers_utils/configs/speculators/algos.py (0.31.0) maps
# them: peagle is eagle3 drafting in parallel, dflash2 runs as dflash.
SPECULATORS: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
    "dflash": {"method": "dflash"},
    "dflash2": {"method": "dflash"},
    "dspark": {"method": "dspark"},
}
# Architectures of drafts in vLLM's own format; first substring found wins.
_ARCHITECTURES = (
    ("eagle3", "eagle3"),
    ("eagle", "eagle"),
    ("medusa", "medusa"),
    ("dflash", "dflash"),
)
_PREFIXED = ("Llama", "Qwen3", "DeepseekV2", "DeepseekV3", "MiniMaxM2")
"""vLLM 0.31.0 (transformers_utils/configs/eagle.py) puts `Eagle3` before these `...ForCausalLM` and
finds the result in its registry: a draft may carry the name of a whole model."""
_LATENT = ("deepseek", "kimi", "mistrallarge3", "mistral_large_3")
"""Words in the names of models with latent attention (vLLM 0.31.0, registry.py)."""


def architectures(config: Mapping[str, Any]) -> list[str]:
    """The names in `architectures`, a single one without a list, too."""
    found = config.get("architectures") or []
    if isinstance(found, str):
        return [found]
    return [str(name) for name in found] if isinstance(found, list) else []


def layer_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The decoder's part of a config; all of it where the format is not speculators'."""
    found = config.get("transformer_layer_config")
    return found if isinstance(found, Mapping) else config


def is_latent(config: Mapping[str, Any]) -> bool:
    """Whether the decoder has latent attention, whatever the format."""
    layer = layer_of(config)
    words = [*architectures(config), str(layer.get("model_type", ""))]
    return bool(layer.get("kv_lora_rank")) or any(w in n.lower() for n in words for w in _LATENT)


def speculative(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`method` and what else vLLM's speculative_config needs besides path and k; None for what is
    no draft. Of drafts with latent attention EAGLE-3 alone is served."""
    if own := config.get("speculators_model_type"):
        return SPECULATORS.get(str(own))
    method = _method(config)
    if method is None or (is_latent(config) and method != "eagle3"):
        return None
    return {"method": method}


def _method(config: Mapping[str, Any]) -> str | None:
    names = architectures(config)
    for part, method in _ARCHITECTURES:
        if any(part in name.lower() for name in names) or config.get("model_type") == method:
            return method
    bare = [name.removesuffix("ForCausalLM") for name in names if name.endswith("ForCausalLM")]
    return "eagle3" if config.get("draft_vocab_size") and set(bare) & set(_PREFIXED) else None


def kind(config: Mapping[str, Any]) -> str:
    """`eagle3` (speculators' format), `latent` (EAGLE-3 with latent attention), or what the config
    calls itself."""
    own = config.get("speculators_model_type")
    if is_latent(config) and (own == "eagle3" or speculative(config)):
        return "latent"
    names = ", ".join(architectures(config))
    return str(own or names or config.get("model_type") or "unnamed")


def in_words(config: Mapping[str, Any]) -> str:
    """What a directory holds that is no draft of a kind asked for."""
    name = kind(config)
    if config.get("speculators_model_type") or speculative(config):
        return f"a draft of kind {name}"
    if "eagle" in name.lower():
        return f"a draft of EAGLE's first generation ({name})"
    if "mtp" in name.lower():
        return f"layers of multi-token prediction, no EAGLE-3 draft ({name})"
    return f"no draft but a model of kind {name}"
