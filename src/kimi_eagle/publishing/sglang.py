"""The draft as SGLang's EAGLE-3 reader takes it: names, ids, config; and what it cannot compute.

Source: sgl-project/sglang, python/sglang/srt/: models/llama_eagle3.py at 03d5a7771f60 and
d737979cbd17 (class LlamaForCausalLMEagle3), speculative/eagle_worker.py at fba8eccd7ebe,
model_executor/model_runner.py (eagle_config). SGLang itself was not run here. What they do:

- Names: `midlayer.*` (later versions map it to `layers.0.`), `fc`, `norm`, `lm_head`,
  `embed_tokens`, each also with `model.` before it. A name that it does not know is dropped without
  a word, so what it has no part for is refused here and not left to it.
- `d2t`: offsets, `target = i + d2t[i]`, as in vLLM; `t2d` is skipped. eagle_worker.py wants a d2t
  at that commit; later ones do without, where the draft has the whole vocabulary.
- Layers: `eagle_config.eagle_aux_hidden_state_layer_ids`, and it adds one to each
  (contracts/layers.py, sglang_ids); without them it takes its own three.
- The embedding is the verifier's, whatever the draft has (eagle_worker.py, set_embed).
- Structure: the state before `hidden_norm` is the residual (norm_before_residual false), no norm
  over the states before `fc` (norm_before_fc false), q, k and v without bias, three states. At
  these commits the state before the last norm feeds the next step (norm_output false) and the
  states are not normed one by one (fc_norm false); both came with pull request 24663.
"""

from __future__ import annotations

from typing import Any

from kimi_eagle.contracts.layers import FED, sglang_ids
from kimi_eagle.errors import UsageError
from kimi_eagle.training.draftfiles import DraftFiles

ARCHITECTURE = "LlamaForCausalLMEagle3"
PULL_REQUEST = "https://github.com/sgl-project/sglang/pull/24663"
_LAYER = (
    "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act "
    "rms_norm_eps max_position_embeddings vocab_size bos_token_id eos_token_id pad_token_id"
).split()


def refuse(draft: DraftFiles) -> None:
    """UsageError naming the first thing that SGLang would compute in another way, or drop."""
    config, shape = draft.config, draft.shape()
    for wrong, what, expected in (
        (draft.kind != "eagle3", f"a draft of kind {draft.kind}", "speculators' eagle3 format"),
        (draft.layer_type != "llama", f"a {draft.layer_type} decoder", "a llama decoder"),
        (
            shape["num_hidden_layers"] != 1,
            f"{shape['num_hidden_layers']} decoder layers",
            "one: versions before pull request 24663 take no more",
        ),
        (
            bool(config.get("norm_before_fc")),
            "norm_before_fc is true: SGLang has no norm over the states before fc and would drop "
            "input_norm.weight without a word",
            "norm_before_fc false",
        ),
        (
            bool(config.get("norm_before_residual")),
            "norm_before_residual is true: SGLang takes the state before the norm",
            "norm_before_residual false",
        ),
        (
            len(draft.aux_layers) != FED,
            f"{len(draft.aux_layers)} states feed the draft",
            f"{FED}",
        ),
        (0 in draft.aux_layers, "the draft reads state 0", "ids from 1: SGLang has no such state"),
        (bool(shape.get("attention_bias")), "attention_bias is true", "q, k, v without bias"),
        (bool(shape.get("mlp_bias")), "mlp_bias is true", "an MLP without bias"),
    ):
        if wrong:
            raise UsageError(
                f"SGLang cannot serve this draft: {what}",
                where=draft.path / "config.json",
                expected=expected,
                fix="export it --for vllm; to train one for SGLang, say norm_before_residual = "
                "false, norm_before_fc = false and fc_norm = true in [train.draft]",
            )


def needs_newer(draft: DraftFiles) -> list[str]:
    """The switches of this draft that versions before pull request 24663 do not read."""
    return [name for name in ("fc_norm", "norm_output") if draft.config.get(name)]


def config(draft: DraftFiles) -> dict[str, Any]:
    """config.json: one flat LlamaConfig, the rotary part in the older layout, which transformers 5
    reads, too (modeling_rope_utils.py, standardize_rope_params)."""
    shape = draft.shape()
    rope = dict(shape.get("rope_parameters") or shape.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", shape.get("rope_theta", 10000.0))
    default = rope.get("rope_type", rope.get("type", "default")) == "default"
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **{k: shape[k] for k in _LAYER if shape.get(k) is not None},
        "num_hidden_layers": 1,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": theta,
        "rope_scaling": None if default else rope,
        "tie_word_embeddings": False,
        "torch_dtype": draft.config.get("dtype", "bfloat16"),
        "draft_vocab_size": draft.draft_vocab_size,
        "target_hidden_size": draft.target_hidden_size,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": sglang_ids(draft.aux_layers),
        },
        **{name: True for name in needs_newer(draft)},
    }


def name(tensor: str) -> str | None:
    """A tensor's name in SGLang; None for t2d, which it skips."""
    if tensor == "t2d":
        return None
    return tensor.replace("layers.0.", "midlayer.", 1) if tensor.startswith("layers.0.") else tensor
