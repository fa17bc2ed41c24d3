"""The toy's directory: the published names, shapes that ranks can cut, the same bits each time."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from kimi_eagle import toy
from kimi_eagle.errors import UsageError
from kimi_eagle.modeldir import MARKER
from kimi_eagle.toy import int4, shape
from kimi_eagle.verifier import INDEX, open_verifier

ROOT = Path(__file__).resolve().parents[2]
KIMI = ROOT / "tests/kimi"
_spec = importlib.util.spec_from_file_location("standin", KIMI / "standin.py")
STANDIN = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(STANDIN)


@pytest.fixture(scope="module")
def again(tmp_path_factory, toy_dir) -> Path:
    """A second one, made from nothing."""
    return toy.ensure(tmp_path_factory.mktemp("toys") / "toy")


@pytest.fixture(scope="module")
def packed(tmp_path_factory, toy_dir) -> Path:
    """The toy with INT4 experts."""
    return toy.ensure(tmp_path_factory.mktemp("toys") / "int4", experts="int4")


def named(folder: Path) -> dict:
    from safetensors.torch import load_file

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def test_it_is_the_same_each_time(toy_dir: Path, again: Path) -> None:
    one, two = (json.loads((d / MARKER).read_text())["files"] for d in (toy_dir, again))
    assert one == two


def test_nothing_is_done_when_it_is_there(toy_dir: Path) -> None:
    before = (toy_dir / MARKER).stat().st_mtime_ns
    said: list[str] = []
    assert toy.ensure(say=said.append) == toy_dir
    assert said == [] and (toy_dir / MARKER).stat().st_mtime_ns == before


def test_unknown_experts() -> None:
    with pytest.raises(UsageError, match="int4"):
        toy.ensure(experts="fp8")


def test_names_dtypes_and_ranks_are_the_published_ones(toy_dir: Path, packed: Path) -> None:
    """Against the stand-in's list, which follows the published index (tests/kimi/SOURCES.md)."""

    def general(name: str) -> str:
        return re.sub(r"\.\d+\.(?=\D)", ".N.", name)

    theirs = {general(n): (kind, len(size)) for _, (n, kind, size) in STANDIN.tensors()}
    headers = open_verifier(packed).headers.values()
    ours = {
        general(name): (entry["dtype"], len(entry["shape"]))
        for header in headers
        for name, entry in header.items()
        if name != "__metadata__"
    }
    assert ours == theirs
    plain = {general(n) for n in open_verifier(toy_dir).weight_map}
    packed_away = {n for n in theirs if ".experts.N." in n}
    assert plain - {n for n in plain if ".experts.N." in n} == set(theirs) - packed_away


def test_config_has_the_published_fields(packed: Path) -> None:
    """Every field that says the model's shape; values as published where the size does not ask for
    others."""
    from transformers import DeepseekV3Config, PreTrainedConfig

    ours = json.loads((packed / "config.json").read_text())
    theirs = json.loads((KIMI / "config.json").read_text())
    shaping = set(DeepseekV3Config().to_dict()) - set(PreTrainedConfig().to_dict())
    shaping |= {"rope_theta", "rope_scaling", "scoring_func", "topk_method", "model_type"}
    text, published = ours["text_config"], theirs["text_config"]
    wanted = (shaping | {"quantization_config"}) & set(published) - {"use_cache"}
    assert len(wanted) > 25 and wanted <= set(text)
    assert text["rope_scaling"].keys() == published["rope_scaling"].keys()
    smaller = {k for k in published if k.startswith("num_") or k.endswith("_token_id")}
    smaller |= {"vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"}
    smaller |= {"n_routed_experts", "q_lora_rank", "rope_scaling", "max_position_embeddings"}
    for key in wanted - smaller:
        assert text[key] == published[key], key
    assert set(theirs["vision_config"]) - {"_attn_implementation"} <= set(ours["vision_config"])
    assert ours["architectures"] == theirs["architectures"]
    assert ours["model_type"] == theirs["model_type"]
    assert ours["media_placeholder_token_id"] < text["vocab_size"]


def test_eight_ranks_can_cut_it() -> None:
    text = shape.TEXT
    assert text["num_attention_heads"] % 8 == text["vocab_size"] % (8 * 64) == 0
    assert text["moe_intermediate_size"] % (8 * 64) == 0  # Marlin's tile, and two scale groups
    assert text["intermediate_size"] % (8 * 64) == 0
    assert shape.VISION["vt_num_attention_heads"] % 8 == 0
    from kimi_eagle.recipe import load

    recipe = load(ROOT / "jobs/kimi-k2.5-toy.toml")
    draft = recipe.train.draft
    assert draft.num_attention_heads % 8 == draft.num_key_value_heads % 8 == 0
    assert draft.intermediate_size % 64 == recipe.vocab.draft_vocab_size % (8 * 16) == 0
    assert draft.head_dim == 128


def test_embedding_and_head_of_a_local_sharded_directory(toy_dir: Path) -> None:
    """Found under nested names through the index, by us and by speculators."""
    import torch
    from speculators.utils.loading import load_model_layers

    index = json.loads((toy_dir / INDEX).read_text())["weight_map"]
    places = {n: f for n, f in index.items() if "embed_tokens" in n or "lm_head" in n}
    assert set(places) == {
        "language_model.model.embed_tokens.weight",
        "language_model.lm_head.weight",
    }
    assert len(set(index.values())) >= 3
    verifier = open_verifier(toy_dir)
    names = ["embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    theirs = load_model_layers(names, str(toy_dir))
    assert torch.equal(verifier.embedding(), theirs["embed_tokens.weight"])
    assert torch.equal(verifier.lm_head(), theirs["lm_head.weight"])
    assert torch.equal(verifier.final_norm()[0], theirs["model.norm.weight"])


def test_int4_is_what_compressed_tensors_reads(packed: Path, toy_dir: Path) -> None:
    """The library's own decompression of one matrix, and the distance to the bf16 one."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = json.loads((packed / "config.json").read_text())["text_config"]
    parsed = QuantizationConfig.model_validate(config["quantization_config"])
    scheme = next(iter(parsed.config_groups.values()))
    assert (scheme.weights.num_bits, scheme.weights.group_size) == (4, shape.GROUP)
    tensors, plain = named(packed), named(toy_dir)
    stem = "language_model.model.layers.1.mlp.experts.0.gate_proj"
    module = {k: tensors[f"{stem}.{k}"] for k in ("weight_packed", "weight_scale", "weight_shape")}
    compressor = BaseCompressor.load_from_registry("pack-quantized")
    theirs = compressor.decompress(module, scheme)["weight"]
    ours = int4.unpack(tensors)[f"{stem}.weight"]
    assert torch.equal(ours, theirs.to(torch.bfloat16))
    distance = (ours.float() - plain[f"{stem}.weight"].float()).norm()
    assert 0.02 < distance / plain[f"{stem}.weight"].float().norm() < 0.15
    others = {n: t for n, t in tensors.items() if "experts.0" not in n and "experts." not in n}
    assert all(torch.equal(t, plain[n]) for n, t in others.items())


def test_transformers_takes_every_tensor(packed: Path) -> None:
    """A name that is not the published one would be left over, or missing."""
    from safetensors.torch import load_file, save_file

    from kimi_eagle.errors import RunError
    from kimi_eagle.toy import reference

    assert reference.load(packed).config.text_config.num_hidden_layers == shape.LAYERS
    file = sorted(packed.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file({("x" + n if n == name else n): t for n, t in tensors.items()}, file)
    with pytest.raises(RunError, match="disagree"):
        reference.load(packed)
