"""The rules of the draft's shape on the published configuration of Kimi-K2.5."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kimi_eagle import contracts
from kimi_eagle.contracts.draft_shape import shape_of
from kimi_eagle.contracts.judging import judge
from kimi_eagle.recipe import load

ROOT = Path(__file__).resolve().parents[2]
RULES = [r for r in contracts.rules().values() if r.boundary == "draft_shape"]


def facts(tmp_path: Path, **draft: Any) -> contracts.Facts:
    """jobs/kimi-k2.5.toml over the published config.json; keys of [train.draft] changed."""
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    shutil.copy(ROOT / "tests/kimi/config.json", model)
    recipe = load(ROOT / "jobs/kimi-k2.5.toml")
    section = recipe.train.draft.model_copy(update=draft)
    train = recipe.train.model_copy(update={"draft": section})
    verifier = recipe.verifier.model_copy(update={"path": str(model)})
    return contracts.Facts(recipe.model_copy(update={"train": train, "verifier": verifier}))


def broken(looked: contracts.Facts) -> dict[str, str]:
    verdicts = judge(looked, RULES)
    return {v.rule.id: v.problems[0].what for v in verdicts if v.state == "problem"}


def test_the_recipe_gives_the_shape_that_kimi_needs(tmp_path):
    looked = facts(tmp_path)
    assert broken(looked) == {}
    shape = shape_of(looked)
    rope = shape["rope_parameters"]
    assert (shape["head_dim"], shape["num_attention_heads"]) == (128, 64)
    assert (shape["hidden_size"], shape["vocab_size"]) == (7168, 163_840)
    assert (rope["rope_theta"], rope["rope_type"], rope["factor"]) == (50_000.0, "yarn", 64.0)
    assert rope["mscale"] == rope["mscale_all_dim"] == 1.0
    assert (rope["beta_fast"], rope["beta_slow"]) == (32.0, 1.0)
    assert rope["original_max_position_embeddings"] == 4096
    assert shape["max_position_embeddings"] == 262_144
    assert (shape["bos_token_id"], shape["hidden_act"]) == (163_584, "silu")


@pytest.mark.parametrize("size", [64, 112, 192])
def test_head_sizes_that_latent_attention_suggests(tmp_path, size):
    assert broken(facts(tmp_path, head_dim=size)) == {"draft-shape-head-dim": f"head_dim {size}"}


def test_the_width_of_one_expert(tmp_path):
    assert set(broken(facts(tmp_path, intermediate_size=2048))) == {"draft-shape-intermediate"}


def test_heads_that_eight_gpus_cannot_share(tmp_path):
    found = broken(facts(tmp_path, num_attention_heads=36, num_key_value_heads=36))
    assert set(found) == {"draft-shape-parallel"}


def test_yarn_lost(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 50_000.0}
    assert set(broken(facts(tmp_path, rope=rope))) == {"draft-shape-yarn"}
