"""Exports in a real engine: the same greedy text and the same acceptance as RUN/draft.

A campaign: five loads of vLLM with SmolLM2. The draft is made as training starts one, with the
norms that both vLLM and SGLang take; it is untrained, its vocabulary a few very common tokens, so
that noise is accepted now and then, and only where weights, ids and norms are where they belong.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.campaign

K = 3
RECIPE = """
name = "mini"
[verifier]
path = "{verifier}"
[[sources]]
path = "chat.jsonl"
[engine]
max_model_len = 256
max_num_batched_tokens = 256
cpu_kv_cache_gib = 1
[prepare]
max_length = 255
[regenerate]
enabled = false
[extract]
layers = [2, 15, 27, 30]
[vocab]
draft_vocab_size = {size}
[train]
dtype = "float32"
export_dtype = "float32"
[train.draft]
norm_before_residual = false
norm_before_fc = false
fc_norm = true
[benchmark]
prompts = "held.jsonl"
max_tokens = 48
batch_sizes = [2]
k = 3
[benchmark.engine]
dtype = "float32"
"""
QUESTIONS = ["What is rain?", "Name three animals.", "Count from one to ten.", "Who are you?"]


def draft_of(world, verifier, ids: list[int]) -> dict[str, bytes]:
    """The files of a fresh draft, its norms' weights away from one, so that none can be missed."""
    import torch

    from kimi_eagle.training import loop
    from kimi_eagle.training.export import export

    t2d = np.zeros(verifier.vocab_size, bool)
    t2d[ids] = True
    np.save(world.path / "t2d.npy", t2d)
    np.save(world.path / "d2t.npy", np.flatnonzero(t2d) - np.arange(len(ids)))
    torch.manual_seed(0)
    places = world.path / "d2t.npy", world.path / "t2d.npy"
    model = loop.build_model(world.run.recipe(), verifier, *places, device="cpu")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name and "verifier" not in name:
                weight.mul_(torch.rand(weight.shape) + 0.5)
    model.save_pretrained(world.path / "checkpoint")
    out = export(world.path / "checkpoint", world.path / "made", verifier, "float32")
    return {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}


def test_exports_are_served_as_the_run_s_own_draft(
    verifier_dir: Path, tmp_path: Path, cli, world_of
):
    from kimi_eagle.bench.measure import measure
    from kimi_eagle.bench.plan import make_loads, open_drafts
    from kimi_eagle.bench.workload import load_workload
    from kimi_eagle.data.template import ChatTemplate
    from kimi_eagle.verifier import open_verifier

    verifier = open_verifier(verifier_dir)
    ids = verifier.tokenizer().encode(", . the\n and of 1 a to is", add_special_tokens=False)
    ids = sorted(set(ids))
    world = world_of(RECIPE.format(verifier=verifier_dir, size=len(ids)))
    (tmp_path / "held.jsonl").write_text(
        "".join(json.dumps({"prompt": q}) + "\n" for q in QUESTIONS)
    )
    world.finish(made=draft_of(world, verifier, ids), measured=False)
    for server in ("vllm", "sglang"):
        done = cli("export", world.run.path, tmp_path / server, "--for", server)
        assert done.exit_code == 0, done.output
    done = cli("export", world.run.path, tmp_path / "bare", "--without-embedding")
    assert done.exit_code == 0, done.output

    # SGLang's form in vLLM, which reads flat configs and `midlayer`, too, but counts layers as we.
    flat = shutil.copytree(tmp_path / "sglang", tmp_path / "flat")
    config = json.loads((flat / "config.json").read_text())
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    wrong = shutil.copytree(flat, tmp_path / "wrong")  # with SGLang's ids: other states
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in layers]
    (flat / "config.json").write_text(json.dumps(config))

    recipe = world.run.recipe()
    workload = load_workload(recipe, ChatTemplate(verifier, recipe.template))
    runs = {}
    for name in ("own", "vllm", "bare", "flat", "wrong"):
        path = {"own": world.run.draft, "wrong": wrong}.get(name, tmp_path / name)
        _, load = make_loads(recipe, verifier, open_drafts(recipe, verifier, path), workload)
        folder = tmp_path / f"measured-{name}"
        folder.mkdir()
        # The verifier's path is known here, though an export may name it in another way.
        _, (found,) = measure(replace(load.spec, draft=str(path)), folder)
        runs[name] = found.run
        print(name, found.run.counters)
    own, other = runs.pop("own"), runs.pop("wrong")
    assert other.tokens == own.tokens and other.counters != own.counters, "ids matter"
    assert own.counters["num_accepted_tokens"] > 5, "noise that is never accepted proves nothing"
    for name, run in runs.items():
        assert run.tokens == own.tokens, name
        assert run.counters == own.counters, name
