"""Two measurements become results.json: every figure recomputed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kimi_eagle.bench.draftdir import DraftInfo
from kimi_eagle.bench.groups import by_category
from kimi_eagle.bench.measure import Measurement, Run, Spec
from kimi_eagle.bench.results import compare
from kimi_eagle.bench.workload import make_workload
from kimi_eagle.errors import RunError

INFO = DraftInfo(Path("/d"), {"method": "eagle3"}, "Eagle3DraftModel", 10, 4, 8)
TOKENS = [[1, 2, 3, 4], [5, 6]]


def spec(dtype: str = "float32", **more: object) -> Spec:
    workload = make_workload(
        ["a", "b"], [[1], [2]], 4, 3, categories=["code", "chat"], sources=["x", "x"]
    )
    base = {"draft": "/d", "draft_digest": "dd", "speculative": {"method": "eagle3"}}
    return Spec(
        verifier="/v",
        verifier_id="vid",
        engine={"dtype": dtype},
        environment={"OMP_NUM_THREADS": "2"},
        workload=workload,
        batch_sizes=(1,),
        **(base | more),
    )


def measurement(kind: str, tokens: list, seconds: float, counters: dict | None = None):
    accepted = [[3, 2, 1, 0], [2, 1, 0, 1]] if counters else None  # adds up to counters()
    run = Run(1, seconds, tokens, ["length", "stop"], counters, accepted)
    return Measurement("x", kind, 10.0, 5.0, 1 << 30, [run], {"torch": "2"}, 2)


def counters(drafts: int = 10, per_position: tuple = (5, 2, 1)) -> dict:
    return {
        "num_drafts": drafts,
        "num_draft_tokens": 3 * drafts,
        "num_accepted_tokens": sum(per_position),
        "num_accepted_tokens_per_pos": list(per_position),
    }


def test_figures() -> None:
    draft = measurement("draft", TOKENS, 2.0, counters())
    found = compare(spec(), draft, measurement("baseline", TOKENS, 3.0), INFO)
    assert list(found) == [
        "acceptance_length",
        "acceptance_per_position",
        "identical_outputs",
        "tokens_per_second",
        "k",
        "workload",
        "details",
    ]
    assert found["acceptance_length"] == pytest.approx(1.8)
    assert found["acceptance_per_position"] == [0.5, 0.2, 0.1]
    assert found["identical_outputs"] is True
    assert found["tokens_per_second"] == {"draft": 3.0, "baseline": 2.0}
    assert (found["k"], found["workload"]) == (3, spec().workload.digest)
    details = found["details"]
    assert details["speedup"] == pytest.approx(1.5)
    assert details["conditional_acceptance"] == pytest.approx([0.5, 0.4, 0.5])
    assert [p["tokens"]["draft"] for p in details["prompts"]] == [4, 2]


def test_figures_by_category_and_source_add_up_to_the_whole() -> None:
    draft = measurement("draft", TOKENS, 2.0, counters())
    found = compare(spec(), draft, measurement("baseline", [[1, 2, 3, 9], [5, 6]], 3.0), INFO)
    details = found["details"]
    assert details["by_category"] == {
        "code": {
            "prompts": 1,
            "drafts": 6,
            "output_tokens": 4,
            "acceptance_length": pytest.approx(1 + 4 / 6),
            "acceptance_per_position": pytest.approx([3 / 6, 1 / 6, 0]),
            "identical_prompts": 0,
        },
        "chat": {
            "prompts": 1,
            "drafts": 4,
            "output_tokens": 2,
            "acceptance_length": pytest.approx(2.0),
            "acceptance_per_position": pytest.approx([2 / 4, 1 / 4, 1 / 4]),
            "identical_prompts": 1,
        },
    }
    (whole,) = details["by_source"].values()
    assert whole["acceptance_length"] == pytest.approx(found["acceptance_length"])
    assert whole["acceptance_per_position"] == pytest.approx(found["acceptance_per_position"])
    assert [p["category"] for p in details["prompts"]] == ["code", "chat"]
    assert [p["acceptance_length"] for p in details["prompts"]] == pytest.approx([1 + 4 / 6, 2.0])
    assert list(by_category(found)) == [
        "  category code: 1.67, 1 prompts",
        "  category chat: 2.00, 1 prompts",
    ]


def test_a_prompt_without_a_draft_has_no_length() -> None:
    draft = measurement("draft", TOKENS, 2.0, counters())
    draft.runs[0].histograms[1][:] = []
    found = compare(spec(), draft, measurement("baseline", TOKENS, 3.0), INFO)["details"]
    assert found["by_category"]["chat"]["acceptance_length"] is None
    assert found["by_category"]["chat"]["acceptance_per_position"] is None
    assert found["prompts"][1]["acceptance_length"] is None


def test_one_different_token_is_found_and_placed() -> None:
    for other, place in (([1, 2, 9, 4], 2), ([1, 2, 3], 3), ([1, 2, 3, 4, 5], 4)):
        draft = measurement("draft", [other, TOKENS[1]], 1.0, counters())
        found = compare(spec(), draft, measurement("baseline", TOKENS, 1.0), INFO)
        assert found["identical_outputs"] is False
        assert found["details"]["identical_prompts"] == 1
        assert found["details"]["prompts"][0]["first_difference"] == place
        assert found["details"]["prompts"][1]["first_difference"] is None


def test_equality_is_not_claimed_in_bfloat16() -> None:
    draft = measurement("draft", TOKENS, 1.0, counters())
    found = compare(spec("bfloat16"), draft, measurement("baseline", TOKENS, 1.0), INFO)
    assert found["identical_outputs"] is None
    assert "bfloat16" in found["details"]["identical_outputs_reason"]
    assert found["details"]["identical_prompts"] == 2


def test_no_draft_at_all_is_an_error_not_a_figure() -> None:
    draft = measurement("draft", TOKENS, 1.0, counters(0, (0, 0, 0)))
    with pytest.raises(RunError, match="no draft"):
        compare(spec(), draft, measurement("baseline", TOKENS, 1.0), INFO)


def test_spec_digest_is_the_work_not_the_place() -> None:
    first = spec().digest()
    assert spec(draft="/elsewhere").digest() == first
    named = make_workload(["c", "d"], [[1], [2]], 4, 3)
    assert replace(spec(), workload=named).digest() == first
    assert spec(draft_digest="other").digest() != first
    assert spec("bfloat16").digest() != first
    plain = {"draft": None, "draft_digest": None, "speculative": None}
    assert spec(**plain).digest() != first
    assert spec(**plain).kind == "baseline"
