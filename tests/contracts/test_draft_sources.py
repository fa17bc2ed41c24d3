"""What the rules of the draft say of the libraries, against the libraries themselves."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from kimi_eagle.contracts import draft_shape, training
from kimi_eagle.training.draftfiles import _DEFAULTS, DraftFiles


def source(package: str, name: str) -> str:
    """A Python file of an installed package, not imported."""
    (folder,) = find_spec(package).submodule_search_locations
    return (Path(folder) / name).read_text()


def test_losses():
    from speculators.losses import utils

    for names in utils._LOSS_FN_MAPS.values():
        assert sorted(names) == sorted(training.LOSSES)
    for spec in ("kl_div", '{"ce": 0.1, "tv": 0.9}'):
        assert training._loss_fault(spec) is None
        utils.resolve_loss_config(spec, "eager")
    for spec in ("kl", "{}", "[1]", '{"ce": "a"}', '{"no": 1}', ""):
        assert training._loss_fault(spec)
        with pytest.raises(ValueError):
            utils.resolve_loss_config(spec, "eager")


def test_rope_kinds():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    text = source("vllm", "model_executor/layers/rotary_embedding/__init__.py")
    for kind in draft_shape.ROPE_KINDS:
        assert f'scaling_type == "{kind}"' in text
        assert kind in ROPE_INIT_FUNCTIONS or kind == "default"
    assert 'scaling_type == "ntk"' in text and "ntk" not in ROPE_INIT_FUNCTIONS


def test_vllm_takes_three_states_and_silu_alone():
    text = source("vllm", "model_executor/models/llama_eagle3.py")
    assert "self.num_aux_hidden_states = len(layer_ids) if layer_ids else 3" in text
    updates = source("vllm", "transformers_utils/configs/speculators/algos.py")
    start = updates.index("def update_eagle3")
    eagle3 = updates[start : updates.index("@register_speculator", start)]
    assert "num_aux_hidden_states" not in eagle3 and '"eagle_config"' not in eagle3
    assert 'if hidden_act != "silu"' in source("vllm", "model_executor/models/llama.py")


@pytest.mark.parametrize("kind", _DEFAULTS)
def test_what_a_config_file_leaves_out(kind, tmp_path):
    """As transformers writes a decoder: only what is not its default."""
    from transformers import AutoConfig

    whole = AutoConfig.for_model(kind)
    config = {"transformer_layer_config": {"model_type": kind}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = DraftFiles(tmp_path).shape()
    for key in (*training.SHAPE_ALL, "hidden_size", "vocab_size", "num_hidden_layers"):
        assert shape[key] == getattr(whole, key), key
    for key in ("rms_norm_eps", "bos_token_id", "eos_token_id"):
        assert shape[key] == getattr(whole, key), key


def test_a_library_of_the_pinned_version_needs_no_other_settings(place):
    from kimi_eagle.contracts.judging import judge
    from kimi_eagle.contracts.rule import RULES

    (verdict,) = judge(place.facts(heavy=True), [RULES["training-defaults"]])
    assert verdict.state == "ok"


def test_a_draft_that_is_swapped_while_it_is_read(place):
    from drafts import good

    from kimi_eagle.errors import UsageError

    draft = DraftFiles(good(place).write(place.path / "draft"))
    assert draft.tensors
    (draft.path / "model.safetensors").unlink()
    for read in (lambda: draft.array("d2t"), draft.digest):
        with pytest.raises(UsageError, match="changed while it was read"):
            read()


def test_the_digest_of_a_draft_follows_its_weights(tmp_path):
    from safetensors.numpy import save_file

    def made(name: str, **tensors: np.ndarray) -> DraftFiles:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file(tensors, tmp_path / name / "model.safetensors")
        return DraftFiles(tmp_path / name)

    one = made("a", fc=np.zeros((4, 4), np.float32), d2t=np.arange(3))
    assert made("b", fc=np.zeros((4, 4), np.float32), d2t=np.arange(3)).digest() == one.digest()
    assert made("c", fc=np.ones((4, 4), np.float32), d2t=np.arange(3)).digest() != one.digest()
    assert made("d", fc=np.zeros((4, 4), np.float32), d2t=np.arange(3) + 1).digest() != one.digest()
