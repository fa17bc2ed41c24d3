"""The shape of the draft's decoder as plain values, judged on any machine (no transformers).

Reads the recipe's `[train.draft]` and the verifier's config; writes nothing. The draft is a
llama decoder with full attention; what the recipe leaves unset follows the verifier. Chosen
over speculators' own `create_transformer_layer_config` because that one always sets a sliding
window, takes the head size of an MLA verifier for granted (64 for Kimi-K2.5, where 128 is
right) and leaves bos/eos at llama's defaults. The price: new rope kinds have to be added here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kimi_eagle.errors import UsageError
from kimi_eagle.recipe import DraftSection

_NOT_FOR_THE_DRAFT = ("type", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Rope keys of verifiers that a text-only llama with full rotation has no use for."""


def decoder_shape(draft: DraftSection, config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of transformers' LlamaConfig; unset values of `draft` are the verifier's.

    config: the verifier's config.json (a nested `text_config` is found). UsageError where the shape
    cannot be.
    """
    text = text_config(config)
    hidden = _need(text, "hidden_size")
    heads = draft.num_attention_heads or _need(text, "num_attention_heads")
    kv_heads = draft.num_key_value_heads or text.get("num_key_value_heads") or heads
    if draft.num_attention_heads and not draft.num_key_value_heads and heads % kv_heads:
        kv_heads = heads
    if heads % kv_heads:
        raise UsageError(
            f"{heads} attention heads over {kv_heads} key-value heads",
            where="train.draft.num_key_value_heads",
            expected="a divisor of num_attention_heads",
        )
    head_dim = draft.head_dim or _head_dim(text, hidden, heads)
    if head_dim % 2:
        raise UsageError(
            f"head_dim {head_dim}", where="train.draft.head_dim", expected="an even number"
        )
    return dict(
        vocab_size=_need(text, "vocab_size"),
        hidden_size=hidden,
        # A mixture of experts without a dense width: speculators' own rule (models/utils.py).
        intermediate_size=draft.intermediate_size or text.get("intermediate_size") or 3 * hidden,
        num_hidden_layers=draft.layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act=draft.hidden_act
        or text.get("hidden_act")
        or text.get("hidden_activation")
        or "silu",
        max_position_embeddings=draft.max_position_embeddings
        or text.get("max_position_embeddings")
        or 2048,
        initializer_range=text.get("initializer_range") or 0.02,
        rms_norm_eps=text.get("rms_norm_eps") or 1e-6,
        rope_parameters=dict(draft.rope) if draft.rope is not None else rope_parameters(text),
        bos_token_id=_token(config, "bos_token_id"),
        eos_token_id=_token(config, "eos_token_id"),
        pad_token_id=_token(config, "pad_token_id"),
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        use_cache=True,
    )


def rope_parameters(text: Mapping[str, Any]) -> dict[str, Any]:
    """The verifier's rotary parameters in the form of transformers 5 (`rope_parameters`).

    Older configs say `rope_theta` and `rope_scaling` with `type`; both forms are read. Of
    parameters by layer type the ones of full attention are taken: that is what the draft has.
    """
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    if "full_attention" in rope or "sliding_attention" in rope:
        rope = dict(rope.get("full_attention") or rope["sliding_attention"])
    kind = rope.get("rope_type") or rope.get("type") or "default"
    rope["rope_type"] = "default" if kind == "mrope" else kind
    rope.setdefault("rope_theta", text.get("rope_theta") or 10000.0)
    for key in _NOT_FOR_THE_DRAFT:
        rope.pop(key, None)
    return rope


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config: the nested `text_config`, or all of it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _head_dim(text: Mapping[str, Any], hidden: int, heads: int) -> int:
    # Multi-head latent attention: `head_dim` (if there at all) is the rotary part, 64 for
    # Kimi-K2.5, and hidden / heads is 112; the size of what a head reads out is v_head_dim.
    if text.get("kv_lora_rank") and text.get("v_head_dim"):
        return text["v_head_dim"]
    if text.get("head_dim"):
        return text["head_dim"]
    if hidden % heads:
        raise UsageError(
            f"hidden size {hidden} does not divide by {heads} heads",
            where="train.draft.head_dim",
            expected="head_dim to be set",
        )
    return hidden // heads


def _need(text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if value is None:
        raise UsageError(f"the verifier's config has no {key}", where="verifier.path")
    return value


def _token(config: Mapping[str, Any], key: str) -> Any:
    """A special token of the verifier: the language model's own, else the outer config's."""
    value = text_config(config).get(key)
    return config.get(key) if value is None else value
