"""The stand-in is the published checkpoint in all that headers tell, and its rules hold."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import standin

from kimi_eagle.contracts import Facts, judge, rules
from kimi_eagle.recipe import Recipe, load
from kimi_eagle.verifier import Verifier, open_verifier

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def recipe(kimi_standin: Path) -> Recipe:
    """The shipped Kimi recipe, its verifier being the stand-in."""
    recipe = load(ROOT / "jobs/kimi-k2.5.toml")
    verifier = recipe.verifier.model_copy(update={"path": str(kimi_standin)})
    return recipe.model_copy(update={"verifier": verifier})


def test_as_many_tensors_parameters_and_bytes_as_published():
    """The report of the published files (SOURCES.md): 208,550 tensors, 170,738,182,128 elements,
    554.27 GiB."""
    found = [tensor for _, tensor in standin.tensors()]
    assert len(found) == len({name for name, *_ in found}) == 208_550
    assert sum(math.prod(shape) for *_, shape in found) == 170_738_182_128
    size = sum(math.prod(shape) * standin.BYTES[dtype] for _, dtype, shape in found)
    assert round(size / 2**30, 2) == 554.27


def test_full_of_holes_and_whole(kimi_standin: Path):
    verifier = open_verifier(kimi_standin, trust_remote_code=True, require_template=True)
    assert (verifier.hidden_size, verifier.num_layers, verifier.vocab_size) == (7168, 61, 163840)
    assert verifier.eos_ids == (163586, 163585) and not verifier.tied
    assert verifier.table("embedding") == "language_model.model.embed_tokens.weight"
    assert verifier.table("lm_head") == "language_model.lm_head.weight"
    assert verifier.norm_name() == "language_model.model.norm.weight"
    assert len(verifier.headers) == 64
    files = [p.stat() for p in kimi_standin.iterdir()]
    assert 595e9 < sum(f.st_size for f in files) < 596e9
    assert sum(f.st_blocks for f in files) * 512 < 80e6


def test_an_expert_is_packed_as_the_quantisation_says(kimi_standin: Path):
    verifier = Verifier(kimi_standin)
    stem = "language_model.model.layers.60.mlp.experts.383.down_proj."
    shapes = {
        end: verifier.entry(stem + end)["shape"]
        for end in ("weight_packed", "weight_scale", "weight_shape")
    }
    assert shapes == {
        "weight_packed": [7168, 2048 // 8],
        "weight_scale": [7168, 2048 // 32],
        "weight_shape": [2],
    }


def test_rules_of_verifier_tokenizer_and_template_hold(recipe: Recipe):
    verdicts = judge(Facts(recipe), rules().values())
    states = {v.rule.id: v.state for v in verdicts}
    ours = {i: s for i, s in states.items() if i.startswith(("verifier-", "tok", "template-"))}
    assert set(ours.values()) == {"ok", "later"}
    assert {i for i, s in ours.items() if s == "later"} == {
        "tokenizer-opens",
        "tokenizer-parity",
        "template-renders",
        "template-thinking",
        "template-ends-turn",
    }


def test_check_opens_no_heavy_library(recipe: Recipe):
    """In a process of its own: what check imports to judge the stand-in."""
    code = (
        "import json, sys\n"
        "from kimi_eagle.contracts import Facts, judge, rules\n"
        "from kimi_eagle.recipe import parse\n"
        "recipe = parse(json.loads(sys.argv[1]), where='recipe', base='.')\n"
        "judge(Facts(recipe), rules().values())\n"
        "heavy = {'torch', 'transformers', 'vllm', 'speculators', 'pyarrow', 'safetensors'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    told = json.dumps(recipe.model_dump(mode="json", exclude_none=True))
    done = subprocess.run(
        [sys.executable, "-c", code, told], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
