"""`draft/`: what vLLM reads and loads, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from kimi_eagle.errors import RunError

SERVE = """
import json, os, sys
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
from vllm import LLM, SamplingParams
verifier, draft = sys.argv[1:]
llm = LLM(verifier, dtype="float32", max_model_len=256, max_num_seqs=2, enforce_eager=True,
    disable_log_stats=False,
    speculative_config={"method": "eagle3", "model": draft, "num_speculative_tokens": 3})
out = llm.generate(["The river is"], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
counts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
print("RESULT", json.dumps({"tokens": list(out[0].outputs[0].token_ids),
    "drafts": counts["vllm:spec_decode_num_drafts"]}))
"""


@pytest.fixture(scope="module")
def checkpoint(run, recipe_for, tmp_path_factory):
    """A checkpoint after a few steps."""
    return run(recipe_for(max_steps=6), tmp_path_factory.mktemp("short")).checkpoint


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_files(checkpoint, verifier, corpus, tmp_path, dtype):
    import numpy as np
    import torch
    from safetensors.torch import load_file

    from kimi_eagle.training.export import export

    out = export(checkpoint, tmp_path / "draft", verifier, dtype)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    assert all(p.stat().st_mode & 0o044 for p in out.iterdir()), "others may read it"
    tensors = load_file(out / "model.safetensors")
    assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {getattr(torch, dtype)}
    assert np.array_equal(tensors["d2t"].numpy(), np.load(corpus.d2t))
    assert tensors["embed_tokens.weight"].shape == (49152, 576)
    assert {"fc.weight", "input_norm.weight", "norm.weight", "lm_head.weight"} <= tensors.keys()
    assert not [name for name in tensors if name.startswith(("model.", "verifier_"))]
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == dtype
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(verifier.path.resolve())
    assert "auto_map" not in config


def test_vllms_own_reader_accepts_the_config(checkpoint, verifier, tmp_path):
    from kimi_eagle.training.export import export

    export(checkpoint, tmp_path / "draft", verifier, "bfloat16")
    code = """
import sys
from vllm.transformers_utils.config import get_config, maybe_override_with_speculators
from vllm.transformers_utils.configs.speculators import SpeculatorsConfig
draft = sys.argv[1]
config = SpeculatorsConfig.from_pretrained(draft)
assert config.architectures == ["Eagle3LlamaForCausalLM"], config.architectures
assert config.eagle_aux_hidden_state_layer_ids == [2, 15, 27]
assert (config.head_dim, config.draft_vocab_size, config.norm_before_residual) == (64, 512, True)
assert config.norm_before_fc and config.norm_output
model, tokenizer, spec = maybe_override_with_speculators(draft, draft, False)
assert model == tokenizer == sys.argv[2], model
assert spec["method"] == "eagle3" and spec["num_speculative_tokens"] == 3, spec
get_config(draft, trust_remote_code=False)
"""
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "draft"), str(verifier.path.resolve())],
        check=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


def test_loads_in_plain_vllm_beside_the_verifier_from_another_path(checkpoint, verifier, tmp_path):
    from kimi_eagle.training.export import export

    export(checkpoint, tmp_path / "draft", verifier, "float32")
    moved = tmp_path / "elsewhere/moved"
    shutil.copytree(tmp_path / "draft", moved)
    shutil.rmtree(tmp_path / "draft")
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(verifier.path), str(moved)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.split("RESULT ", 1)[1].splitlines()[0])
    assert len(result["tokens"]) == 16
    assert result["drafts"] > 0, "the draft was asked"


def test_an_older_draft_is_replaced_whole(checkpoint, verifier, tmp_path):
    from kimi_eagle.training.export import export

    (tmp_path / "draft").mkdir()
    (tmp_path / "draft/stale.txt").write_text("old")
    export(checkpoint, tmp_path / "draft", verifier, "bfloat16")
    assert not (tmp_path / "draft/stale.txt").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["draft"]


def test_a_torn_checkpoint_leaves_the_old_draft(checkpoint, verifier, tmp_path):
    from kimi_eagle.training.export import export

    torn = tmp_path / "torn"
    shutil.copytree(checkpoint, torn)
    data = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(data[: len(data) // 2])
    (tmp_path / "draft").mkdir()
    with pytest.raises(RunError, match="not a whole checkpoint"):
        export(torn, tmp_path / "draft", verifier, "bfloat16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["draft", "torn"]


def test_weights_that_are_not_finite_are_refused(checkpoint, verifier, tmp_path):
    from safetensors.torch import load_file, save_file

    from kimi_eagle.training.export import export

    bad = tmp_path / "bad"
    shutil.copytree(checkpoint, bad)
    tensors = load_file(bad / "model.safetensors")
    tensors["fc.weight"][3, 4] = float("nan")
    save_file(tensors, bad / "model.safetensors")
    with pytest.raises(RunError, match="fc.weight is not finite"):
        export(bad, tmp_path / "draft", verifier, "bfloat16")


def test_absolute_ids_are_not_offsets():
    import torch

    from kimi_eagle.training.export import check_d2t

    targets = torch.tensor([0, 5, 6, 900])
    check_d2t(targets - torch.arange(4), 1000, where="x")
    with pytest.raises(RunError, match="offsets"):
        check_d2t(targets, 903, where="x")
    with pytest.raises(RunError, match="ascending"):
        check_d2t(torch.tensor([5, -5, 0, 0]), 1000, where="x")


@pytest.mark.slow
def test_a_mapping_of_a_users_own_script_trains_and_serves(
    corpus, recipe_for, verifier, tmp_path, eagle
):
    """t2d.pt and d2t.pt as a plain script leaves them: imported, trained on, exported, served."""
    import numpy as np
    import torch
    from safetensors.torch import load_file

    from kimi_eagle.shards import ShardSet
    from kimi_eagle.training.export import export
    from kimi_eagle.training.loop import train

    seen = torch.cat([torch.from_numpy(ids).long() for ids, _, _ in corpus.states.values()])
    counts = torch.bincount(seen, minlength=verifier.vocab_size)
    chosen = torch.topk(counts, 512).indices.sort().values
    t2d = torch.zeros(verifier.vocab_size, dtype=torch.uint8)
    t2d[chosen] = 1
    for name, tensor in (("t2d", t2d), ("d2t", chosen), ("counts", counts)):
        torch.save(tensor, tmp_path / f"{name}.pt")
    files, folder = [tmp_path / "t2d.pt", tmp_path / "d2t.pt"], tmp_path / "mapping"
    done = eagle("vocab", "import", *files, "--counts", tmp_path / "counts.pt", "--out", folder)
    assert done.returncode == 0, done.stderr
    assert "absolute token ids: turned into offsets" in done.stdout
    result = train(
        recipe_for(max_steps=4),
        verifier,
        ShardSet(corpus.shards),
        folder / "d2t.npy",
        folder / "t2d.npy",
        tmp_path / "work",
        should_stop=lambda: False,
        on_progress=lambda _: None,
    )
    out = export(result.checkpoint, tmp_path / "draft", verifier, "float32")
    offsets = load_file(out / "model.safetensors")["d2t"]
    assert torch.equal(offsets + torch.arange(512), chosen)
    assert np.array_equal(torch.load(folder / "d2t.pt", weights_only=True), offsets)
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(verifier.path), str(out)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.split("RESULT ", 1)[1].splitlines()[0])
    assert len(result["tokens"]) == 16 and result["drafts"] > 0
