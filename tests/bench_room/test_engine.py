"""The measuring process: its answers, its warm-up, its end with its parent. No engine is loaded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from kimi_eagle.bench import engine as module
from kimi_eagle.bench.measure import Case, Spec, todo
from kimi_eagle.bench.workload import make_workload

WORKLOAD = make_workload(["a", "b", "c"], [[7], [8], [9]], 40, 1)


class FakeEngine:
    """Answers [request's first id] * 2 after one step, last come first served; some drafts each."""

    def __init__(self) -> None:
        self.flying: list[tuple[str, list[int]]] = []
        self.seen: list[tuple[str, SimpleNamespace]] = []
        self.most = 0

    def add_request(self, name: str, prompt: dict, params: SimpleNamespace) -> None:
        self.flying.append((name, prompt["prompt_token_ids"]))
        self.seen.append((name, params))
        self.most = max(self.most, len(self.flying))

    def step(self) -> list:
        name, ids = self.flying.pop()
        drafts = SimpleNamespace(histogram=[1, ids[0]])
        answer = SimpleNamespace(
            token_ids=ids[:1] * 2, finish_reason="stop", spec_decode_metrics=drafts
        )
        stats = SimpleNamespace(
            first_token_latency=float(ids[0]), first_token_ts=10.0, last_token_ts=10.0 + ids[0]
        )
        return [SimpleNamespace(finished=True, request_id=name, outputs=[answer], metrics=stats)]


@pytest.fixture
def llm(vllm_parameters: None) -> SimpleNamespace:
    return SimpleNamespace(llm_engine=FakeEngine(), get_metrics=lambda: [])


def spec(draft: str | None, cases: tuple[Case, ...] = (Case(2),)) -> Spec:
    engine = {"device": "cpu", "dtype": "float32", "max_num_seqs": 2, "seed": 5}
    more = {"draft_digest": "d", "k": 1} if draft else {}
    return Spec("/v", "v", engine, {}, WORKLOAD, cases, draft=draft, **more)


@pytest.mark.parametrize("draft", ["/d", None])
def test_answers_stand_in_the_order_of_the_prompts(llm: SimpleNamespace, draft: str | None) -> None:
    told: list[tuple[float, int]] = []
    run = module._run(llm, spec(draft), Case(2), lambda *t: told.append(t))
    assert run.tokens == [[7, 7], [8, 8], [9, 9]] and run.finish_reasons == ["stop"] * 3
    assert run.histograms == ([[1, 7], [1, 8], [1, 9]] if draft else None)
    assert run.first_token_seconds == run.token_seconds == [7.0, 8.0, 9.0]
    assert len(run.each_seconds) == 3 and 0 < max(run.each_seconds) <= run.seconds
    assert llm.llm_engine.most == 2
    assert told == [(pytest.approx(n / 3), 2 * n) for n in (1, 2, 3)]


def test_the_warm_up_is_short_and_counted_nowhere(llm: SimpleNamespace) -> None:
    run = module._run(llm, spec(None), Case(2), lambda *_: None)
    warm = [(n, p) for n, p in llm.llm_engine.seen if n.startswith("warm-up")]
    measured = [(n, p) for n, p in llm.llm_engine.seen if n.startswith("measured")]
    assert len(warm) == 2 and {p.max_tokens for _, p in warm} == {module.WARM_UP_TOKENS}
    assert len(measured) == 3 and {p.max_tokens for _, p in measured} == {40}
    assert {k: run.warm_up[k] for k in ("prompts", "tokens")} == {"prompts": 2, "tokens": 4}
    assert run.output_tokens == 6


def test_sampled_requests_have_seeds_of_their_own_and_greedy_ones_none(
    llm: SimpleNamespace,
) -> None:
    for case in (Case(3), Case(3, 0.6, 0.9)):
        module._run(llm, spec(None), case, lambda *_: None)
    params = [p for n, p in llm.llm_engine.seen if n.startswith("measured")]
    told = [(p.temperature, p.top_p, p.seed) for p in params]
    assert told == [(0.0, 1.0, None)] * 3 + [(0.6, 0.9, seed) for seed in (5, 6, 7)]


def test_each_case_is_a_file(
    llm: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = spec("/d", (Case(1), Case(2)))
    (tmp_path / "spec.json").write_text(json.dumps(asdict(one)))
    monkeypatch.setattr(module, "_load", lambda *_: llm)
    monkeypatch.setattr(module, "_end_with_parent", lambda: None)
    monkeypatch.setattr(module, "_threads", lambda: 2)
    events: list[dict] = []
    monkeypatch.setattr(module, "_tell", lambda **event: events.append(event))
    assert module.main([str(tmp_path / "spec.json"), str(tmp_path)]) == 0
    assert todo(one, tmp_path) == ()
    assert [e["share"] for e in events] == pytest.approx([0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])
    assert [e["tokens"] for e in events] == [0, 2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize(("alone", "code"), [(False, 3), (True, -signal.SIGKILL)])
def test_the_child_ends_when_its_parent_is_gone(alone: bool, code: int) -> None:
    """alone: with a session of its own, all of which ends."""
    program = (
        "import subprocess, time\n"
        "from kimi_eagle.bench import engine\n"
        "engine._end_with_parent()\n"
        f"subprocess.Popen(['sleep', '60' if {alone} else '0'])\n"
        "time.sleep(60)\n"
    )
    package = str(Path(module.__file__).resolve().parents[2])
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": package, "PATH": os.environ["PATH"]},
        start_new_session=alone,
    )
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=3)
    child.stdin.close()
    assert child.wait(timeout=20) == code
    started = time.monotonic()
    child.stdout.read()  # ends when nobody holds it open any more
    assert time.monotonic() - started < 20
