"""The estimated acceptance: its walk by hand, and against a server's steps done one by one."""

from __future__ import annotations

import json

import numpy as np
import pytest

K = 3


def tally(*answers: tuple[list[list[int]], list[int], list[int]]):
    from kimi_eagle.training.estimate import Tally

    found = Tally(K)
    for drafted, taken, text in answers:
        found.walk(np.array(drafted), np.array(taken), np.array(text))
    return found


def test_walk_jumps_over_what_was_accepted():
    text = [10, 11, 12, 13, 14, 15, 16]
    drafted = [
        [10, 0, 0, 0, 14, 0, 99],  # starts at 0 (accepts 2), at 3 (none), at 4 (all 3 that remain)
        [11, 0, 0, 13, 15, 0, 0],  # right at 3, but after a wrong one
        [0, 0, 0, 0, 16, 0, 0],
    ]
    found = tally((drafted, text, text))
    assert found.starts == 3
    assert found.judged.tolist() == [3, 2, 2] and found.accepted.tolist() == [2, 2, 1]
    result = found.result()
    assert result["conditional"] == [0.6667, 1.0, 0.5]
    assert result["rates"] == [0.6667, 0.6667, 0.3333]
    assert result["length"] == pytest.approx(1 + 5 / 3, abs=1e-4)


def test_start_near_the_end_counts_for_the_positions_that_are_known():
    found = tally(([[7, 0], [8, 0], [9, 0]], [7, 8], [7, 8]))
    assert (found.starts, found.judged.tolist(), found.accepted.tolist()) == (
        1,
        [1, 1, 0],
        [1, 1, 0],
    )
    assert found.result()["rates"] == [1.0, 1.0, 0.0]


def test_walk_ends_where_the_text_leaves_the_verifiers_path():
    # The verifier says 50 where the text has 11: accepted, but what would follow is not known.
    taken, text = [10, 50, 12, 13], [10, 11, 12, 13]
    drafted = [[10, 0, 12, 13], [50, 0, 13, 0], [12, 0, 0, 0]]
    found = tally((drafted, taken, text))
    assert found.starts == 2, "at 0, and behind the token that the text has there"
    assert found.judged.tolist() == [2, 2, 0] and found.accepted.tolist() == [2, 2, 0]


def test_nothing_to_judge_is_no_acceptance():
    assert tally(([[], [], []], [], [])).result()["length"] == 1.0


def test_runs_end_where_documents_and_answers_end():
    from kimi_eagle.training.estimate import runs

    labels = np.array([-1, 0, 0, 1, 1, -1, 1, -1, -1])
    assert runs(labels) == [(1, 3), (3, 5), (6, 7)]
    assert runs(np.array([-1, -1])) == []


@pytest.fixture(scope="module")
def trained(run, recipe_for, tmp_path_factory):
    """A run with half of its samples to validate with: (recipe, result, folder, progress)."""
    recipe = recipe_for(validation_share=0.5, epochs=3, keep_checkpoints=3)
    workdir, progress = tmp_path_factory.mktemp("estimated"), []
    return recipe, run(recipe, workdir, progress=progress), workdir, progress


def test_estimate_is_with_the_checkpoint_the_curves_and_tensorboard(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from kimi_eagle.training import checkpoints, curves

    _, result, workdir, progress = trained
    lines = [x for x in curves.read(workdir / "curves.jsonl") if "estimated_acceptance" in x]
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    for line in lines:
        metrics = json.loads(
            (workdir / f"checkpoints/{line['epoch']}/val_metrics.json").read_text()
        )
        kept = metrics["estimated_acceptance"]
        assert (kept["length"], kept["rates"]) == (
            line["estimated_acceptance"],
            line["estimated_rates"],
        )
        assert kept["reference"] == "text" and kept["k"] == K and kept["starts"] > 20
    assert 1 < lines[0]["estimated_acceptance"] < lines[-1]["estimated_acceptance"] <= 1 + K
    assert checkpoints.estimated(result.checkpoint)["length"] in {
        line["estimated_acceptance"] for line in lines
    }
    told = [p.get("estimated_acceptance") for p in progress]
    first = lines[0]["step"]
    assert told[:first] == [None] * first and told[first] == lines[0]["estimated_acceptance"]
    events = EventAccumulator(str(workdir / "tensorboard/train"))
    events.Reload()
    logged = events.Scalars("estimate/length")
    assert [e.value for e in logged] == pytest.approx([x["estimated_acceptance"] for x in lines])
    assert logged[-1].step == result.steps == lines[-1]["step"]


def test_equals_a_server_that_drafts_token_by_token(trained, verifier, corpus):
    """Counts of both references, against a draft that is fed its own tokens with a cache."""
    import torch

    from kimi_eagle.shards import ShardSet
    from kimi_eagle.training import loop
    from kimi_eagle.training.estimate import Estimator, Tally

    recipe, result, workdir, _ = trained
    store = ShardSet(corpus.shards)
    model = loop.build_model(recipe, verifier, corpus.d2t, corpus.t2d, device="cpu")
    from safetensors.torch import load_file

    model.load_state_dict(load_file(result.checkpoint / "model.safetensors"), strict=False)
    loaders = loop._loaders(recipe, model, store, workdir / "damaged.jsonl", "cpu")

    sampled = recipe.model_copy(
        update={"regenerate": recipe.regenerate.model_copy(update={"temperature": 1.0})}
    )
    before = torch.get_rng_state()
    own_text = Estimator(recipe, verifier, model.d2t, "cpu")(model, loaders[1])
    by_head = Estimator(sampled, verifier, model.d2t, "cpu")(model, loaders[1])
    assert torch.equal(before, torch.get_rng_state())
    assert by_head["reference"] == "head"
    assert by_head["as_written"] == {k: v for k, v in own_text.items() if k != "reference"}

    weight, eps = verifier.final_norm()
    head = verifier.lm_head().float()
    text_tally, head_tally = Tally(K), Tally(K)
    for name in [s for s in store.ids][12:]:
        ids, mask, states = corpus.states[name]
        first = int(np.flatnonzero(mask)[0])
        own = serve(model, ids, states[:, :-1].flatten(1).float(), first)
        normed = torch.nn.functional.rms_norm(
            states[:, -1].float(), weight.shape, weight.float(), eps
        )
        taken = (normed @ head.T).argmax(-1).numpy()[first:-1]
        text_tally.walk(own, ids[first + 1 :], ids[first + 1 :])
        head_tally.walk(own, taken, ids[first + 1 :])
    assert text_tally.result() == by_head["as_written"]
    # The head in bfloat16 and in float32 may name another token where two are all but equal.
    assert head_tally.result()["length"] == pytest.approx(by_head["length"], abs=0.05)
    assert head_tally.starts > 20 and by_head["length"] != own_text["length"]


def serve(model, ids, states, first: int) -> np.ndarray:
    """int64 [K, n]: what a server's draft says after each token from `first` on, each time anew:
    settled tokens into the cache, then one at a time, its own token and state fed back."""
    import torch
    from transformers import DynamicCache

    tokens, found = torch.from_numpy(ids.astype(np.int64)), []
    with torch.no_grad():
        for at in range(first, len(ids) - 1):
            cache, said = DynamicCache(), []
            # The draft reads token i + 1 beside the states of token i.
            inputs, hidden = tokens[1 : at + 1][None], model.fc(model.input_norm(states[:at]))[None]
            done = 0
            for _ in range(K):
                n = inputs.shape[1]
                x = torch.cat([model.embed_tokens(inputs), hidden], dim=-1)
                where = torch.arange(done, done + n)[None]
                seen = torch.arange(done + n)[None] <= where[0][:, None]
                out = model.layers[0](
                    x,
                    attention_mask=seen[None, None],
                    position_ids=where,
                    past_key_values=cache,
                    cache_position=where[0],
                    position_embeddings=model.rotary_emb(x, where),
                )[:, -1:]
                draft = model.lm_head(model.norm(out)).argmax(-1)
                inputs, hidden, done = draft + model.d2t[draft], out, done + n
                said.append(int(inputs[0, 0]))
            found.append(said)
    return np.array(found, np.int64).T
