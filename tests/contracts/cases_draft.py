"""Drafts with one fault each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from drafts import (
    D2T,
    T2D,
    TOKENS,
    D,
    Draft,
    both,
    good,
    latent,
    other_format,
    pickled,
    published,
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


def trained_with(said: dict[str, bool], *changes: Callable[[Draft], None]):
    """A draft beside a recipe that says these switches of its norms."""

    def change(place: Place) -> None:
        with_draft(both(*changes))(place)
        place.recipe["train"]["draft"] = place.recipe["train"].get("draft", {}) | said

    return change


def no_input_norm(draft: Draft) -> None:
    del draft.tensors["input_norm.weight"]


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


def named(name: str, model_type: str):
    """Flat, under another name."""

    def change(draft: Draft) -> None:
        other_format(draft)
        draft.config |= {"architectures": [name], "model_type": model_type}
        del draft.config["draft_vocab_size"]

    return change


def named_latent(draft: Draft) -> None:
    """The name of a whole model before which vLLM puts Eagle3."""
    latent(draft)
    draft.config["architectures"] = ["DeepseekV3ForCausalLM"]


def bare_name(draft: Draft) -> None:
    published(draft)
    draft.config["architectures"] = ["LlamaForCausalLM"]


def dflash(draft: Draft) -> None:
    draft.config |= {"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"]}


def narrow(draft: Draft) -> None:
    """Its own width is another than the verifier's."""
    published(draft)
    draft.config |= {"hidden_size": 32, "target_hidden_size": 64}
    for name, (kind, shape, data) in draft.tensors.items():
        halved = {64: 32, 128: 64} if name.endswith("_proj.weight") else {64: 32}
        if name not in ("d2t", "t2d", "fc.weight"):
            draft.tensors[name] = kind, narrowed(name, shape, halved), data
    draft.tensors["fc.weight"] = "BF16", [32, 3 * 64], None


def narrowed(name: str, shape: list[int], halved: dict[int, int]) -> list[int]:
    if any(part in name for part in ("q_proj", "k_proj", "v_proj")):
        return [shape[0], halved[shape[1]]]
    if any(part in name for part in ("gate_proj", "up_proj")):
        return [shape[0], 32]
    if any(part in name for part in ("o_proj", "down_proj")):
        return [32, shape[1]]
    return [*shape[:-1], 32]


def the_verifier(place: Place) -> None:
    place.given["draft"] = place.model


def another_verifier(draft: Draft) -> None:
    """A directory that is there, with another model."""
    section = draft.config["speculators_config"]["verifier"]
    other = Path(section["name_or_path"]).parent / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    section["name_or_path"] = str(other)


def flags_bf16(draft: Draft) -> None:
    draft.tensors["t2d"] = "BF16", [VOCAB], None


YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 64}
"""Without mscale."""


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
    Case("draft-complete", cut_weights, "by its header", pickled),
    case("draft-complete", set_config(eagle_aux_hidden_state_layer_ids="1,2,3"), "'1,2,3'"),
    case("draft-complete", set_config(eagle_aux_hidden_state_layer_ids=3), "layer_ids 3"),
    case("draft-complete", set_layer(num_attention_heads="4"), "num_attention_heads '4'"),
    case("draft-complete", set_layer(max_position_embeddings="4096"), "'4096'"),
    *(
        Case("draft-kind", with_draft(named(name, model_type)), says, with_draft(fine))
        for name, model_type, says, fine in (
            ("DeepSeekMTPModel", "deepseek_mtp", "multi-token prediction", published),
            ("EagleDeepSeekMTPModel", "eagle", "first generation", named_latent),
            ("DeepseekV3ForCausalLM", "deepseek_v3", "no draft but a model", bare_name),
            ("KimiK25ForConditionalGeneration", "kimi_k25", "no draft but a model", dflash),
        )
    ),
    Case("draft-kind", the_verifier, "no draft but a model of kind KimiK25", with_draft(narrow)),
    case("draft-verifier-path", another_verifier, "names another verifier"),
    Case(
        "draft-rope-layouts",
        with_draft(set_layer(rope_scaling={"type": "default"}, rope_theta=5e4)),
        "rope_type is yarn in rope_parameters and default",
        with_draft(published),
    ),
    case("draft-rope-layouts", set_layer(rope_scaling=YARN, rope_theta=5e4), "mscale is 1.0"),
    case("draft-rope-layouts", set_rope(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    case("draft-rope-theta", set_layer(rope_parameters=None), "no rotary parameters"),
    case("draft-norms", set_layer(rms_norm_eps=1e-6), "rms_norm_eps 1e-06"),
    case("draft-norms", set_config(norm_before_residual=False), "norm_before_residual False"),
    Case(
        "draft-norms",
        trained_with({"norm_output": False}),
        "norm_output True",
        trained_with({"norm_output": False}, set_config(norm_output=False)),
    ),
    Case(
        "draft-norms",
        trained_with({"norm_before_fc": True}, set_config(norm_before_fc=False), no_input_norm),
        "norm_before_fc False",
        trained_with({"norm_before_fc": True, "fc_norm": False}),
    ),
    case("draft-tokens", set_layer(eos_token_id=[259]), "eos_token_id [259]"),
    Case(
        "draft-tokens",
        with_draft(set_layer(bos_token_id=1)),
        "bos_token_id 1",
        with_draft(set_layer(eos_token_id=[258])),
    ),
    Case(
        "draft-dtype",
        with_draft(set_config(dtype="torch.float32")),
        "says float32",
        with_draft(set_config(dtype="torch.bfloat16")),
    ),
    case("draft-d2t-present", flags_bf16, "t2d is BF16"),
    case("draft-d2t-present", both(published, rename("d2t", None)), "no d2t"),
    case("draft-d2t-offsets", both(published, d2t(TOKENS)), "absolute token ids"),
    case("draft-tensor-shapes", both(published, set_config(head_dim=8)), "midlayer.self_attn"),
]
