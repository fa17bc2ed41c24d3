"""Recipes and verifiers that would give a draft of the wrong shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from place import Case, Place

YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
"""The small world's, in the newer layout of transformers."""


def draft(**values: Any) -> Callable[[Place], None]:
    """Keys of [train.draft]."""
    return lambda place: place.recipe["train"]["draft"].update(values)


def text(**values: Any) -> Callable[[Place], None]:
    """Keys of the verifier's text_config; None removes one."""
    return lambda place: place.change_text(**values)


def rope(**values: Any) -> Callable[[Place], None]:
    """The small world's YaRN in the recipe, with other values; None leaves a key out."""
    return draft(rope={k: v for k, v in (YARN | values).items() if v is not None})


def copied(**values: Any) -> Callable[[Place], None]:
    """The table as the verifier's own config has it (`type`, no theta), with other values."""

    def apply(place: Place) -> None:
        table = place.config()["text_config"]["rope_scaling"]
        assert "type" in table and "rope_type" not in table
        draft(rope=table | values)(place)

    return apply


def three_heads_on_two(place: Place) -> None:
    draft(num_attention_heads=3, num_key_value_heads=3)(place)
    place.recipe["benchmark"]["engine"] = {"tp": 2}


def layers(*ids: int) -> Callable[[Place], None]:
    return lambda place: place.recipe["extract"].update(layers=list(ids))


NEWER = text(rope_parameters=YARN, rope_scaling=None, rope_theta=None)

CASES = [
    Case("draft-shape-heads", draft(num_key_value_heads=3), "4 attention heads over 3"),
    Case("draft-shape-heads", draft(head_dim=15), "head_dim 15; expected an even number"),
    Case("draft-shape-head-dim", draft(head_dim=8), "head_dim 8; expected 16"),
    Case("draft-shape-head-dim", draft(head_dim=24), "head_dim 24", draft(head_dim=16)),
    Case("draft-shape-intermediate", draft(intermediate_size=32), "32 is the width of one expert"),
    Case("draft-shape-activation", text(hidden_act="gelu"), "hidden_act 'gelu'; expected silu"),
    Case("draft-shape-activation", draft(hidden_act="gelu_new"), "gelu_new"),
    Case("draft-shape-parallel", three_heads_on_two, "num_attention_heads 3, num_key"),
    Case("draft-shape-rope-layouts", text(rope_parameters=YARN | {"factor": 32.0}), "factor is 32"),
    Case(
        "draft-shape-rope-layouts",
        text(rope_parameters=YARN, rope_scaling=None, rope_theta=10000.0),
        "rope_theta is 50000.0 in rope_parameters and 10000.0",
        NEWER,
    ),
    Case("draft-shape-rope-kind", text(rope_scaling={"type": "ntk", "factor": 2.0}), "'ntk'"),
    Case(
        "draft-shape-rope-kind",
        text(rope_scaling={"type": "linear"}),
        "'linear' without factor",
        text(rope_scaling={"type": "linear", "factor": 2.0}),
    ),
    # One key missing is one problem: what YaRN needs is not compared before it is there.
    Case(
        "draft-shape-rope-kind",
        rope(original_max_position_embeddings=None),
        "'yarn' without original_max_position_embeddings",
        copied(rope_theta=50000.0),
    ),
    Case("draft-shape-rope-kind", rope(rope_type="ntk"), "'ntk'", rope()),
    Case("draft-shape-rope-theta", copied(), "no rope_theta", copied(rope_theta=50000.0)),
    Case("draft-shape-yarn", copied(rope_theta=50000.0, factor=8.0), "factor 8.0", rope()),
    Case("draft-shape-rope-theta", rope(rope_theta=None), "no rope_theta; expected", rope()),
    Case("draft-shape-rope-theta", rope(rope_theta=10000.0), "rope_theta 10000.0", NEWER),
    Case(
        "draft-shape-yarn",
        draft(rope={"rope_type": "default", "rope_theta": 50000.0}),
        "rope_type default instead of yarn",
    ),
    Case("draft-shape-yarn", rope(factor=32.0), "factor 32.0 instead of 64.0", rope()),
    Case("draft-shape-yarn", rope(mscale=None), "mscale None instead of 1.0", rope(beta_slow=None)),
    Case("draft-shape-yarn", rope(beta_fast=16.0), "beta_fast 16.0", NEWER),
    Case("draft-shape-yarn", rope(original_max_position_embeddings=128), "128 instead of 64"),
    Case(
        "draft-shape-positions",
        draft(max_position_embeddings=100),
        "max_position_embeddings 100; expected at least 256",
        draft(max_position_embeddings=256),
    ),
    Case("draft-shape-tokens", text(pad_token_id=999), "pad_token_id 999; expected 0 to 383"),
    Case("draft-shape-aux-layers", layers(1, 2, 4), "2 layers feed the draft"),
]
