"""The draft's shape: from the verifier, from the recipe, and what is refused."""

from __future__ import annotations

import pytest

from kimi_eagle.errors import UsageError
from kimi_eagle.recipe import DraftSection

KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "pad_token_id": 163839,
    "text_config": {
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "head_dim": 64,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "hidden_act": "silu",
        "eos_token_id": 163586,
    },
}
"""The values of Kimi-K2.5's published config that matter here."""


def decoder(draft=None, config=KIMI):
    from kimi_eagle.training.draft_config import decoder_config

    return decoder_config(draft or DraftSection(), config)


def test_follows_the_small_model(verifier):
    from kimi_eagle.training.draft_config import speculator_config

    config = speculator_config(
        DraftSection(),
        verifier.path,
        verifier.config,
        layers=(2, 15, 27, 30),
        draft_vocab_size=4096,
        ttt_steps=3,
        attention="sdpa",
    )
    own = config.transformer_layer_config
    assert (own.model_type, own.num_hidden_layers) == ("llama", 1)
    assert (own.hidden_size, own.num_attention_heads, own.num_key_value_heads) == (576, 9, 3)
    assert (own.head_dim, own.intermediate_size, own.vocab_size) == (64, 1536, 49152)
    assert own.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert (own.bos_token_id, own.eos_token_id) == (1, 2)
    assert getattr(own, "sliding_window", None) is None
    assert not getattr(own, "layer_types", None)
    assert config.eagle_aux_hidden_state_layer_ids == [2, 15, 27]
    assert config.norm_before_fc and config.norm_output and config.norm_before_residual
    where = config.speculators_config.verifier
    assert where.name_or_path == str(verifier.path.resolve())
    assert where.architectures == ["LlamaForCausalLM"]


def test_follows_a_nested_config_with_latent_attention():
    own = decoder()
    assert (own.hidden_size, own.num_attention_heads, own.intermediate_size) == (7168, 64, 18432)
    assert own.head_dim == 128, "not 64 (the rotary part) and not 112 (hidden / heads)"
    assert own.vocab_size == 163840
    assert (own.bos_token_id, own.eos_token_id, own.pad_token_id) == (163584, 163586, 163839)
    rope = own.rope_parameters
    assert (rope["rope_type"], rope["rope_theta"], rope["factor"]) == ("yarn", 50000.0, 64.0)
    assert rope["mscale"] == rope["mscale_all_dim"] == 1.0
    assert "type" not in rope


def test_recipe_overrides_the_verifier():
    draft = DraftSection(
        layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=96,
        intermediate_size=1000,
        rope={"rope_type": "default", "rope_theta": 1e6},
        hidden_act="gelu",
        max_position_embeddings=77,
    )
    own = decoder(draft)
    assert (own.num_hidden_layers, own.num_attention_heads, own.num_key_value_heads) == (2, 32, 8)
    assert (own.head_dim, own.intermediate_size, own.hidden_act) == (96, 1000, "gelu")
    assert own.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert own.max_position_embeddings == 77


def test_rope_by_layer_type_takes_full_attention():
    from kimi_eagle.training.draft_config import rope_parameters

    nested = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    rope = rope_parameters({"rope_parameters": nested})
    assert rope == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("draft", "change", "word"),
    [
        (DraftSection(num_key_value_heads=7), {}, "num_key_value_heads"),
        (DraftSection(head_dim=63), {}, "head_dim"),
        (DraftSection(), {"hidden_size": None}, "hidden_size"),
        (DraftSection(), {"hidden_size": 7100, "kv_lora_rank": 0, "head_dim": 0}, "head_dim"),
    ],
)
def test_impossible_shapes_are_refused(draft, change, word):
    config = {**KIMI, "text_config": {**KIMI["text_config"], **change}}
    with pytest.raises(UsageError, match=word):
        decoder(draft, config)


def test_draft_vocabulary_larger_than_the_verifiers_is_refused(verifier):
    from kimi_eagle.training.draft_config import speculator_config

    with pytest.raises(UsageError, match=r"vocab.draft_vocab_size.*at most.*49152"):
        speculator_config(
            DraftSection(),
            verifier.path,
            verifier.config,
            layers=(2, 30),
            draft_vocab_size=49153,
            ttt_steps=1,
            attention="sdpa",
        )


def test_the_norms_follow_the_recipe(verifier, tmp_path):
    """Each form has the tensors that its config asks for, and the forms for both servers are not
    refused by the export for SGLang."""
    from speculators.models.eagle3 import Eagle3DraftModel

    from kimi_eagle.publishing import sglang
    from kimi_eagle.training.draft_config import speculator_config
    from kimi_eagle.training.draftfiles import DraftFiles, tensor_shapes

    both = {"norm_before_residual": False, "norm_before_fc": False}
    forms = {
        "ours": ({}, ["input_norm.weight"], None),
        "each": (both | {"fc_norm": True}, [f"fc_norm.{i}.weight" for i in range(3)],
                 ["fc_norm", "norm_output"]),
        "plain": (both | {"norm_output": False}, [], []),
    }  # fmt: skip
    for name, (said, norms, newer) in forms.items():
        config = speculator_config(
            DraftSection(**said),
            verifier.path,
            verifier.config,
            layers=(2, 15, 27, 30),
            draft_vocab_size=32,
            ttt_steps=3,
            attention="sdpa",
        )
        model = Eagle3DraftModel(config=config)
        model._keys_to_ignore_on_save = [*model._keys_to_ignore_on_save, "embed_tokens.weight"]
        model.save_pretrained(tmp_path / name)
        draft = DraftFiles(tmp_path / name)
        own = {n: e["shape"] for n, e in draft.tensors.items() if n not in ("t2d", "d2t")}
        assert own == {n: s for n, s in tensor_shapes(draft).items() if n != "d2t"}, name
        assert [n for n in own if n in ("input_norm.weight",) or "fc_norm" in n] == norms
        if newer is None:
            with pytest.raises(UsageError, match="norm_before_fc = false and fc_norm = true"):
                sglang.refuse(draft)
        else:
            sglang.refuse(draft)
            assert sglang.needs_newer(draft) == newer


def test_two_norms_of_the_states_are_refused():
    with pytest.raises(ValueError, match="expected norm_before_fc = false beside it"):
        DraftSection(fc_norm=True)


def test_drafts_that_were_trained_before_the_recipe_spoke_of_norms_stay_done(recipe_for):
    """The key has the younger switches only where they change the draft."""
    from kimi_eagle.stages.train import of_recipe

    plain = of_recipe(recipe_for())["draft"]
    assert not {"norm_before_fc", "fc_norm", "norm_output"} & set(plain)
    said = {"norm_before_fc": True, "fc_norm": False, "norm_output": True}
    assert of_recipe(recipe_for(draft=said))["draft"] == plain
    other = of_recipe(recipe_for(draft={"norm_output": False}))["draft"]
    assert other == plain | {"norm_output": False}
