"""Twelve ways to spoil a good draft: `check --draft` names each, whatever vLLM does with it.

The good one is made by our own export from the small world's verifier, which has latent attention
and YaRN as Kimi-K2.5 has them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafts import D2T, T2D, TOKENS, D
from drafts import mapping as mapping_of
from place import VOCAB, Place, copy_of

from kimi_eagle import contracts
from kimi_eagle.contracts.judging import PROBLEM, as_error, judge

Change = Callable[[dict[str, Any], dict[str, Any]], None]
"""Of config.json and of the tensors, in place."""
LATER = np.array([*range(10, 131), *range(256, 263)])
"""The tokens that newer counts would choose."""


def layer(**values: Any) -> Change:
    return lambda config, _: config["transformer_layer_config"].update(values)


def rope(config: dict[str, Any], **values: Any) -> None:
    config["transformer_layer_config"]["rope_parameters"].update(values)


def no_yarn(config: dict[str, Any], _: dict[str, Any]) -> None:
    plain = {"rope_type": "default", "rope_theta": 50000.0}
    config["transformer_layer_config"]["rope_parameters"] = plain


def half(_: dict[str, Any], tensors: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.half() if tensor.is_floating_point() else tensor


def renamed(_: dict[str, Any], tensors: dict[str, Any]) -> None:
    for name in [n for n in tensors if n.startswith(("layers.", "fc.", "norm."))]:
        tensors[f"model.{name}"] = tensors.pop(name)


def d2t(ids: np.ndarray | None, tokens: np.ndarray | None = None) -> Change:
    """Other numbers in d2t (None: none at all); tokens: those that t2d names then."""

    def change(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        import torch

        if ids is None:
            del tensors["d2t"]
            return
        tensors["d2t"] = torch.from_numpy(ids.astype(np.int64))
        if tokens is not None:
            tensors["t2d"] = torch.from_numpy(np.isin(np.arange(VOCAB), tokens))

    return change


MUTATIONS: dict[str, tuple[str, Change]] = {
    "missing-d2t": ("draft-d2t-present", d2t(None)),
    "absolute-d2t": ("draft-d2t-offsets", d2t(TOKENS)),
    "head-dim": ("draft-head-dim", layer(head_dim=8)),
    "theta": ("draft-rope-theta", lambda config, _: rope(config, rope_theta=10000.0)),
    "no-yarn": ("draft-yarn", no_yarn),
    "aux-ids": (
        "draft-layers",
        lambda config, _: config.update(eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
    ),
    "method-eagle": ("draft-kind", lambda config, _: config.update(speculators_model_type="eagle")),
    "dtype": ("draft-dtype", half),
    "renamed": ("draft-tensors", renamed),
    "positions": ("draft-positions", layer(max_position_embeddings=128)),
    "plain-slice": ("draft-d2t-plain-slice", d2t(np.zeros(D), np.arange(D))),
    "stale": ("draft-mapping-current", d2t(LATER - np.arange(D), LATER)),
}


@pytest.fixture(scope="module")
def drafts(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the draft `good` and its mutations, and `world`, where it was made."""
    from safetensors.torch import load_file, save_file

    from kimi_eagle.recipe import parse
    from kimi_eagle.training.export import export
    from kimi_eagle.training.loop import build_model
    from kimi_eagle.verifier import open_verifier

    folder = tmp_path_factory.mktemp("mutations")
    place = copy_of(base, folder / "world")
    recipe = parse(place.recipe, where="recipe.toml", base=place.path)
    verifier = open_verifier(place.model)
    np.save(folder / "d2t.npy", D2T)
    np.save(folder / "t2d.npy", T2D)
    model = build_model(recipe, verifier, folder / "d2t.npy", folder / "t2d.npy", device="cpu")
    model.save_pretrained(folder / "checkpoint")
    good = export(folder / "checkpoint", folder / "good", verifier, "bfloat16")
    for name, (_, change) in MUTATIONS.items():
        shutil.copytree(good, folder / name)
        config = json.loads((good / "config.json").read_text())
        tensors = load_file(good / "model.safetensors")
        change(config, tensors)
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
    return folder


def broken(drafts: Path, name: str) -> dict[str, str]:
    """Rule -> line, as `check --draft` judges on a login node."""
    world = drafts / "world"
    place = Place(world, copy_of_recipe(), given={"draft": drafts / name, "mapping": mapping_of()})
    verdicts = judge(place.facts(), contracts.rules().values())
    return {v.rule.id: as_error(v).line() for v in verdicts if v.state == PROBLEM}


def copy_of_recipe() -> dict[str, Any]:
    from place import recipe

    return recipe()


def test_the_good_draft_breaks_no_rule(drafts: Path):
    assert broken(drafts, "good") == {}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_is_refused_by_its_rule(drafts: Path, name: str):
    found = broken(drafts, name)
    assert set(found) == {MUTATIONS[name][0]}
    assert str(drafts / name) in found[MUTATIONS[name][0]]


def test_the_command_says_so(drafts: Path, eagle: Callable[..., Any]):
    """One of them as a person types it; light, no library imported."""
    world = drafts / "world"
    text = (
        'name = "place"\n[verifier]\npath = "model"\n[[sources]]\npath = "prompts.jsonl"\n'
        "[engine]\nmax_model_len = 256\nmax_num_batched_tokens = 256\n"
        "[regenerate]\nmax_tokens = 64\n[prepare]\nmax_length = 128\n"
        "[extract]\nlayers = [1, 2, 3, 4]\n[vocab]\ndraft_vocab_size = 128\n"
        '[train]\nseq_len = 128\n[benchmark]\nprompts = "prompts.jsonl"\n'
    )
    (world / "recipe.toml").write_text(text)
    done = eagle("check", world / "recipe.toml", "--draft", drafts / "theta", "--json", cwd=world)
    assert done.returncode == 1, done.stderr
    said = {r["rule"]: r for r in json.loads(done.stdout)["rules"] if r["state"] == "problem"}
    assert set(said) == {"draft-rope-theta"}
    assert said["draft-rope-theta"]["problems"][0]["expected"] == "50000.0"


@pytest.fixture(scope="module")
def vllm(drafts: Path) -> dict[str, dict[str, Any]]:
    """What vLLM does with each, in one process; its verifier is the language model alone (its own
    class for Kimi-K2.5 wants an image processor)."""
    shutil.copytree(drafts / "world" / "model", drafts / "text")
    config = json.loads((drafts / "text" / "config.json").read_text())["text_config"]
    config |= {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}
    (drafts / "text" / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("vllm_loads.py")), str(drafts / "text")]
        + [str(drafts / name) for name in ("good", *MUTATIONS)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert "RESULT " in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.split("RESULT ", 1)[1].splitlines()[0])


@pytest.mark.slow
def test_vllm_reads_and_loads_the_good_draft(vllm: dict[str, dict[str, Any]]):
    good = vllm["good"]
    assert good["reads"] == good["loads"] == ""
    assert good["tokens"] == TOKENS.tolist()
    assert good["head_dim"] == 16 and good["layers"] == [1, 2, 3]
    assert good["norm"] == 64.0 and good["positions"] == 4096


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_what_vllm_does_with_a_mutation(vllm: dict[str, dict[str, Any]], name: str):
    """vLLM 0.31.0 refuses two of twelve; the others load and change what is drafted, or its
    limits, without a word."""
    found, good = vllm[name], vllm["good"]
    if name == "method-eagle":
        assert "Expected one of" in found["reads"] and "Expected one of" in found["loads"]
        return
    assert found["reads"] == ""
    if name == "renamed":
        assert "no module or parameter named 'model'" in found["loads"]
        return
    assert found["loads"] == ""
    differs = {key for key in good if found[key] != good[key]}
    changed = {
        "missing-d2t": {"tokens"},
        "absolute-d2t": {"tokens"},
        "plain-slice": {"tokens"},
        "stale": {"tokens"},
        "head-dim": {"head_dim", "cosine"},
        "theta": {"cosine"},
        "no-yarn": {"cosine"},
        "aux-ids": {"layers"},
        "positions": {"positions"},
        "dtype": set(),  # cast to the target's type
    }
    assert differs == changed[name]
    if name in ("missing-d2t", "plain-slice"):
        assert found["tokens"] == list(range(D))
    if name == "absolute-d2t":
        assert found["tokens"] == (TOKENS + np.arange(D)).tolist()
    if name == "positions":
        assert found["positions"] == 1024, "raised to the target's max_model_len"
