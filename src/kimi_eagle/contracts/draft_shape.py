"""The shape that the draft will have: what the recipe says, and else the verifier's config.

Judged without transformers, by the function whose values speculators is given
(training/shape.decoder_shape). A draft that training goes on from brings its own shape: it is
judged in training.py. The numbers live in the verifier's config and in the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import NotConcerned, Note, Problem, rule
from kimi_eagle.training.shape import decoder_shape, rope_parameters, text_config

VLLM_AUX = 3
"""States that vLLM 0.31.0 feeds a draft in speculators' format (llama_eagle3.py, LlamaModel)."""
YARN = {
    "rope_type": None,
    "factor": None,
    "original_max_position_embeddings": None,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": None,
    "mscale_all_dim": None,
    "attention_factor": None,
    "truncate": True,
}
"""Keys of YaRN with the values that both libraries take where one is missing (transformers 5.17.0,
modeling_rope_utils.py; vLLM 0.31.0, layers/rotary_embedding/yarn_scaling_rope.py)."""
ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
"""Kinds that both libraries know, with the keys that each needs."""
ON_PURPOSE = 'or, if it is meant so, name this rule in [contracts] accepted = ["..."]'


def shape_of(facts: Facts) -> dict[str, Any]:
    """The decoder's values under this recipe; NotConcerned with `train.from`."""
    if facts.recipe.train.from_ is not None:
        raise NotConcerned("train.from brings its own shape")
    return decoder_shape(facts.recipe.train.draft, facts.verifier.config)


def text_of(facts: Facts) -> Any:
    """The language model's part of the verifier's config."""
    return text_config(facts.verifier.config)


@rule(
    "draft-shape-heads",
    what="The draft's heads, key-value heads and head size go together.",
    why="transformers' LlamaConfig takes any numbers; the first product of matrices fails when "
    "training starts, after the whole extraction.",
    how="The shape is made as training makes it.",
    fix="set [train.draft] num_attention_heads, num_key_value_heads, head_dim",
    stages=("train",),
    after=("verifier-config",),
)
def heads(facts: Facts) -> Iterator[Problem]:
    shape_of(facts)
    return iter(())


def _rule(id: str, *, after: tuple[str, ...] = (), **words: Any):  # noqa: A002
    """A rule on a shape that can be."""
    after = ("verifier-config", "draft-shape-heads", *after)
    return rule(id, stages=("train",), after=after, **words)


def latent_traps(text: Any) -> tuple[int, set[int]]:
    """(right head size, wrong ones that the config suggests) of a verifier with latent attention;
    NotConcerned with any other."""
    if not (text.get("kv_lora_rank") and text.get("v_head_dim")):
        raise NotConcerned("no latent attention in this verifier")
    nope, turned = text.get("qk_nope_head_dim") or 0, text.get("qk_rope_head_dim") or 0
    whole = text["hidden_size"] // text["num_attention_heads"]
    traps = {turned, nope + turned, whole, text.get("head_dim") or 0} - {0, text["v_head_dim"]}
    return text["v_head_dim"], traps


@_rule(
    "draft-shape-head-dim",
    what="The draft of a verifier with latent attention has heads of its v_head_dim.",
    why="Such a config has no head size that a llama could use: `head_dim` in transformers' Kimi "
    "config is the rotary part (64 for Kimi-K2.5), hidden / heads is 112, qk together are 192; "
    "speculators 0.9.0's create_transformer_layer_config takes the first. A draft of 64 trains and "
    "loads with half the attention.",
    how="head_dim of the shape against qk_rope_head_dim, qk_nope + qk_rope, hidden / heads.",
    fix="leave [train.draft] head_dim out (the verifier's v_head_dim: 128 for Kimi-K2.5)",
)
def head_dim(facts: Facts) -> Iterator[Problem | Note]:
    own = shape_of(facts)["head_dim"]
    right, traps = latent_traps(text_of(facts))
    if own in traps:
        yield Problem(f"head_dim {own}", where="train.draft.head_dim", expected=f"{right}")
    elif own != right:
        yield Note(f"head_dim {own}, the verifier's v_head_dim is {right}")


@_rule(
    "draft-shape-intermediate",
    what="The draft's feed-forward width is that of a dense layer, not of one expert.",
    why="A mixture of experts has two widths (Kimi-K2.5: intermediate_size 18,432 and "
    "moe_intermediate_size 2,048); with the second the draft has a ninth of the parameters that "
    "were meant.",
    how="intermediate_size of the shape against moe_intermediate_size.",
    fix="leave [train.draft] intermediate_size out, or set one on purpose (public Kimi drafts: "
    "12,288)",
)
def intermediate(facts: Facts) -> Iterator[Problem | Note]:
    own, text = shape_of(facts)["intermediate_size"], text_of(facts)
    expert = text.get("moe_intermediate_size")
    if expert is None:
        raise NotConcerned("no experts in this verifier")
    if own == expert and own != text.get("intermediate_size"):
        yield Problem(
            f"intermediate_size {own} is the width of one expert",
            where="train.draft.intermediate_size",
            expected=str(text.get("intermediate_size") or 3 * text["hidden_size"]),
        )
    elif not text.get("intermediate_size") and not facts.recipe.train.draft.intermediate_size:
        yield Note(f"no dense width in the config: {own} taken, 3 x hidden size")


@_rule(
    "draft-shape-activation",
    what="The draft's activation is silu.",
    why="vLLM 0.31.0 (models/llama.py, LlamaMLP) knows no other: `Unsupported activation: gelu. "
    "Only silu is supported for now.` comes when the trained draft is loaded.",
    how="hidden_act of the recipe, else of the verifier's config.",
    fix='set [train.draft] hidden_act = "silu"',
)
def activation(facts: Facts) -> Iterator[Problem]:
    if (own := shape_of(facts)["hidden_act"]) != "silu":
        yield Problem(f"hidden_act {own!r}", where="train.draft.hidden_act", expected="silu")


def split_faults(shape: dict[str, Any], tp: int) -> list[str]:
    """What of a decoder does not divide among tp GPUs as vLLM 0.31.0 divides it (models/llama.py,
    LlamaAttention and LlamaMLP), in words."""
    kv = shape["num_key_value_heads"]
    faults = [
        f"{name} {shape[name]}"
        for name in ("num_attention_heads", "intermediate_size")
        if shape[name] % tp
    ]
    if (kv % tp if kv >= tp else tp % kv) != 0:
        faults.append(f"num_key_value_heads {kv}")
    return faults


@_rule(
    "draft-shape-parallel",
    what="The draft divides among the GPUs that serve it.",
    why="vLLM runs the draft with the target's tensor parallel size (config/speculative.py, "
    "_verify_and_get_draft_tp): heads that do not divide are an AssertionError at the benchmark.",
    how="Heads, key-value heads and feed-forward width by tp of [benchmark.engine].",
    fix="set [train.draft] num_attention_heads, num_key_value_heads, intermediate_size",
    after=("engine-tp-divides",),
)
def parallel(facts: Facts) -> Iterator[Problem]:
    tp = facts.recipe.engine_for("benchmark").tp
    if faults := split_faults(shape_of(facts), tp):
        yield Problem(
            f"{', '.join(faults)} on {tp} GPUs",
            where="train.draft",
            expected=f"a multiple of tp = {tp}",
        )


@_rule(
    "draft-shape-rope-layouts",
    what="Where the verifier's config says rotary parameters in both layouts, they agree.",
    why="transformers 5 reads `rope_parameters`, older ones `rope_theta` and `rope_scaling`; where "
    "a file has both, transformers 5.17.0 takes rope_scaling (modeling_rope_utils.py, "
    "convert_rope_params_to_dict) and others the first. Verifier and draft then turn positions "
    "differently.",
    how="Both layouts of the file, key by key.",
    fix="leave one layout in config.json, or say [train.draft] rope in full",
)
def rope_layouts(facts: Facts) -> Iterator[Problem]:
    shape_of(facts)
    if differs := layouts_differ(text_of(facts)):
        yield Problem(differs, where=str(facts.verifier.path / "config.json"), expected="one value")


def layouts_differ(text: Any, *, whole: bool = False) -> str | None:
    """Where a config has rotary parameters in both layouts, the first key in which they differ, in
    words. whole: a key that one of them lacks counts, too, with the libraries' value for it."""
    new, old = text.get("rope_parameters"), dict(text.get("rope_scaling") or {})
    if text.get("rope_theta") is not None:
        old.setdefault("rope_theta", text["rope_theta"])
    if not new or not old:
        return None
    one, other = (rope_parameters({"rope_parameters": r}) for r in (new, old))
    keys = one.keys() | other.keys() if whole else one.keys() & other.keys()
    if not text.get("rope_scaling"):  # theta alone was written in the old layout
        keys = {"rope_theta"}
    for key in sorted(keys, key=lambda key: (key != "rope_type", key)):
        mine, theirs = (rope.get(key, YARN.get(key)) for rope in (one, other))
        if mine != theirs:
            return f"{key} is {mine} in rope_parameters and {theirs} in the older layout"
    return None


@_rule(
    "draft-shape-rope-kind",
    what="The draft's rotary kind is known to transformers and vLLM alike, with all its keys.",
    why="transformers trains with it, vLLM serves with it: a kind that only one knows (`ntk`, "
    "`deepseek_yarn`) stops the other, a missing key is a KeyError there.",
    how="rope_type and keys against transformers 5.17.0 (ROPE_INIT_FUNCTIONS) and vLLM 0.31.0 "
    "(layers/rotary_embedding/__init__.py, get_rope).",
    fix="set [train.draft] rope, for example to YaRN as the verifier's config has it",
)
def rope_kind(facts: Facts) -> Iterator[Problem]:
    rope = shape_of(facts)["rope_parameters"]
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_KINDS:
        yield Problem(
            f"rope_type {kind!r}", where="train.draft.rope", expected=", ".join(ROPE_KINDS)
        )
    elif missing := [key for key in ROPE_KINDS[kind] if rope.get(key) is None]:
        yield Problem(
            f"rope_type {kind!r} without {missing[0]}", where="train.draft.rope", expected="it"
        )


@_rule(
    "draft-shape-rope-theta",
    what="The draft's rotary base is the verifier's.",
    why="Positions of the states that the draft reads were turned with it. A `rope` table in the "
    "recipe without rope_theta falls back to transformers' 10,000 (50,000 for Kimi-K2.5): it "
    "trains, and acceptance falls with the length of the text.",
    how="rope_theta of [train.draft] rope against the verifier's config.",
    fix=f"add rope_theta to [train.draft] rope {ON_PURPOSE}",
)
def rope_theta(facts: Facts) -> Iterator[Problem]:
    own = shape_of(facts)["rope_parameters"].get("rope_theta")
    wanted = rope_parameters(text_of(facts))["rope_theta"]
    if own != wanted:
        says = "no rope_theta" if own is None else f"rope_theta {own}"
        yield Problem(says, where="train.draft.rope", expected=f"the verifier's {wanted}")


def yarn_differs(own: dict[str, Any], text: Any) -> str | None:
    """The first key of YaRN in which rotary parameters differ from the verifier's, in words;
    NotConcerned where that has none."""
    wanted = rope_parameters(text)
    if wanted["rope_type"] != "yarn":
        raise NotConcerned("no YaRN in this verifier")
    for key, default in YARN.items():
        have, want = own.get(key, default), wanted.get(key, default)
        if have != want:
            return f"{key} {have} instead of {want}"
    return None


@_rule(
    "draft-shape-yarn",
    what="The draft stretches positions by the verifier's YaRN: factor, mscale, mscale_all_dim, "
    "beta_fast, beta_slow and original positions.",
    why="vLLM builds the draft's rotary table from the draft's own config. Without YaRN, or with "
    "mscale missing (then scores are multiplied by 0.1 ln(factor) + 1, 1.42 for Kimi-K2.5), the "
    "draft is right on short texts and wrong beyond 4,096 tokens.",
    how="[train.draft] rope against the verifier's rope_scaling or rope_parameters.",
    fix=f"leave [train.draft] rope out, or repeat the verifier's YaRN in full, {ON_PURPOSE}",
    after=("draft-shape-rope-kind",),
)
def yarn(facts: Facts) -> Iterator[Problem]:
    if differs := yarn_differs(shape_of(facts)["rope_parameters"], text_of(facts)):
        yield Problem(differs, where="train.draft.rope", expected="the verifier's YaRN")


def longest(facts: Facts) -> int:
    """Positions that training and the benchmark use, tokens."""
    recipe = facts.recipe
    return max(recipe.prepare.max_length, recipe.engine_for("benchmark").max_model_len)


@_rule(
    "draft-shape-positions",
    what="The draft has positions for the longest sample and the longest text that is served.",
    why="max_position_embeddings sizes vLLM's rotary table: older versions read past its end, "
    "0.31.0 raises it (config/speculative.py, _maybe_override_draft_max_position_embeddings) and "
    "caps drafting where it does not.",
    how="max_position_embeddings against prepare.max_length and max_model_len of the benchmark.",
    fix="leave [train.draft] max_position_embeddings out (the verifier's)",
)
def positions(facts: Facts) -> Iterator[Problem | Note]:
    own = shape_of(facts)["max_position_embeddings"]
    if own < (needed := longest(facts)):
        yield Problem(
            f"max_position_embeddings {own:,}",
            where="train.draft.max_position_embeddings",
            expected=f"at least {needed:,}",
        )
    elif own < (whole := facts.verifier.context_length):
        yield Note(f"{own:,} positions, the verifier has {whole:,}")


@_rule(
    "draft-shape-tokens",
    what="The draft's bos, eos and pad ids are tokens of the verifier.",
    why="They come from the verifier's config; transformers' llama defaults are 1 and 2, which are "
    "other tokens there. A pad id beyond the vocabulary fails in torch's Embedding when training "
    "starts (`Padding_idx must be within num_embeddings`).",
    how="bos_token_id, eos_token_id, pad_token_id of the shape against vocab_size.",
    fix="correct the ids in the verifier's config.json",
)
def tokens(facts: Facts) -> Iterator[Problem]:
    shape = shape_of(facts)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values = shape[name] if isinstance(shape[name], list | tuple) else [shape[name]]
        for value in values:
            if value is not None and not 0 <= value < shape["vocab_size"]:
                yield Problem(
                    f"{name} {value}",
                    where=str(facts.verifier.path / "config.json"),
                    expected=f"0 to {shape['vocab_size'] - 1}",
                )


@_rule(
    "draft-shape-aux-layers",
    what="Three layers feed the draft.",
    why="vLLM 0.31.0 takes 3 for every draft in speculators' format (llama_eagle3.py, LlamaModel: "
    "num_aux_hidden_states is not written there, eagle_config neither): a draft of 2 or 4 trains, "
    "and its `fc.weight` does not fit when it is loaded.",
    how="extract.layers without the last one.",
    fix="name four ids in [extract] layers: three for the draft and the number of layers",
    after=("layers-last",),
)
def aux_layers(facts: Facts) -> Iterator[Problem]:
    count = len(facts.recipe.extract.layers) - 1
    if count != VLLM_AUX:
        yield Problem(f"{count} layers feed the draft", where="extract.layers", expected="3")
