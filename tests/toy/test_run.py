"""The toy end to end: all six stages, states beside transformers', a draft that has learnt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kimi_eagle import recipe as recipes
from kimi_eagle.toy.states import ALL, EACH

pytestmark = pytest.mark.slow

LAYERS = (2, 4, 5, 8)
RECIPE = Path(__file__).resolve().parents[2] / "jobs/kimi-k2.5-toy.toml"


def records(run: Path, stage: str) -> list[dict]:
    return [json.loads(p.read_text()) for p in sorted((run / stage / "records").glob("*.json"))]


def test_all_stages_in_minutes(toy_run, capsys) -> None:
    run, shown = toy_run
    assert [s["state"] for s in shown["stages"]] == ["done"] * 6
    wall = sum(s["wall"] for s in shown["stages"])
    peak = max(s["peak_gib"] for s in shown["stages"])
    with capsys.disabled():
        length = shown["result"]["acceptance_length"]
        print(f"\ntoy: acceptance length {length:.3f}, {wall / 60:.1f} min, {peak:.1f} GiB")
        for row in shown["stages"]:
            print("  ", row["stage"], row["wall"], row.get("tokens"))
    assert sum(r["counts"].get("rejected", 0) for r in records(run, "extract")) == 0


def test_the_text_has_something_to_learn(toy_run) -> None:
    """Answers of words, that end, that differ, and are no loop."""
    from kimi_eagle.data.answers import read_answers

    files = sorted((toy_run[0] / "regenerate/files").glob("*.parquet"))
    answers = [t["answer_ids"] for p in files for a in read_answers(p) for t in a["turns"]]
    assert len(answers) == 128 and len({tuple(a) for a in answers}) >= 0.6 * len(answers)
    assert len({token for a in answers for token in a}) >= 500
    assert 0.2 <= sum(a[-1] == 2 for a in answers) / len(answers) < 1
    assert sum(map(len, answers)) / len(answers) > 20
    long = [a for a in answers if len(a) >= 40]
    looping = sum(len(set(a)) < len(a) / 2 for a in long)
    assert len(long) >= 30 and looping < 0.2 * len(long), looping


def test_the_probe_agrees(toy_run) -> None:
    found = [r["info"]["probe"] for r in records(toy_run[0], "extract")]
    assert sum(p["positions"] for p in found) > 1000
    assert min(p["agreement"] for p in found) >= 0.95


def test_states_are_those_of_transformers(own_text, toy_dir, tmp_path, child, capsys) -> None:
    recipe = recipes.load(RECIPE)
    spec = {
        "model": str(toy_dir),
        "batch": own_text[:16],
        "layers": list(LAYERS),
        "engine": recipe.engine_for("extract").model_dump(mode="json"),
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    child("-m", "kimi_eagle.toy.states", tmp_path / "spec.json", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    with capsys.disabled():
        print(f"\nstates of {found['samples']} samples, {found['tokens']} tokens, relative L2:")
        for what in ("all", "each", "noise", "noise_order"):
            print(f"  {what:12} {found[what]}")
    assert found["tokens"] > 500
    assert set(found["all"]) == {str(k) for k in LAYERS}
    assert max(found["all"].values()) <= ALL
    assert max(found["each"].values()) <= EACH


def test_the_shards_hold_these_states(toy_run, toy_dir) -> None:
    """What the run stored, from a batch of many: transformers' within the same bounds."""
    import torch

    from kimi_eagle.shards.store import ShardSet
    from kimi_eagle.toy import reference

    paths = sorted((toy_run[0] / "extract/files").glob("*.safetensors"))
    store = ShardSet(paths)
    model = reference.load(toy_dir)
    ours, theirs = [], []
    for i in range(6):
        sample = store.at(i)
        bits = torch.from_numpy(sample["hidden_states"].view("int16").copy())
        ours.append(bits.view(torch.bfloat16))
        theirs.append(reference.states(model, sample["token_ids"].tolist(), LAYERS))
    a, b = torch.cat(ours), torch.cat(theirs)
    for i, _ in enumerate(LAYERS):
        assert reference.relative(a[:, i], b[:, i]) <= 2 * ALL


def test_the_draft_is_of_the_kimi_recipes_shape(toy_run) -> None:
    """Read by vLLM's own config reader."""
    from vllm.transformers_utils.config import get_config

    found = get_config(str(toy_run[0] / "draft"), trust_remote_code=False)
    assert found.draft_vocab_size == 640
    assert (found.num_attention_heads, found.head_dim, found.num_hidden_layers) == (8, 128, 1)
    rope = found.rope_parameters
    assert (rope["rope_type"], rope["rope_theta"], rope["factor"]) == ("yarn", 50000.0, 8.0)
    assert rope["mscale"] == rope["mscale_all_dim"] == 1.0
    assert found.max_position_embeddings == 4096
    assert found.eagle_aux_hidden_state_layer_ids == [2, 4, 5]
    raw = json.loads((toy_run[0] / "draft/config.json").read_text())
    assert raw["speculators_config"]["verifier"]["architectures"] == [
        "KimiK25ForConditionalGeneration"
    ]


def test_trained_far_better_than_untrained(toy_run, tmp_path, child, capsys) -> None:
    run, shown = toy_run
    child("-m", "kimi_eagle.selftest.untrained", run, tmp_path / "untrained")
    before = json.loads((tmp_path / "untrained/results.json").read_text())
    after = shown["result"]
    with capsys.disabled():
        print(
            f"\nuntrained {before['acceptance_length']:.3f}, "
            f"trained {after['acceptance_length']:.3f} {after['acceptance_per_position']}"
        )
    assert before["acceptance_length"] <= 1.05
    assert after["acceptance_length"] >= 1.3


def test_serving_told_vllm_to_leave_latent_attention(toy_run) -> None:
    """In the settings that make the key, and in the results for people."""
    results = json.loads((toy_run[0] / "bench/results.json").read_text())
    assert results["details"]["engine"]["mla"] is False
    (record,) = records(toy_run[0], "benchmark")
    assert record["parts"]["engine"]["mla"] is False


@pytest.mark.parametrize("stage", ["regenerate", "extract"])
def test_other_stages_keep_latent_attention(toy_run, stage) -> None:
    assert all("mla" not in r["parts"]["engine"] for r in records(toy_run[0], stage))
