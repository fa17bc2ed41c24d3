"""How the rules of the verifier speak of many files, and what they only tell."""

from __future__ import annotations

import json
import os

import pytest
from cases_verifier import EMBED, HEAD, INDEX, beside, change_index, quantised, rewrite, shard
from place import Place

from kimi_eagle.contracts import judge, rules
from kimi_eagle.contracts.judging import Verdict


def verdicts(place: Place) -> dict[str, Verdict]:
    return {v.rule.id: v for v in judge(place.facts(), rules().values())}


def test_many_files_with_one_fault_are_one_problem(place: Place):
    for number in (1, 3):
        shard(place, number).unlink()
    (problem,) = verdicts(place)["verifier-weights-present"].problems
    assert problem.what == "weight file missing (of 3 files 2)"


def test_two_faults_in_two_files_are_two_problems(place: Place):
    shard(place, 1).unlink()
    os.truncate(shard(place, 2), 40)
    found = {i for i, v in verdicts(place).items() if v.state == "problem"}
    assert found == {"verifier-weights-present", "verifier-weights-whole"}


def test_a_total_that_differs_and_files_beside_the_index_are_told(place: Place):
    file = place.model / INDEX
    index = json.loads(file.read_text())
    index["metadata"]["total_size"] += 1
    file.write_text(json.dumps(index))
    (place.model / "adapter.safetensors").write_bytes(shard(place).read_bytes())
    verdict = verdicts(place)["verifier-index-current"]
    assert verdict.state == "ok"
    assert "the index says" in verdict.text and "1 safetensors files are not in" in verdict.text


def test_an_index_that_leaves_the_folder_is_refused(place: Place):
    change_index(place, lambda m: m.update({"x": "../other/model.safetensors"}))
    (problem,) = verdicts(place)["verifier-index"].problems
    assert "../other/model.safetensors" in problem.what


@pytest.mark.parametrize(
    "ignore", [["lm_head"], ["language_model.lm_head"], ["re:.*lm_head.*"], ["Linear"]]
)
def test_lm_head_may_be_left_out_of_a_quantisation_in_any_of_its_words(place: Place, ignore):
    quantised(place, ignore=ignore)
    assert verdicts(place)["verifier-tables-unquantised"].state == "ok"


def test_files_of_mistral_s_format_are_told_as_those_that_vllm_takes(place: Place):
    (place.model / "consolidated.safetensors").write_bytes(shard(place).read_bytes())
    assert (
        "vLLM loads consolidated.safetensors in" in verdicts(place)["verifier-index-current"].text
    )


@pytest.mark.parametrize(
    ("name", "like", "what"),
    [
        ("vision_model.embed_tokens.weight", EMBED, "embedding"),
        ("talker.lm_head.weight", HEAD, "lm_head"),
        ("mtp.lm_head.weight", HEAD, "lm_head"),
        ("language_model.model.layers.4.lm_head.weight", HEAD, "lm_head"),
    ],
)
def test_a_table_of_another_part_is_not_the_language_model_s(place: Place, name, like, what):
    beside(place, name, like)
    assert place.facts().verifier.stored_table(what) == like
    found = {i for i, v in verdicts(place).items() if v.problems}
    assert found == (set() if len(name) > len(like) else {"verifier-tables-own"})


def test_the_rule_s_choice_is_that_of_speculators(place: Place):
    from speculators.utils.loading import load_model_layers

    rewrite(place, HEAD, lambda t: {HEAD: t, "talker.lm_head.weight": t * 2})
    taken = load_model_layers(["lm_head.weight"], str(place.model))["lm_head.weight"]
    (problem,) = verdicts(place)["verifier-tables-own"].problems
    verifier = place.facts().verifier
    assert problem.what.split()[2] == "talker.lm_head.weight"
    assert taken.equal(verifier.tensor("talker.lm_head.weight"))
    assert not taken.equal(verifier.lm_head())


def test_a_tied_lm_head_is_the_embedding_though_another_part_has_one(place: Place):
    beside(place, "mtp.lm_head.weight", HEAD)
    rewrite(place, HEAD, lambda t: {})
    place.change_text(tie_word_embeddings=True)
    assert place.facts().verifier.stored_table("lm_head") == EMBED


def test_layers_of_other_names_are_passed_over(place: Place):
    names = json.loads((place.model / INDEX).read_text())["weight_map"]
    for name in [n for n in names if ".layers." in n]:
        rewrite(place, name, lambda t, n=name: {n.replace(".layers.", ".blocks."): t})
    found = verdicts(place)
    assert found["verifier-layers"].state == "not concerned"
    assert not any(v.problems for v in found.values())


def test_layers_above_the_model_s_are_told_unless_they_predict_further_tokens(place: Place):
    beside(place, "language_model.model.layers.4.eh_proj.weight")
    assert "1 layers above" in verdicts(place)["verifier-layers"].text
    place.change_text(num_nextn_predict_layers=1)
    assert not verdicts(place)["verifier-layers"].text
