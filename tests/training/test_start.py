"""Training that goes on from a draft trained earlier (`[train] from`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from kimi_eagle.errors import RunError

pytestmark = pytest.mark.slow


def losses(workdir: Path) -> list[float]:
    lines = [json.loads(x) for x in (workdir / "curves.jsonl").read_text().splitlines()]
    return [x["loss"] for x in lines if "loss" in x]


@pytest.fixture(scope="module")
def earlier(run, recipe_for, verifier, tmp_path_factory) -> tuple[Path, list[float]]:
    """A draft of one epoch, exported, and the losses of its steps."""
    from kimi_eagle.training.export import export

    folder = tmp_path_factory.mktemp("earlier")
    result = run(recipe_for(epochs=1), folder / "work")
    draft = export(result.checkpoint, folder / "draft", verifier, "float32")
    return draft, losses(folder / "work")


def test_it_starts_where_the_earlier_one_ended(earlier, run, recipe_for, verifier, tmp_path):
    from kimi_eagle.training.draftfiles import DraftFiles
    from kimi_eagle.training.export import export

    draft, before = earlier
    recipe = recipe_for(**{"from": str(draft)}, max_steps=5, lr=1e-4)
    result = run(recipe, tmp_path / "work", stop_at=2)
    assert result.interrupted and result.steps == 2
    result = run(recipe, tmp_path / "work")  # taken up again: not from the earlier draft
    assert not result.interrupted and result.steps == 5
    now = losses(tmp_path / "work")
    assert len(now) == 5
    assert max(now) < before[0] / 2, "no fresh start, nor one after the stop"
    again = DraftFiles(export(result.checkpoint, tmp_path / "draft", verifier, "float32"))
    old = DraftFiles(draft)
    assert np.array_equal(again.array("d2t"), old.array("d2t"))
    assert again.tensors.keys() == old.tensors.keys() and again.shape() == old.shape()
    assert again.digest() != old.digest()


def test_its_weights_and_norms_are_those_of_the_draft(
    earlier, recipe_for, corpus, verifier, tmp_path
):
    """Also of one with other norms than a fresh draft has, and without t2d."""
    import torch
    from safetensors.torch import load_file, save_file

    from kimi_eagle.training.loop import build_model

    other = tmp_path / "other"
    shutil.copytree(earlier[0], other)
    config = json.loads((other / "config.json").read_text())
    config |= {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False}
    config["speculators_config"]["verifier"]["name_or_path"] = "/somewhere/else"
    (other / "config.json").write_text(json.dumps(config))
    tensors = load_file(other / "model.safetensors")
    del tensors["t2d"], tensors["input_norm.weight"]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    for path in (earlier[0], other):
        recipe = recipe_for(**{"from": str(path)}, ttt_steps=2)
        model = build_model(recipe, verifier, corpus.d2t, corpus.t2d, device="cpu")
        state, stored = model.state_dict(), load_file(path / "model.safetensors")
        assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())
        assert state["fc.weight"].dtype == torch.float32
        assert torch.equal(state["verifier_norm.weight"], verifier.final_norm()[0].float())
        assert (state["t2d"].sum(), len(state["d2t"])) == (512, 512)
        named = model.config.speculators_config
        assert named.verifier.name_or_path == str(verifier.path.resolve())
        assert named.proposal_methods[0].speculative_tokens == 2
        assert model.config.norm_output is (path != other)
        assert "embed_tokens.weight" in model._keys_to_ignore_on_save, "the verifier's own"


def test_an_embedding_of_its_own_is_kept(earlier, recipe_for, corpus, verifier, tmp_path):
    from safetensors.torch import load_file, save_file

    from kimi_eagle.training.export import export
    from kimi_eagle.training.loop import build_model

    own = tmp_path / "own"
    shutil.copytree(earlier[0], own)
    tensors = load_file(own / "model.safetensors")
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"] * 2
    save_file(tensors, own / "model.safetensors", metadata={"format": "pt"})
    model = build_model(
        recipe_for(**{"from": str(own)}), verifier, corpus.d2t, corpus.t2d, device="cpu"
    )
    model.save_pretrained(tmp_path / "checkpoint")
    out = export(tmp_path / "checkpoint", tmp_path / "draft", verifier, "float32")
    kept = load_file(out / "model.safetensors")["embed_tokens.weight"]
    assert kept.equal(tensors["embed_tokens.weight"])


def test_another_mapping_is_refused(earlier, recipe_for, corpus, verifier, tmp_path):
    from kimi_eagle.training.loop import build_model

    t2d, d2t = np.roll(np.load(corpus.t2d), 1), np.load(corpus.d2t) + 1
    np.save(tmp_path / "t2d.npy", t2d)
    np.save(tmp_path / "d2t.npy", d2t)
    recipe = recipe_for(**{"from": str(earlier[0])})
    with pytest.raises(RunError, match="not that of the draft"):
        build_model(recipe, verifier, tmp_path / "d2t.npy", tmp_path / "t2d.npy", device="cpu")
