"""Two ranks on a CPU: the states of one rank within rounding, one rank alone writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kimi_eagle.toy import reference

SCRIPT = Path(__file__).with_name("tp_run.py")
PROMPTS = Path(__file__).resolve().parents[2] / "jobs/data/prompts.jsonl"


@pytest.mark.campaign
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_ranks(toy_dir: Path, tmp_path: Path, child, capsys) -> None:
    from safetensors.torch import load_file

    from kimi_eagle.verifier import open_verifier

    tokenizer = open_verifier(toy_dir).tokenizer()
    lines = PROMPTS.read_text().splitlines()[:8]
    batch = [tokenizer(json.loads(line)["prompt"] * 3)["input_ids"] for line in lines]
    (tmp_path / "batch.json").write_text(json.dumps(batch))
    for tp in (1, 2):
        child(SCRIPT, toy_dir, tmp_path / "batch.json", tp, tmp_path)
    one, two = (load_file(tmp_path / f"{tp}.safetensors") for tp in (1, 2))
    assert set(one) == set(two) == {str(i) for i in range(len(batch))}
    distances = [reference.relative(two[k], one[k]) for k in one]
    logs = {p.name: p.read_text().split() for p in (tmp_path / "watch-2").iterdir()}
    told = json.loads((tmp_path / "2.json").read_text())
    with capsys.disabled():
        print(f"\nTP 2 against TP 1: relative L2 {min(distances):.4f} to {max(distances):.4f}")
        print("  ranks:", {k: {w: v.count(w) for w in set(v)} for k, v in logs.items()}, told)
    assert max(distances) <= 0.05
    assert len(logs) == 2  # both ranks were asked for every request
    assert sorted(v.count("called") for v in logs.values()) == [len(batch)] * 2
    assert sorted(v.count("wrote") for v in logs.values()) == [0, len(batch)]
    assert told["left"] == []
    assert told["bind"]["VLLM_CPU_OMP_THREADS_BIND"].count("|") == 1
