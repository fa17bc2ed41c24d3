"""Numbers of a draft's config that no weight knows: positions and norms.

With other ones the draft loads, and acceptance falls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kimi_eagle.contracts.draft import (
    FITS,
    differs,
    draft_rule,
    expected_shape,
    in_config,
    is_start,
    known,
    ours,
)
from kimi_eagle.contracts.draft_shape import ON_PURPOSE, YARN, layouts_differ, longest
from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import NotConcerned, Note, Problem
from kimi_eagle.training.shape import rope_parameters


@draft_rule(
    "draft-rope-layouts",
    what="The draft's config says its rotary parameters once, for whole heads.",
    why="Where a file has both layouts, transformers 5.17.0 (modeling_rope_utils.py, "
    "convert_rope_params_to_dict) drops rope_parameters for rope_scaling, and vLLM serves by "
    "that; a partial_rotary_factor turns a part of each head alone. Both load, and acceptance "
    "falls with the length of the text.",
    how="rope_parameters against rope_theta and rope_scaling, key by key; partial_rotary_factor.",
    fix="leave rope_parameters alone in the decoder's config",
    after=FITS,
)
def rope_layouts(facts: Facts) -> Iterator[Problem]:
    layer = known(facts).layer
    tables = [layer, *(layer.get(key) or {} for key in ("rope_parameters", "rope_scaling"))]
    part = next((t["partial_rotary_factor"] for t in tables if t.get("partial_rotary_factor")), 1)
    if found := layouts_differ(layer, whole=True):
        yield in_config(facts, found, "one value")
    elif part != 1:
        yield in_config(facts, f"partial_rotary_factor {part}", "whole heads")


ROPE = (*FITS, "draft-rope-layouts")


def _rope(facts: Facts) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary parameters of the draft and those that it should have, in one form."""
    return rope_parameters(known(facts).layer), rope_parameters(expected_shape(facts))


def _no_rope(facts: Facts) -> bool:
    layer = facts.draft_files.layer
    return not any(layer.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta"))


@draft_rule(
    "draft-rope-theta",
    what="The draft's rotary base is the one that it was trained with.",
    why="It is in config.json alone, no weight knows it: 10,000 (llama's default, where the key is "
    "lost) instead of Kimi-K2.5's 50,000 loads, and acceptance falls with the length of the text.",
    how="rope_theta, in both layouts, against the recipe's shape.",
    fix=f"correct rope_parameters in config.json {ON_PURPOSE}",
    after=ROPE,
)
def rope_theta(facts: Facts) -> Iterator[Problem | Note]:
    own, wanted = (rope["rope_theta"] for rope in _rope(facts))
    if own != wanted:
        none = "no rotary parameters: " if _no_rope(facts) else ""
        yield differs(facts, f"{none}rope_theta {own}", wanted)


@draft_rule(
    "draft-yarn",
    what="The draft stretches positions as in training: YaRN with the same numbers, or none.",
    why="vLLM computes the rotary table from the draft's config. Without YaRN, or without its "
    "mscale (vLLM below 0.30 ignored it in a llama), the draft is wrong beyond the original "
    "positions (4,096 of Kimi-K2.5's 262,144) and loads all the same.",
    how="rope_parameters or rope_scaling, key by key with the libraries' defaults, against the "
    "recipe's shape.",
    fix=f"correct rope_parameters in config.json {ON_PURPOSE}",
    after=ROPE,
)
def yarn(facts: Facts) -> Iterator[Problem | Note]:
    own, wanted = _rope(facts)
    if "yarn" not in (own["rope_type"], wanted["rope_type"]):
        raise NotConcerned("no YaRN in this draft")
    if _no_rope(facts) and own["rope_theta"] != wanted["rope_theta"]:
        raise NotConcerned("no rotary parameters at all, as draft-rope-theta says")
    for key, default in YARN.items():
        have, want = own.get(key, default), wanted.get(key, default)
        if have != want:
            yield differs(facts, f"YaRN: {key} {have}", str(want))
            return


@draft_rule(
    "draft-positions",
    what="The draft has the positions of its shape.",
    why="max_position_embeddings sizes vLLM's rotary table and caps drafting: below the verifier's "
    "length the draft is not asked, or older versions read past the table's end.",
    how="max_position_embeddings against the recipe's shape and the lengths that the recipe uses.",
    fix="correct max_position_embeddings in config.json",
    after=FITS,
)
def positions(facts: Facts) -> Iterator[Problem | Note]:
    own = known(facts).shape().get("max_position_embeddings")
    if own is None:
        raise NotConcerned("the config tells no max_position_embeddings")
    wanted, used = expected_shape(facts)["max_position_embeddings"], longest(facts)
    says = f"max_position_embeddings {own:,}"
    if own < used:
        yield in_config(facts, says, f"at least {used:,}")
    elif own < wanted:
        yield differs(facts, says, f"{wanted:,}")
    elif is_start(facts) and own < (whole := facts.verifier.context_length):
        yield Note(f"{own:,} positions, the verifier has {whole:,}")


@draft_rule(
    "draft-norms",
    what="The draft's norms are those that it was trained with.",
    why="vLLM 0.31.0 (llama_eagle3.py) reads rms_norm_eps, norm_before_residual and norm_output "
    "from config.json, no weight knows them: another value loads and costs acceptance.",
    how="rms_norm_eps and norm_before_residual against the recipe, or the draft that training "
    "started from; norm_before_fc, fc_norm and norm_output where the recipe says them. That "
    "norm_output is missing, as in drafts of other makers, is told.",
    fix=f"correct config.json {ON_PURPOSE}",
    after=FITS,
)
def norms(facts: Facts) -> Iterator[Problem | Note]:
    draft, told = ours(facts), facts.recipe.train.draft
    before = told.norm_before_residual
    if facts.recipe.train.from_ is not None:
        before = facts.start.config.get("norm_before_residual", True)
    wanted = {
        "rms_norm_eps": expected_shape(facts)["rms_norm_eps"],
        "norm_before_residual": before,
    }
    has = {
        "rms_norm_eps": draft.shape()["rms_norm_eps"],
        "norm_before_residual": draft.config.get("norm_before_residual", True),
    }
    if facts.recipe.train.from_ is None:
        said = told.model_fields_set & {"norm_before_fc", "fc_norm", "norm_output"}
        wanted |= {key: getattr(told, key) for key in sorted(said)}
        has |= {key: bool(draft.config.get(key, False)) for key in said}
    for key, value in wanted.items():
        if has[key] != value:
            yield in_config(facts, f"{key} {has[key]}", value)
            return
    silent = "norm_output" not in told.model_fields_set
    if silent and not draft.config.get("norm_output") and draft.config.get("norm_before_fc"):
        yield Note("norm_output is not set, which training here sets where nothing else is said")
