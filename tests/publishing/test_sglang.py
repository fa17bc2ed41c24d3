"""The export for SGLang against the rules of its EAGLE-3 reader, as its source has them:
sgl-project/sglang, python/sglang/srt/models/llama_eagle3.py at 03d5a7771f60 (one decoder layer
named `midlayer`), and since pull request 24663 (`layers.0`, fc_norm). SGLang itself is not run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

STACKED = {
    ".q_proj": (".qkv_proj", 0),
    ".k_proj": (".qkv_proj", 1),
    ".v_proj": (".qkv_proj", 2),
    ".gate_proj": (".gate_up_proj", 0),
    ".up_proj": (".gate_up_proj", 1),
}
PLAIN = {"norm_before_fc": False, "norm_before_residual": False, "norm_output": False}


class Reader:
    """The reader's parameters by a flat config, and its loading of weights. newer: the layers'
    names and norms that came with pull request 24663."""

    def __init__(self, config: dict, *, newer: bool):
        hidden, size = config["hidden_size"], config["head_dim"]
        states, kv = config["target_hidden_size"], config["num_key_value_heads"] * size
        queries, wide = config["num_attention_heads"] * size, config["intermediate_size"]
        layer = "model.layers.0" if newer else "model.midlayer"
        self.newer, self.hot_token_id = newer, None
        # A stacked parameter: the rows of each of its parts, and their width.
        self.shapes: dict[str, tuple[list[int], list[int]]] = {
            f"{layer}.self_attn.qkv_proj.weight": ([queries, kv, kv], [2 * hidden]),
            f"{layer}.mlp.gate_up_proj.weight": ([wide, wide], [hidden]),
            f"{layer}.self_attn.o_proj.weight": ([hidden], [queries]),
            f"{layer}.mlp.down_proj.weight": ([hidden], [wide]),
            "model.embed_tokens.weight": ([config["vocab_size"]], [hidden]),
            "model.fc.weight": ([hidden], [3 * states]),
            "model.norm.weight": ([hidden], []),
            "lm_head.weight": ([config["draft_vocab_size"]], [hidden]),
        }
        for norm in ("input_layernorm", "post_attention_layernorm", "hidden_norm"):
            self.shapes[f"{layer}.{norm}.weight"] = ([hidden], [])
        if newer and config.get("fc_norm"):
            self.shapes |= {f"model.fc_norm.{i}.weight": ([states], []) for i in range(3)}
        self.open = {(n, i) for n, (rows, _) in self.shapes.items() for i in range(len(rows))}
        self.dropped: list[str] = []

    def load(self, tensors: dict[str, np.ndarray]) -> None:
        for name, tensor in tensors.items():
            if self.newer:
                name = name.replace("midlayer", "layers.0")
            if "d2t" in name:
                self.hot_token_id = tensor + np.arange(tensor.shape[0])
                continue
            if "t2d" in name:
                continue
            part = 0
            for word, (stacked, index) in STACKED.items():
                if word in name:
                    name, part = name.replace(word, stacked), index
                    break
            full = name if name in self.shapes else f"model.{name}"
            if full not in self.shapes:
                self.dropped.append(name)  # the reader says nothing
                continue
            rows, rest = self.shapes[full]
            assert list(tensor.shape) == [rows[part], *rest], full
            self.open.remove((full, part))


def exported(world, cli, *words, **config):
    world.finish(**(PLAIN | config))
    out = world.path / "out"
    done = cli("export", world.run.path, out, "--for", "sglang", *words)
    assert done.exit_code == 0, done.output
    return json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")


@pytest.mark.parametrize("newer", [False, True])
def test_every_weight_finds_its_place_and_none_is_dropped(world, cli, newer):
    config, tensors = exported(world, cli)
    reader = Reader(config, newer=newer)
    reader.load(tensors)
    assert (reader.open, reader.dropped) == (set(), [])
    assert reader.hot_token_id.tolist() == list(range(0, 64, 2)), "offsets to ascending tokens"
    whole = load_file(world.run.draft / "model.safetensors")
    assert "t2d" not in tensors and "midlayer.self_attn.q_proj.weight" in tensors
    for name, tensor in tensors.items():
        assert np.array_equal(tensor, whole[name.replace("midlayer.", "layers.0.")]), name


def test_the_reader_of_this_test_sees_what_is_dropped_and_what_is_missing(world, cli):
    config, tensors = exported(world, cli)
    tensors["input_norm.weight"] = tensors.pop("norm.weight")
    reader = Reader(config, newer=False)
    reader.load(tensors)
    assert reader.dropped == ["input_norm.weight"]
    assert reader.open == {("model.norm.weight", 0)}


def test_config_and_layer_ids(world, cli):
    config, _ = exported(world, cli)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert [i + 1 for i in ids] == [2, 3, 5], "SGLang adds one to each"
    assert (config["draft_vocab_size"], config["vocab_size"]) == (32, 64)
    assert config["tie_word_embeddings"] is False and config["num_hidden_layers"] == 1
    assert (config["rope_theta"], config["rope_scaling"]["factor"]) == (50000.0, 4.0)
    assert not {"norm_output", "fc_norm", "speculators_config"} & set(config)
    card = (world.path / "out/README.md").read_text()
    assert "[1, 2, 4] (as SGLang counts" in card and "SGLang itself was not run" in card
    assert "--speculative-num-steps 2" in card and "pull/24663" not in card


def test_without_embedding_only_that_is_open(world, cli):
    """SGLang's worker puts the verifier's there (speculative/eagle_worker.py, set_embed)."""
    config, tensors = exported(world, cli, "--without-embedding")
    reader = Reader(config, newer=True)
    reader.load(tensors)
    assert reader.open == {("model.embed_tokens.weight", 0)} and not reader.dropped


def test_switches_of_newer_versions_are_told(world, cli):
    config, tensors = exported(world, cli, norm_output=True, fc_norm=True)
    reader = Reader(config, newer=True)
    reader.load(tensors)
    assert (reader.open, reader.dropped) == (set(), [])
    assert config["norm_output"] is True and config["fc_norm"] is True
    assert "fc_norm and norm_output need SGLang with" in (world.path / "out/README.md").read_text()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"norm_before_fc": True}, "would drop input_norm.weight without a word"),
        ({"norm_before_residual": True}, "the state before the norm"),
        ({"layer": {"num_hidden_layers": 2}}, "2 decoder layers"),
        ({"layer": {"model_type": "qwen3"}}, "a qwen3 decoder"),
        ({"layer": {"attention_bias": True}}, "attention_bias"),
        ({"layer": {"mlp_bias": True}}, "mlp_bias"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5]}, "2 states feed the draft"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}, "reads state 0"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_it_would_compute_in_another_way_is_refused(world, cli, config, says):
    world.finish(**(PLAIN | config))
    done = cli("export", world.run.path, world.path / "out", "--for", "sglang")
    assert done.exit_code == 2 and says in done.stderr and "fix: " in done.stderr
    assert not (world.path / "out").exists()


def test_transformers_reads_the_rotary_part_of_the_flat_config(world, cli):
    from transformers import LlamaConfig

    config, _ = exported(world, cli)
    read = LlamaConfig(**config).rope_parameters
    assert (read["rope_type"], read["rope_theta"], read["factor"]) == ("yarn", 50000.0, 4.0)
