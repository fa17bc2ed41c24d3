"""A local checkpoint directory: what is read from it, and what is said when it is not whole."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_eagle.errors import UsageError
from kimi_eagle.verifier import open_verifier

V, H = 11, 4
CONFIG = {
    "hidden_size": H,
    "num_hidden_layers": 3,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "eos_token_id": [7, 8],
}


def tensors():
    torch.manual_seed(0)
    return {
        "language_model.model.embed_tokens.weight": torch.randn(V, H).bfloat16(),
        "language_model.model.layers.3.embed_tokens.weight": torch.zeros(V, H).bfloat16(),
        "language_model.model.norm.weight": torch.randn(H).bfloat16(),
        "language_model.lm_head.weight": torch.randn(V, H).bfloat16(),
        "vision_tower.patch_embed.weight": torch.randn(2, 2),
    }


def write(folder, weights, config, shards=2):
    """A checkpoint directory; shards=0 is one file without an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    if not shards:
        save_file(weights, folder / "model.safetensors")
        return folder
    names = sorted(weights)
    weight_map = {
        n: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, n in enumerate(names)
    }
    for file in set(weight_map.values()):
        save_file({n: weights[n] for n in names if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def kimi_like(tmp_path):
    """Nested names, nested text_config, two shards."""
    return write(tmp_path / "model", tensors(), {"text_config": CONFIG, "eos_token_id": 7})


def test_small_real_model(verifier_dir):
    verifier = open_verifier(verifier_dir, require_template=True)
    assert (verifier.hidden_size, verifier.num_layers, verifier.vocab_size) == (576, 30, 49152)
    assert verifier.context_length == 8192 and verifier.eos_ids == (2,)
    stored = load_file(verifier_dir / "model.safetensors")
    embedding = verifier.embedding()
    assert torch.equal(embedding, stored["model.embed_tokens.weight"])
    assert "lm_head.weight" not in stored and torch.equal(verifier.lm_head(), embedding)  # tied
    norm, epsilon = verifier.final_norm()
    assert torch.equal(norm, stored["model.norm.weight"]) and epsilon == pytest.approx(1e-5)
    assert verifier.tokenizer().encode("<|im_end|>", add_special_tokens=False) == [2]


@pytest.mark.parametrize("shards", [0, 1, 2])
def test_nested_names_in_one_file_or_sharded(tmp_path, shards):
    config = {"text_config": CONFIG, "eos_token_id": 7}
    verifier = open_verifier(write(tmp_path / "model", tensors(), config, shards))
    given = tensors()
    assert torch.equal(verifier.embedding(), given["language_model.model.embed_tokens.weight"])
    assert torch.equal(verifier.lm_head(), given["language_model.lm_head.weight"])
    weight, epsilon = verifier.final_norm()
    assert torch.equal(weight, given["language_model.model.norm.weight"]) and epsilon == 1e-5
    assert verifier.eos_ids == (7, 8) and verifier.num_layers == 3


def test_id_is_of_the_content_not_of_the_place(kimi_like, tmp_path):
    first = open_verifier(kimi_like)
    shutil.copytree(kimi_like, tmp_path / "copy")
    copy = open_verifier(tmp_path / "copy")
    assert copy.id() == first.id() and len(first.id()) == 32
    assert copy.tokenizer_digest() == first.tokenizer_digest()
    (tmp_path / "copy" / "tokenizer.json").write_text("{} ")
    other = open_verifier(tmp_path / "copy")
    assert other.id() != first.id() and other.tokenizer_digest() != first.tokenizer_digest()
    shutil.copytree(kimi_like, tmp_path / "bigger")
    (file,) = (tmp_path / "bigger").glob("model-00001*")
    save_file(load_file(file) | {"more": torch.zeros(1)}, file)
    assert open_verifier(tmp_path / "bigger").id() != first.id()


def test_content_hash(kimi_like):
    seen = []
    found = open_verifier(kimi_like).content_hash(progress=seen.append)
    assert set(found) == {p.name for p in kimi_like.iterdir()}
    data = (kimi_like / "config.json").read_bytes()
    assert found["config.json"] == hashlib.sha256(data).hexdigest()
    assert sum(seen) == sum(p.stat().st_size for p in kimi_like.iterdir())


def test_layer_ids(kimi_like):
    verifier = open_verifier(kimi_like)
    assert verifier.check_layers([0, 2, 3]) == (0, 2, 3)
    for bad in ([2, 4], [-1], []):
        with pytest.raises(UsageError, match="extract.layers.*0 to 3"):
            verifier.check_layers(bad)


def shard(folder):
    return sorted(folder.glob("model-*.safetensors"))[0]


def cut(folder):
    data = shard(folder).read_bytes()
    shard(folder).write_bytes(data[:-3])


def pointer(folder):
    shard(folder).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n")


def dangling(folder):
    file = shard(folder)
    file.unlink()
    file.symlink_to("../blobs/gone")


BROKEN = {
    "no config": (lambda f: (f / "config.json").unlink(), "without config.json"),
    "config no JSON": (lambda f: (f / "config.json").write_text("{"), "not JSON"),
    "config without size": (lambda f: (f / "config.json").write_text("{}"), "no hidden_size"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "directory without tokenizer"),
    "no weights": (lambda f: (f / "model.safetensors.index.json").unlink(), "no weights"),
    "shard missing": (lambda f: shard(f).unlink(), "weight file missing"),
    "dangling link": (dangling, "dangling link to ../blobs/gone"),
    "git-LFS pointer": (pointer, "a git-LFS pointer, not weights"),
    "cut file": (cut, "weight file has .* bytes; expected"),
    "other file": (lambda f: shard(f).write_text("x" * 99), "not a safetensors file"),
    "empty file": (lambda f: shard(f).write_text(""), "not a safetensors file"),
    "broken header": (
        lambda f: shard(f).write_bytes((8).to_bytes(8, "little") + b"notjson!"),
        "broken header",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_directory_that_is_not_whole(kimi_like, name):
    damage, message = BROKEN[name]
    damage(kimi_like)
    with pytest.raises(UsageError, match=message) as caught:
        open_verifier(kimi_like)
    assert str(kimi_like) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_directory_file_and_template(kimi_like, tmp_path):
    with pytest.raises(UsageError, match="no such model directory"):
        open_verifier(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="not a directory"):
        open_verifier(kimi_like / "config.json")
    open_verifier(kimi_like)
    with pytest.raises(UsageError, match="without chat template"):
        open_verifier(kimi_like, require_template=True)
    (kimi_like / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    open_verifier(kimi_like, require_template=True)


def test_tokenizer_that_transformers_cannot_read(kimi_like):
    with pytest.raises(UsageError, match="tokenizer cannot be read"):
        open_verifier(kimi_like).tokenizer()


EMBEDDING = "language_model.model.embed_tokens.weight"
BAD_TABLES = {
    "packed": ({EMBEDDING: torch.zeros(V, H, dtype=torch.int32)}, "is quantised: .*I32"),
    "packed name": (
        {"model.embed_tokens.weight_packed": torch.zeros(V, 1, dtype=torch.int32)},
        "is quantised: model.embed_tokens.weight_packed",
    ),
    "shape": ({EMBEDDING: torch.zeros(V, H + 1)}, r"has shape \[11, 5\].*expected \[11, 4\]"),
    "none": ({"model.norm.weight": torch.zeros(H)}, "no tensor named embed_tokens.weight"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_embedding_that_cannot_be_used(tmp_path, name):
    weights, message = BAD_TABLES[name]
    verifier = open_verifier(write(tmp_path / "model", weights, CONFIG))
    with pytest.raises(UsageError, match=message):
        verifier.embedding()


def test_index_that_names_a_tensor_the_shard_lacks(kimi_like):
    index = kimi_like / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    other = next(f for f in data["weight_map"].values() if f != data["weight_map"][EMBEDDING])
    data["weight_map"][EMBEDDING] = other
    index.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="the file does not hold it"):
        open_verifier(kimi_like).embedding()


def test_lm_head_missing_but_not_tied(tmp_path):
    weights = {EMBEDDING: torch.zeros(V, H)}
    loose = write(tmp_path / "loose", weights, CONFIG | {"tie_word_embeddings": False})
    with pytest.raises(UsageError, match="no tensor named lm_head.weight"):
        open_verifier(loose).lm_head()
    tied = write(tmp_path / "tied", weights, CONFIG | {"tie_word_embeddings": True})
    assert open_verifier(tied).lm_head().shape == (V, H)


def test_nothing_heavy_is_imported(verifier_dir):
    code = (
        "import sys; from kimi_eagle.verifier import open_verifier; "
        f"v = open_verifier({str(verifier_dir)!r}, require_template=True); v.id(); "
        "import kimi_eagle.vocab, kimi_eagle.data.sources, kimi_eagle.data.template; "
        "print([m for m in ('torch', 'transformers', 'pyarrow', 'safetensors', 'jinja2') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
