"""Generation and extraction with the real model: closed batches, equal bytes, clear refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest

EOS = 2
MAX_TOKENS = 32


def test_answers_are_whole_and_in_order(engine_run):
    run = engine_run("generate")
    assert len(run["greedy"]) == len(run["prompts"]) == 8
    for kind in ("greedy", "sampled"):
        reasons = [r for _, r in run[kind]]
        assert set(reasons) <= {"stop", "length"}
        for ids, reason in run[kind]:
            assert (ids[-1] == EOS) == (reason == "stop")
            assert EOS not in ids[:-1]
            assert reason == "stop" or len(ids) == MAX_TOKENS
    assert [r for _, r in run["greedy"]].count("stop") >= 1
    assert run["none"] == []


def test_capital_of_france_is_in_its_own_row(engine_run, verifier_dir):
    from kimi_eagle.verifier import open_verifier

    text = open_verifier(verifier_dir).tokenizer().decode(engine_run("generate")["greedy"][0][0])
    assert "Paris" in text and text.endswith("<|im_end|>")


def test_progress_counts_every_token_once(engine_run):
    run = engine_run("generate")
    for kind in ("greedy", "sampled"):
        steps = run[kind + "_steps"]
        assert steps == sorted(steps) and len(steps) >= MAX_TOKENS
        assert steps[-1] == sum(len(ids) for ids, _ in run[kind])


@pytest.mark.campaign
def test_float32_generation_is_equal_from_run_to_run(engine_run):
    one, two = engine_run("generate"), engine_run("generate-2")
    assert one["again"] == [ids for ids, _ in one["greedy"]]
    assert one["greedy"] == two["greedy"] and one["sampled"] == two["sampled"]


def test_each_request_has_its_own_seed(engine_run):
    run = engine_run("generate")
    sampled = [ids for ids, _ in run["sampled"]]
    assert run["alone"] == sampled[2]
    assert sum(a != b[:16] for a, b in zip(run["other_seeds"], sampled, strict=True)) >= 6
    assert sum(a != b for (a, _), b in zip(run["greedy"], sampled, strict=True)) >= 6


def test_answer_ends_where_the_engine_ends(engine_run):
    """A prompt that leaves less room than max_tokens is answered as far as the room goes."""
    run = engine_run("generate")
    assert len(run["long_prompt"][0]) == 240
    assert 0 < run["room"][0] <= 256 - 240


def test_generation_refusals(engine_run):
    run = engine_run("generate")
    long, empty, unknown, unseeded = run["errors"]
    assert long[0] == "RunError" and "256 tokens; expected 1 to 255" in long[1]
    assert "0 tokens" in empty[1]
    assert "batch row 1" in unknown[1] and "49152" in unknown[1]
    assert unseeded == ["UsageError", "sampling needs one seed for each prompt"]
    assert run["after"] == [ids[:8] for ids, _ in run["greedy"][:2]]
    assert "closed" in run["closed"][1]


def test_no_processes_of_its_own(engine_run, memory_run):
    assert engine_run("generate")["children"] == []
    assert memory_run["children"] == []


def test_extraction_gives_every_row_in_order(memory_run, written):
    assert memory_run["hand_over"] == "memory"
    sizes = [len(ids) for ids in written["ids"]]
    assert [s[:3] for s in memory_run["seen"]] == [
        [i, [n, 4, 576], "torch.bfloat16"] for i, n in enumerate(sizes)
    ]
    assert memory_run["progress"] == [sum(sizes[: i + 1]) for i in range(len(sizes))]
    assert memory_run["none"] == []


def test_extraction_edges(memory_run):
    """One token, and as many as the engine takes (max_model_len - 1)."""
    assert memory_run["edges"] == [[1, 4, 576], [511, 4, 576], [2, 4, 576]]


def test_extraction_bytes_are_equal_from_run_to_run(engine_run, memory_run):
    """Between batches, processes and ways of hand-over, and after a batch was left half-way."""
    digests = {*memory_run["digests"], *engine_run("file")["digests"]}
    assert len(digests) == 1
    assert memory_run["after_leaving"] in digests
    assert engine_run("file")["after_leaving"] in digests


def test_file_hand_over_leaves_no_files(engine_run, memory_run):
    run = engine_run("file")
    assert run["hand_over"] == "file" and run["seen"] == memory_run["seen"]
    assert run["edges"] == memory_run["edges"]
    assert run["spooled"] == [] and run["spool_left"] == []
    assert memory_run["spool_left"] == []


def test_extraction_refusals(memory_run):
    long, unknown = memory_run["errors"]
    assert "512 tokens; expected 1 to 511" in long[1]
    assert "batch row 1" in unknown[1] and "49152" in unknown[1]
    assert memory_run["still"] == 1


def test_what_cannot_be_opened(engine_run):
    broken, unsorted, beyond = engine_run("faults")["errors"]
    assert broken[0] == "RunError" and "did not load" in broken[1] and "broken" in broken[1]
    assert unsorted[0] == "UsageError" and "ascending" in unsorted[1]
    assert beyond[0] == "UsageError" and "no layer 31; expected ids 0 to 30" in beyond[1]


@pytest.mark.parametrize("name", ["kimi_eagle.capture.engine", "kimi_eagle.capture.probe"])
def test_light_import(name):
    heavy = "{'torch', 'vllm', 'transformers'}"
    code = f"import sys, {name}; sys.exit(bool({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
