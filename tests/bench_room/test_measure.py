"""The measuring process: its end with its parent, its faults, its reuse. No engine is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from kimi_eagle.bench import measure as module
from kimi_eagle.bench.measure import Run, Spec, measure, read
from kimi_eagle.bench.workload import make_workload
from kimi_eagle.errors import RunError


def spec(verifier: Path, **environment: str) -> Spec:
    return Spec(
        verifier=str(verifier),
        verifier_id="v",
        engine={"device": "cpu", "dtype": "float32"},
        environment=environment,
        workload=make_workload(["a"], [[1, 2]], 4, 3),
        batch_sizes=(1,),
    )


def finished(one: Spec) -> str:
    run = Run(1, 2.0, [[1, 2]], ["stop"], None)
    return json.dumps(
        {
            "format": module.FORMAT,
            "spec_digest": one.digest(),
            "kind": one.kind,
            "load_seconds": 1.0,
            "measure_seconds": 2.0,
            "peak_memory_bytes": 3,
            "runs": [asdict(run)],
            "versions": {},
            "threads": 2,
        }
    )


def test_a_finished_measurement_is_taken_and_no_other(tmp_path: Path) -> None:
    one, out = spec(tmp_path), tmp_path / "m.json"
    out.write_text(finished(one))
    found = measure(one, out)
    assert found.reused and found.runs[0].tokens == [[1, 2]]
    assert found.runs[0].tokens_per_second == 1.0
    assert read(out, "other digest") is None
    out.write_text(finished(one)[:-20])
    assert read(out, one.digest()) is None


def test_a_fault_is_told_by_the_last_meaningful_line(tmp_path: Path) -> None:
    with pytest.raises(RunError) as e:
        measure(spec(tmp_path, PYTHONOPTIMIZE="0"), tmp_path / "m.json")
    line = e.value.line()
    assert line.startswith(f"{tmp_path / 'm.log'}: baseline engine failed:")
    assert "KeyError" in line  # the spec's engine lacks settings: told, not "exit code 1"
    assert not (tmp_path / "m.json").exists()


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("ok\nValueError: bad k\n  at x\nINFO shutting down\n", "ValueError: bad k"),
        ("first\nlast words\n\n", "last words"),
        ("", "no output"),
    ],
)
def test_reasons(tmp_path: Path, log: str, said: str) -> None:
    (tmp_path / "log").write_text(log)
    assert module._reason(1, tmp_path / "log") == said
    assert "SIGKILL (out of memory?)" in module._reason(-9, tmp_path / "log")


class FakeEngine:
    """Answers [request's first id] after one step, last come first served; two drafts each."""

    def __init__(self) -> None:
        self.flying: list[tuple[str, list[int]]] = []
        self.most = 0

    def add_request(self, name: str, prompt: dict, params: object) -> None:
        self.flying.append((name, prompt["prompt_token_ids"]))
        self.most = max(self.most, len(self.flying))

    def step(self) -> list:
        name, ids = self.flying.pop()
        drafts = SimpleNamespace(histogram=[1, ids[0]])
        answer = SimpleNamespace(
            token_ids=ids[:1], finish_reason="stop", spec_decode_metrics=drafts
        )
        return [SimpleNamespace(finished=True, request_id=name, outputs=[answer])]


@pytest.mark.parametrize("draft", ["/d", None])
def test_answers_and_histograms_stand_in_the_order_of_the_prompts(
    monkeypatch: pytest.MonkeyPatch, draft: str | None
) -> None:
    fake = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY=1))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **_: None))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", fake)
    llm = SimpleNamespace(llm_engine=FakeEngine(), get_metrics=lambda: [])
    workload = make_workload(["a", "b", "c"], [[7], [8], [9]], 4, 1)
    spec = {"workload": workload, "batch_sizes": [2], "draft": draft}
    run = module._run(llm, spec, 2, [])
    assert run.tokens == [[7], [8], [9]] and run.finish_reasons == ["stop"] * 3
    assert run.histograms == ([[1, 7], [1, 8], [1, 9]] if draft else None)
    assert llm.llm_engine.most == 2


def test_the_child_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from kimi_eagle.bench import measure\n"
        "measure._end_with_parent()\n"
        "time.sleep(60)\n"
    )
    package = str(Path(module.__file__).resolve().parents[2])
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, env={"PYTHONPATH": package}
    )
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=3)
    child.stdin.close()
    assert child.wait(timeout=20) == 3
