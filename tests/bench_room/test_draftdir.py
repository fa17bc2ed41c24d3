"""What a draft directory says of itself, and what is refused before an engine is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kimi_eagle.bench.draftdir import open_draft
from kimi_eagle.errors import UsageError


def make(folder: Path, config: object, weights: str | None = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    if weights:
        (folder / weights).write_bytes(b"weights")
    return folder


def speculators_config(**more: object) -> dict:
    layer = {"model_type": "llama", "hidden_size": 576, "vocab_size": 49152}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 4096,
        "transformer_layer_config": layer,
        "speculators_config": {"verifier": {"name_or_path": "/nowhere/at/all"}},
    } | more


@pytest.mark.parametrize(
    ("config", "speculative"),
    [
        (speculators_config(), {"method": "eagle3"}),
        (speculators_config(architectures=["Eagle3Speculator"]), {"method": "eagle3"}),
        (
            speculators_config(speculators_model_type="peagle"),
            {"method": "eagle3", "parallel_drafting": True},
        ),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, {"method": "eagle3"}),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, {"method": "eagle3"}),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {"method": "eagle3"}),
        (speculators_config(speculators_model_type="dflash"), {"method": "dflash"}),
        ({"architectures": ["EagleLlamaForCausalLM"]}, {"method": "eagle"}),
        ({"model_type": "medusa"}, {"method": "medusa"}),
    ],
)
def test_the_method_is_read_from_the_config(tmp_path: Path, config: dict, speculative: dict):
    assert open_draft(make(tmp_path / "d", config)).speculative == speculative


@pytest.mark.parametrize(
    "name", ["DeepSeekMTPModel", "EagleDeepSeekMTPModel", "KimiK25ForConditionalGeneration"]
)
def test_what_is_no_draft_is_refused(tmp_path: Path, name: str):
    with pytest.raises(UsageError, match=f"not a draft model: {name}"):
        open_draft(make(tmp_path / "d", {"architectures": [name]}))


def test_the_table_names_what_vllm_knows():
    from importlib.util import find_spec

    from kimi_eagle.training import draftkind

    (folder,) = find_spec("vllm").submodule_search_locations
    registry = (Path(folder) / "model_executor/models/registry.py").read_text()
    for name in draftkind._PREFIXED:
        assert f'"Eagle3{name}ForCausalLM"' in registry
    algos = Path(folder) / "transformers_utils/configs/speculators/algos.py"
    for name in draftkind.SPECULATORS:
        assert f'@register_speculator("{name}")' in algos.read_text()


def test_a_draft_for_this_verifier_passes(tmp_path: Path, verifier_dir: Path) -> None:
    info = open_draft(make(tmp_path / "d", speculators_config()), verifier_dir)
    assert (info.vocab_size, info.hidden_size, info.draft_vocab_size) == (49152, 576, 4096)


def test_refusals(tmp_path: Path, verifier_dir: Path) -> None:
    other = {"model_type": "llama", "hidden_size": 576, "vocab_size": 32000}
    cases = [
        (verifier_dir, "not a draft model: LlamaForCausalLM"),
        (tmp_path / "absent", "no such directory"),
        (make(tmp_path / "w", speculators_config(), None), "no weights"),
        (make(tmp_path / "j", "{broken"), "config.json cannot be read"),
        (make(tmp_path / "l", "[]"), "holds no object"),
        (
            make(tmp_path / "o", speculators_config(transformer_layer_config=other)),
            "another verifier: vocab_size 32000, the verifier has 49152",
        ),
    ]
    (tmp_path / "e").mkdir()
    cases.append((tmp_path / "e", "no config.json"))
    for path, said in cases:
        with pytest.raises(UsageError) as e:
            open_draft(path, verifier_dir)
        assert said in e.value.line() and str(path) in e.value.line()
        assert e.value.exit_code == 2


def test_digest_follows_the_contents_not_the_place(tmp_path: Path) -> None:
    first = open_draft(make(tmp_path / "a", speculators_config())).digest()
    assert open_draft(make(tmp_path / "b", speculators_config())).digest() == first
    changed = make(tmp_path / "c", speculators_config())
    (changed / "model.safetensors").write_bytes(b"Weights")
    assert open_draft(changed).digest() != first
    assert open_draft(make(tmp_path / "d", speculators_config(k=1))).digest() != first
