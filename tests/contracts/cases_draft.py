"""Drafts with one fault each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from drafts import (
    D2T,
    T2D,
    TOKENS,
    D,
    Draft,
    good,
    latent,
    other_format,
    rename,
    set_config,
    set_layer,
    set_rope,
    with_draft,
)
from drafts import mapping as mapping_of
from place import VOCAB, Case, Place


def cut_weights(place: Place) -> None:
    with_draft()(place)
    file = place.path / "draft" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def no_weights(place: Place) -> None:
    with_draft()(place)
    (place.path / "draft" / "model.safetensors").unlink()


def relative(draft: Draft) -> None:
    draft.config["speculators_config"]["verifier"]["name_or_path"] = "models/kimi"


def sliding(draft: Draft) -> None:
    set_layer(layer_types=["sliding_attention"], sliding_window=2048)(draft)


def heads_of_three(place: Place) -> None:
    def change(draft: Draft) -> None:
        set_layer(num_attention_heads=3, num_key_value_heads=3)(draft)
        for part in "qkv":
            draft.tensors[f"layers.0.self_attn.{part}_proj.weight"] = "BF16", [48, 128], None
        draft.tensors["layers.0.self_attn.o_proj.weight"] = "BF16", [64, 48], None

    with_draft(change)(place)
    place.recipe["benchmark"]["engine"] = {"tp": 2}


def wider(draft: Draft) -> None:
    draft.config["transformer_layer_config"]["intermediate_size"] = 256


def d2t(array: np.ndarray, t2d: np.ndarray | None = None):
    def change(draft: Draft) -> None:
        draft.set_d2t(array)
        if t2d is not None:
            draft.set_t2d(t2d)

    return change


def without_t2d(array: np.ndarray):
    def change(draft: Draft) -> None:
        draft.set_d2t(array)
        del draft.tensors["t2d"]

    return change


OTHER = np.array([*range(10, 131), *range(256, 263)])
"""Another choice of as many tokens: the mapping after the counts changed."""


def stale(place: Place) -> None:
    with_draft()(place)
    place.given["mapping"] = mapping_of(OTHER - np.arange(D), np.isin(np.arange(VOCAB), OTHER))


def whole_vocabulary(place: Place) -> None:
    """All tokens, so that no mapping is needed."""
    draft = good(place)
    draft.config["draft_vocab_size"] = VOCAB
    draft.tensors["lm_head.weight"] = "BF16", [VOCAB, 64], None
    del draft.tensors["d2t"], draft.tensors["t2d"]
    place.given["draft"] = draft.write(place.path / "draft")
    place.recipe["vocab"]["draft_vocab_size"] = VOCAB


def swapped() -> np.ndarray:
    """Two tokens in the wrong order."""
    ids = TOKENS.copy()
    ids[[4, 5]] = ids[[5, 4]]
    return ids - np.arange(D)


def twice() -> np.ndarray:
    ids = TOKENS.copy()
    ids[5] = ids[4]
    return ids - np.arange(D)


SLICE = d2t(np.zeros(D, np.int64), np.arange(VOCAB) < D)


def counted_slice(place: Place) -> None:
    """A run in whose samples the first ids alone occur."""
    with_draft(SLICE)(place)
    found = mapping_of(np.zeros(D, np.int64), np.arange(VOCAB) < D)
    place.given["mapping"] = replace(found, coverage=1.0)


def case(rule: str, change, says: str) -> Case:
    return Case(rule, with_draft(change), says, with_draft())


CASES = [
    Case("draft-complete", cut_weights, "by its header", with_draft()),
    Case("draft-complete", no_weights, "no weights", with_draft()),
    Case(
        "draft-kind",
        with_draft(set_config(speculators_model_type="eagle")),
        "a draft of kind eagle",
        with_draft(latent),
    ),
    Case(
        "draft-kind",
        with_draft(set_layer(model_type="gpt2")),
        "gpt2 decoder",
        with_draft(other_format),
    ),
    case("draft-fits-verifier", set_layer(vocab_size=500), "vocab_size 500"),
    case("draft-verifier-path", relative, "'models/kimi'"),
    case("draft-layers", set_config(eagle_aux_hidden_state_layer_ids=[0, 1, 2]), "[0, 1, 2]"),
    case("draft-head-dim", set_layer(head_dim=8), "head_dim 8; expected 16"),
    case("draft-activation", set_layer(hidden_act="gelu"), "hidden_act 'gelu'"),
    Case("draft-parallel", heads_of_three, "num_attention_heads 3", with_draft()),
    case("draft-full-attention", sliding, "window of 2048"),
    case("draft-rope-theta", set_rope(rope_theta=10000.0), "rope_theta 10000.0"),
    case("draft-rope-theta", set_rope(rope_theta=None), "rope_theta 10000.0"),
    case(
        "draft-yarn",
        set_layer(rope_parameters={"rope_type": "default", "rope_theta": 5e4}),
        "YaRN: rope_type default; expected yarn",
    ),
    case("draft-yarn", set_rope(mscale=None), "mscale None"),
    case("draft-yarn", set_rope(original_max_position_embeddings=128), "embeddings 128"),
    case("draft-positions", set_layer(max_position_embeddings=128), "max_position_embeddings 128"),
    case("draft-positions", set_layer(max_position_embeddings=None), "2,048"),
    case("draft-tokens", set_layer(eos_token_id=None), "eos_token_id 2"),
    case("draft-tensors", rename("fc.weight", "model.fc.weight"), "no fc.weight and model.fc"),
    case("draft-tensors", rename("norm.weight", None), "no norm.weight"),
    case("draft-tensor-shapes", wider, "mlp.gate_proj.weight has shape [128, 64]"),
    case("draft-tensor-shapes", set_layer(head_dim=32), "q_proj.weight has shape [64, 128]"),
    case("draft-dtype", lambda d: d.all_of_type("F16"), "is F16"),
    case("draft-dtype", set_config(dtype="float32"), "says float32, the weights are bfloat16"),
    case("draft-d2t-present", rename("d2t", None), "no d2t"),
    case("draft-d2t-present", d2t(D2T.astype(np.int32)), "d2t is I32"),
    case("draft-d2t-offsets", d2t(TOKENS), "absolute token ids"),
    case("draft-d2t-offsets", without_t2d(TOKENS), "absolute token ids"),
    case("draft-d2t-offsets", d2t(twice()), "twice"),
    case("draft-d2t-offsets", d2t(swapped()), "not in order"),
    case("draft-d2t-offsets", d2t(D2T + 200), "the verifier has 384"),
    Case("draft-d2t-plain-slice", with_draft(SLICE), "the first 128 ids", counted_slice),
    case("draft-t2d", d2t(D2T, np.roll(T2D, 1)), "others than those of d2t"),
    Case("draft-mapping-current", stale, "not the run's mapping", with_draft()),
    Case("draft-complete", cut_weights, "by its header", whole_vocabulary),
]
