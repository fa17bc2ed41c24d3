"""A mapping that the recipe brings along, through the real prepare and vocab stages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import hidden_run  # noqa: E402
from kimi_eagle import contracts, vocab  # noqa: E402
from kimi_eagle.errors import RunError  # noqa: E402
from kimi_eagle.recipe import input_paths, load  # noqa: E402
from kimi_eagle.rundir import create_run, follow  # noqa: E402
from kimi_eagle.stages import module  # noqa: E402
from kimi_eagle.stages.context import Context, recipe_digest  # noqa: E402
from kimi_eagle.worker import Worker  # noqa: E402

V, D = 49152, 1024
TOKENS = np.unique(np.append(np.arange(17), np.arange(20, V, 40)))[:D]
"""The special tokens of the small model and every 40th other."""
RARE = vocab.from_offsets(TOKENS - np.arange(D), V)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Context]:
    """A run whose prepare is done, under the tiny recipe with other text in it."""
    folder = tmp_path_factory.mktemp("prepared")
    path = hidden_run.recipe_file(folder)
    text, run = path.read_text(), create_run(folder / "run")

    def under(*changes: tuple[str, str]) -> Context:
        changed = text
        for old, new in changes:
            assert old in changed
            changed = changed.replace(old, new)
        path.write_text(changed)
        recipe = load(path)
        follow(run, recipe, path)
        ctx = Context(run, recipe)
        work(ctx, "prepare")
        return ctx

    return under


def work(ctx: Context, stage: str) -> Any:
    """Do a stage; its first current record."""
    with Worker(ctx.run.stage(stage), recipe_digest=recipe_digest(ctx.recipe)) as worker:
        module(stage).work(ctx, worker)
    return ctx.gate(stage)[0]


def saved(folder: Path, mapping: vocab.VocabMapping) -> str:
    folder.mkdir()
    vocab.save(mapping, lambda name: folder / name)
    return str(folder)


def test_it_is_taken_as_it_is_and_the_run_counts_for_coverage(prepared, tmp_path):
    plain = prepared()
    own = work(plain, "vocab")
    assert "mapping" not in own.data["parts"] and "mapping" not in own.data["parts"]["vocab"]
    folder = saved(tmp_path / "rare", RARE)
    ctx = prepared(("[vocab]", f'[vocab]\nmapping = "{folder}"'))
    assert input_paths(ctx.recipe)["vocab.mapping"] == folder
    record = work(ctx, "vocab")
    assert record.key != own.key and record.data["parts"]["mapping"] == RARE.digest
    found = vocab.load(record.path("d2t.npy"), record.path("t2d.npy"))
    assert found.digest == record.info["digest"] == RARE.digest
    before = vocab.load(own.path("d2t.npy"), own.path("t2d.npy"))
    assert found.counts_digest == before.counts_digest, "of the run's own tokens"
    assert 0 < record.info["coverage"] < 0.5 < own.info["coverage"]
    # What was measured is judged at the next stage: this mapping is for other text.
    facts = contracts.Facts(ctx.recipe, run=ctx.run, heavy=True)
    with pytest.raises(RunError, match="mapping-covers: the mapping covers"):
        contracts.open_stage(facts, "train")
    assert contracts.Facts(plain.recipe, run=ctx.run).mapping is None, "vocab makes it again"


def test_another_mapping_is_another_key(prepared, tmp_path):
    one = prepared(("[vocab]", f'[vocab]\nmapping = "{saved(tmp_path / "a", RARE)}"'))
    first = module("vocab").plan(one)[0].key
    other = np.sort(np.append(TOKENS[:-1], V - 1))
    folder = saved(tmp_path / "b", vocab.from_offsets(other - np.arange(D), V))
    two = prepared(("[vocab]", f'[vocab]\nmapping = "{folder}"'))
    assert module("vocab").plan(two)[0].key != first
    (tmp_path / "moved").mkdir()
    same = saved(tmp_path / "moved" / "c", RARE)
    three = prepared(("[vocab]", f'[vocab]\nmapping = "{same}"'))
    assert module("vocab").plan(three)[0].key == first, "where it lies does not count"


def test_forced_tokens_that_it_lacks_are_a_problem_before_the_stage(prepared, tmp_path):
    lacking = np.sort(np.append(TOKENS[TOKENS != 2], 21))  # 2 ends an answer
    folder = saved(tmp_path / "lacking", vocab.from_offsets(lacking - np.arange(D), V))
    ctx = prepared(("[vocab]", f'[vocab]\nforce_tokens = [60, 61]\nmapping = "{folder}"'))
    facts = contracts.Facts(ctx.recipe, run=ctx.run, heavy=True)
    said = {v.rule.id: v for v in contracts.judge(facts, contracts.of_stage("vocab"))}
    assert said["mapping-forced-tokens"].problems[0].what.endswith("not in the mapping: 61")
    assert said["mapping-special-tokens"].problems[0].what.endswith("not in the mapping: 2")
    assert "force_special = false" in said["mapping-special-tokens"].rule.fix


def test_of_a_draft_to_start_from_its_own_is_taken(prepared, tmp_path):
    from safetensors.numpy import save_file

    draft = tmp_path / "draft"
    draft.mkdir()
    layer = {"model_type": "llama", "vocab_size": V, "hidden_size": 576}
    config = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": D,
        "transformer_layer_config": layer,
    }
    (draft / "config.json").write_text(json.dumps(config))
    save_file({"d2t": RARE.d2t}, draft / "model.safetensors")
    ctx = prepared(("[train]", f'[train]\nfrom = "{draft}"'))
    assert input_paths(ctx.recipe)["train.from"] == str(draft)
    assert ctx.recipe.train.from_ == str(draft)
    assert type(ctx.recipe).model_validate(ctx.recipe.model_dump()) == ctx.recipe
    record = work(ctx, "vocab")
    assert record.info["digest"] == RARE.digest
    # The draft is in the key of training by its content, not by its place.
    hidden_run.extract(ctx)
    (unit,) = module("train").plan(ctx)
    assert "from" not in unit.parts["train"] and unit.parts["vocab"] == RARE.digest
    draft.rename(tmp_path / "moved")
    moved = prepared(("[train]", f'[train]\nfrom = "{tmp_path / "moved"}"'))
    assert module("train").plan(moved)[0].key == unit.key
    weights = {"d2t": RARE.d2t, "norm.weight": np.ones(3, np.float32)}
    save_file(weights, tmp_path / "moved" / "model.safetensors")
    assert module("train").plan(moved)[0].key != unit.key


@pytest.mark.slow
def test_train_goes_on_from_the_draft_of_another_run(prepared, tmp_path):
    """Two runs of the real stage, two steps each, on drawn states: the second starts from the
    first one's draft, keeps its mapping, and its own draft breaks no rule."""
    # One token beyond the first 1,024, which are else all that these few answers hold.
    short = ("max_steps = 20", "max_steps = 2"), ("[vocab]", "[vocab]\nforce_tokens = [40000]")
    first = prepared(*short)
    work(first, "vocab")
    hidden_run.extract(first)
    made = work(first, "train")
    module("train").publish(first)
    draft = tmp_path / "draft"
    first.run.draft.rename(draft)  # the two runs share a folder here
    again = prepared(*short, ("[train]", f'[train]\nfrom = "{draft}"'))
    facts = contracts.Facts(again.recipe, run=again.run, heavy=True)
    contracts.open_stage(facts, "vocab")
    mapping = work(again, "vocab")
    contracts.open_stage(contracts.Facts(again.recipe, run=again.run, heavy=True), "train")
    record = work(again, "train")
    module("train").publish(again)
    assert record.key != made.key and record.data["parts"]["from"]
    facts = contracts.Facts(again.recipe, run=again.run)
    assert facts.draft == again.run.draft
    said = contracts.judge(facts, contracts.rules().values())
    own = [v for v in said if v.rule.boundary in ("draft", "draft_weights", "mapping", "training")]
    assert [(v.rule.id, v.problems) for v in own if v.state == "problem"] == []
    assert {v.rule.id for v in own if v.state == "ok"} >= {
        "draft-mapping-current",
        "draft-tensors",
        "training-from-mapping",
        "mapping-own-counts",
    }
    assert facts.draft_files.mapping(V).digest == mapping.info["digest"]


# -- the chain of a user's own scripts -------------------------------------------------------------


def test_counts_as_tensor_and_as_dict_give_one_mapping_and_it_is_the_librarys():
    """At Kimi-K2.5's sizes: a flat tensor [163840] and speculators' dict."""
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    whole, size = 163_840, 32_000
    ids = np.minimum(np.random.default_rng(0).zipf(1.2, 400_000), whole) - 1
    flat = torch.bincount(torch.from_numpy(ids), minlength=whole)
    some = {int(i): int(flat[i]) for i in flat.nonzero().flatten()}
    assert len(some) < whole
    one, two = (vocab.build_mapping(vocab.as_counts(c, whole), size) for c in (flat, some))
    assert one.digest == two.digest and one.counts_digest == two.counts_digest
    d2t, t2d = build_vocab_mappings_from_distribution(some, size, whole)
    assert np.array_equal(one.d2t, d2t.numpy()) and np.array_equal(one.t2d, t2d.numpy())
