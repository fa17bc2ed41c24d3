"""Measurements become results.json: every figure recomputed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kimi_eagle.bench.draftdir import DraftInfo
from kimi_eagle.bench.measure import Case, Measurement, Run, Spec
from kimi_eagle.bench.plan import Load
from kimi_eagle.bench.results import compare
from kimi_eagle.bench.telling import by_category, summary
from kimi_eagle.bench.workload import make_workload
from kimi_eagle.errors import RunError

TOKENS = [[1, 2, 3, 4], [5, 6]]
LOOP = [1, 2, 3] * 9
HISTOGRAMS = [[3, 2, 1, 0], [2, 1, 0, 1]]  # 10 drafts: 5, 2 and 1 reach positions 1, 2 and 3
GREEDY, WIDE, SAMPLED = Case(1), Case(16), Case(1, 0.7, 0.9)
WORKLOAD = make_workload(
    ["a", "b"], [[1], [2]], 4, 3, categories=["code", "chat"], sources=["x", "x"]
)


def spec(dtype: str = "float32", **more: object) -> Spec:
    base = {"draft": "/d", "draft_digest": "dd", "speculative": {"method": "eagle3"}, "k": 3}
    base["workload"] = WORKLOAD
    return Spec(
        verifier="/v",
        verifier_id="vid",
        engine={"dtype": dtype, "seed": 0},
        environment={"OMP_NUM_THREADS": "2"},
        cases=(GREEDY,),
        **(base | more),
    )


def run(tokens: list, seconds: float, histograms: list | None = None) -> Run:
    """Prompts one after another, each as long as its share of the tokens."""
    total = sum(map(len, tokens))
    counts = [sum(sum(h[j : j + 1]) for h in histograms or []) for j in range(4)]
    counters = {
        "num_drafts": sum(counts),
        "num_draft_tokens": 3 * sum(counts),
        "num_accepted_tokens": sum(j * n for j, n in enumerate(counts)),
    }
    return Run(
        seconds,
        tokens,
        ["length"] * len(tokens),
        counters if histograms else None,
        histograms,
        [seconds * len(t) / total for t in tokens],
        [0.1 * (i + 1) for i in range(len(tokens))],
        [0.01, *[None] * (len(tokens) - 1)],
        {"prompts": 1, "tokens": 4, "seconds": 0.2},
    )


def measured(kind: str, case: Case, one: Run) -> Measurement:
    return Measurement(f"{kind} {case}", kind, case, one, 10.0, 1 << 30, {"torch": "2"}, 2)


def compared(runs: dict[Case, tuple[Run, Run]], one: Spec | None = None, others: tuple = ()):
    """runs: case -> with the own draft, alone; others: (name, k, case -> run)."""
    one = replace(one or spec(), cases=tuple(runs))
    plain = {"draft": None, "draft_digest": None, "speculative": None, "k": None}
    loads, found = [Load(None, replace(one, **plain)), Load("draft", one)], [[], []]
    for case, pair in runs.items():
        found[1].append(measured("draft", case, pair[0]))
        found[0].append(measured("baseline", case, pair[1]))
    for name, k, theirs in others:
        loads.append(Load(name, replace(one, draft=f"/{name}", k=k, cases=tuple(theirs))))
        found.append([measured(name, case, r) for case, r in theirs.items()])
    names = dict.fromkeys(["draft", *(name for name, _, _ in others)])
    info = DraftInfo(Path("/d"), {"method": "eagle3"}, "Eagle3DraftModel", 10, 4, 8)
    return compare(loads, found, dict.fromkeys(names, info))


def test_headline() -> None:
    found = compared({GREEDY: (run(TOKENS, 2.0, HISTOGRAMS), run(TOKENS, 3.0))})
    assert list(found) == [
        "format",
        "acceptance_length",
        "acceptance_per_position",
        "identical_outputs",
        "tokens_per_second",
        "k",
        "workload",
        "intervals",
        "details",
    ]
    assert found["acceptance_length"] == pytest.approx(1.8)
    assert found["acceptance_per_position"] == [0.5, 0.2, 0.1]
    assert found["identical_outputs"] is True
    assert found["tokens_per_second"] == pytest.approx({"draft": 3.0, "baseline": 2.0})
    assert (found["k"], found["workload"]) == (3, WORKLOAD.digest)
    details = found["details"]
    assert details["speedup"] == pytest.approx(1.5)
    assert details["conditional_acceptance"] == pytest.approx([0.5, 0.4, 0.5])
    assert [p["tokens"]["draft"] for p in details["prompts"]] == [4, 2]
    assert [p["seconds"]["draft"] for p in details["prompts"]] == pytest.approx([4 / 3, 2 / 3])
    assert details["plan"] == {"engine_loads": 2, "measurements": 2}
    assert [e["draft"] for e in details["engines"]] == [None, "draft"]
    assert details["engines"][1]["measure_seconds"] == 2.0
    assert details["sweeps"] == details["floor"] == []
    assert details["loops"]["prompts"] == 0 and details["loops"]["left_out"] is False


def test_a_row() -> None:
    (row,) = compared({GREEDY: (run(TOKENS, 2.0, HISTOGRAMS), run(TOKENS, 3.0))})["details"][
        "batch_sizes"
    ]
    assert (row["draft"], row["k"], row["batch_size"], row["temperature"]) == ("draft", 3, 1, 0)
    assert (row["drafts"], row["draft_tokens"], row["accepted_tokens"]) == (10, 30, 8)
    assert (row["prompts"], row["left_out"]) == (2, 0)
    latency = row["time_to_first_token"]["draft"]
    assert latency == pytest.approx({"median": 0.15, "p90": 0.19})
    assert row["time_per_output_token"]["draft"] == {"median": 0.01, "p90": 0.01}
    assert row["mean_in_flight"] == pytest.approx({"draft": 1.0, "baseline": 1.0})
    assert row["warm_up"]["draft"] == {"prompts": 1, "tokens": 4, "seconds": 0.2}
    low, high = row["intervals"]["acceptance_length"]
    assert low == pytest.approx(1 + 4 / 6) and high == pytest.approx(2.0)  # one prompt twice
    assert row["intervals"]["speedup"] == pytest.approx([1.5, 1.5])
    assert row["identity"] == {
        "identical_prompts": 2, "prompts": 2, "share": 1.0, "first_difference": None,
    }  # fmt: skip


def test_a_wide_batch_has_no_interval_of_speed_and_gives_the_floor() -> None:
    other = [[1, 2, 9, 4], [5, 6]]
    details = compared(
        {
            GREEDY: (run(TOKENS, 2.0, HISTOGRAMS), run(TOKENS, 3.0)),
            WIDE: (run(other, 1.0, HISTOGRAMS), run(other, 1.0)),
        }
    )["details"]
    assert [row["batch_size"] for row in details["batch_sizes"]] == [1, 16]
    wide = details["batch_sizes"][1]["intervals"]
    assert wide["speedup"] is None is wide["tokens_per_second"]
    assert wide["acceptance_length"] is not None
    assert details["batch_sizes"][1]["identical_prompts"] == 2  # each with its own batch size
    assert details["floor"] == [
        {
            "batch_size": 16,
            "than": 1,
            "identical_prompts": 1,
            "prompts": 2,
            "share": 0.5,
            "first_difference": {"least": 2, "median": 2.0},
        }
    ]


def test_sampling_other_k_and_other_drafts_are_rows_of_their_own() -> None:
    better = [[1, 2, 1, 2], [1, 0, 0, 3]]
    found = compared(
        {
            GREEDY: (run(TOKENS, 2.0, HISTOGRAMS), run(TOKENS, 3.0)),
            SAMPLED: (run([[9], [8]], 1.0, HISTOGRAMS), run([[7], [6]], 1.0)),
        },
        others=(
            ("other", 3, {GREEDY: run(TOKENS, 1.0, better), SAMPLED: run(TOKENS, 1.0, better)}),
            ("draft", 2, {GREEDY: run(TOKENS, 2.0, HISTOGRAMS)}),
        ),
    )
    details = found["details"]
    assert [(r["draft"], r["k"]) for r in details["batch_sizes"]] == [("draft", 3)]
    kinds = [(r["draft"], r["k"], r["temperature"]) for r in details["sweeps"]]
    assert kinds == [("draft", 3, 0.7), ("other", 3, 0), ("other", 3, 0.7), ("draft", 2, 0)]
    sampled, other, _, shorter = details["sweeps"]
    assert sampled["identity"] is None is sampled["identical_prompts"]
    assert other["acceptance_length"] == pytest.approx(1 + (2 + 2 + 6 + 9) / 10)
    assert other["speedup"] == pytest.approx(3.0)
    assert len(shorter["acceptance_per_position"]) == 2
    assert list(details["drafts"]) == ["draft", "other"]
    assert details["drafts"]["draft"]["by_category"] == details["by_category"]
    assert details["drafts"]["other"]["path"] == "/other"
    assert details["drafts"]["other"]["by_category"]["chat"]["acceptance_length"] == 1 + 9 / 4
    assert found["acceptance_length"] == pytest.approx(1.8)  # still the own one's


def test_loops_are_left_out_and_shown_beside() -> None:
    workload = make_workload(
        ["a", "b", "c"], [[1], [2], [3]], 30, 3, categories=["chat"] * 2 + ["odd"],
        sources=["x"] * 3,
    )  # fmt: skip
    tokens, histograms = [*TOKENS, LOOP], [*HISTOGRAMS, [0, 0, 0, 7]]
    found = compared(
        {GREEDY: (run(tokens, 2.0, histograms), run(tokens, 4.0))}, spec(workload=workload)
    )
    assert found["acceptance_length"] == pytest.approx(1.8)
    assert found["tokens_per_second"]["draft"] == pytest.approx(33 / 2)
    details = found["details"]
    assert details["loops"] | {"rule": ""} == {
        "prompts": 1, "of": 3, "names": ["c"], "rule": "", "left_out": True,
        "acceptance_length": 4.0, "acceptance_length_all": pytest.approx(1 + 29 / 17),
    }  # fmt: skip
    (row,) = details["batch_sizes"]
    assert (row["prompts"], row["left_out"], row["drafts"]) == (2, 1, 17)
    assert row["all_prompts"]["acceptance_length"] == pytest.approx(1 + 29 / 17)
    assert details["by_category"]["odd"]["acceptance_length"] is None
    assert details["by_category"]["odd"]["left_out"] == 1
    assert details["prompts"][2]["loop"] == {"period": 3, "start": 0, "tokens": 27}
    assert list(by_category(found)) == [
        "  category chat: 1.80, 2 prompts",
        "  category odd: loops only",
    ]


def test_lines_for_a_person() -> None:
    workload = make_workload(["a", "b", "c"], [[1], [2], [3]], 30, 3)
    one, wide = (run([*TOKENS, LOOP], s, [*HISTOGRAMS, [0, 0, 0, 7]]) for s in (2.0, 1.0))
    found = compared(
        {GREEDY: (one, one), WIDE: (wide, one), SAMPLED: (one, wide)}, spec(workload=workload)
    )
    assert summary(found) == [
        "acceptance length 1.80 (1.67-2.00) at k=3, batch 1, greedy, 2 prompts",
        "1 of 3 answers are loops, left out; acceptance length 4.00 of them alone, 2.71 of all",
        "outputs identical: True (3 of 3 prompts, float32)",
        "16.5 -> 16.5 tok/s, 1.00x (1.00-1.00); medians: 150 -> 150 ms to the first token,"
        " 10 -> 10 ms a token then",
        "  draft k=3 batch 16: 1.80 (1.67-2.00), 2.00x, 100% identical",
        "  draft k=3 batch 1 temperature 0.7 top-p 0.9: 1.80 (1.67-2.00), 0.50x",
    ]


def test_where_nearly_all_are_loops_none_is_left_out() -> None:
    tokens = [TOKENS[0], LOOP]
    found = compared({GREEDY: (run(tokens, 2.0, HISTOGRAMS), run(tokens, 4.0))})
    assert found["acceptance_length"] == pytest.approx(1.8)
    loops = found["details"]["loops"]
    assert loops["prompts"] == 1 and loops["left_out"] is False


def test_figures_by_category_and_source_add_up_to_the_whole() -> None:
    alone = run([[1, 2, 3, 9], [5, 6]], 3.0)
    found = compared({GREEDY: (run(TOKENS, 2.0, HISTOGRAMS), alone)})
    details = found["details"]
    assert details["by_category"] == {
        "code": {
            "prompts": 1,
            "left_out": 0,
            "drafts": 6,
            "output_tokens": 4,
            "acceptance_length": pytest.approx(1 + 4 / 6),
            "acceptance_per_position": pytest.approx([3 / 6, 1 / 6, 0]),
            "identical_prompts": 0,
        },
        "chat": {
            "prompts": 1,
            "left_out": 0,
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


def test_a_prompt_without_a_draft_has_no_length() -> None:
    found = compared({GREEDY: (run(TOKENS, 2.0, [HISTOGRAMS[0], []]), run(TOKENS, 3.0))})
    details = found["details"]
    assert details["by_category"]["chat"]["acceptance_length"] is None
    assert details["by_category"]["chat"]["acceptance_per_position"] is None
    assert details["prompts"][1]["acceptance_length"] is None


def test_a_position_that_no_draft_reached_has_no_conditional_figure() -> None:
    found = compared({GREEDY: (run(TOKENS, 2.0, [[3, 1], [4, 0]]), run(TOKENS, 3.0))})
    assert found["acceptance_per_position"] == [0.125, 0.0, 0.0]
    assert found["details"]["conditional_acceptance"] == [0.125, 0.0, None]
    assert found["intervals"]["conditional_acceptance"][2] is None


def test_one_different_token_is_found_and_placed() -> None:
    for other, place in (([1, 2, 9, 4], 2), ([1, 2, 3], 3), ([1, 2, 3, 4, 5], 4)):
        pair = run([other, TOKENS[1]], 1.0, HISTOGRAMS), run(TOKENS, 1.0)
        found = compared({GREEDY: pair})
        assert found["identical_outputs"] is False
        assert found["details"]["identical_prompts"] == 1
        assert found["details"]["prompts"][0]["first_difference"] == place
        assert found["details"]["prompts"][1]["first_difference"] is None


def test_equality_is_not_claimed_in_bfloat16() -> None:
    pair = run(TOKENS, 1.0, HISTOGRAMS), run(TOKENS, 1.0)
    found = compared({GREEDY: pair}, spec("bfloat16"))
    assert found["identical_outputs"] is None
    assert "bfloat16" in found["details"]["identical_outputs_reason"]
    assert found["details"]["identical_prompts"] == 2


def test_no_draft_at_all_is_an_error_not_a_figure() -> None:
    with pytest.raises(RunError, match="no draft"):
        compared({GREEDY: (run(TOKENS, 1.0, [[], []]), run(TOKENS, 1.0))})
