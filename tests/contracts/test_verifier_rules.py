"""How the rules of the verifier speak of many files, and what they only tell."""

from __future__ import annotations

import json
import os

import pytest
from cases_verifier import INDEX, change_index, quantised, shard
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
    (place.model / "consolidated.safetensors").write_bytes(shard(place).read_bytes())
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
