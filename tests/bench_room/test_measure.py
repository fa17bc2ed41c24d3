"""Measurements: their reuse one by one, and what is told of a fault. No engine is loaded."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kimi_eagle.bench import measure as module
from kimi_eagle.bench.measure import Case, Run, Spec, measure, read, todo
from kimi_eagle.bench.workload import make_workload
from kimi_eagle.errors import RunError

CASES = (Case(1), Case(4), Case(1, 0.6, 0.9))


def spec(verifier: Path, **environment: str) -> Spec:
    return Spec(
        verifier=str(verifier),
        verifier_id="v",
        engine={"device": "cpu", "dtype": "float32", "max_num_seqs": 4},
        environment=environment,
        workload=make_workload(["a"], [[1, 2]], 4, 3),
        cases=CASES,
    )


def finish(one: Spec, folder: Path, case: Case) -> Path:
    run = Run(2.0, [[1, 2]], ["stop"], None, None, [2.0], [1.0], [1.0])
    told = {
        "format": module.FORMAT,
        "digest": one.digest(case),
        "kind": one.kind,
        "case": asdict(case),
        "run": asdict(run),
        "load_seconds": 1.0,
        "peak_memory_bytes": 3,
        "versions": {},
        "threads": 2,
    }
    path = one.path(folder, case)
    path.write_text(json.dumps(told))
    return path


def test_finished_measurements_are_taken_and_no_others(tmp_path: Path) -> None:
    one = spec(tmp_path)
    assert todo(one, tmp_path) == CASES
    paths = [finish(one, tmp_path, case) for case in CASES]
    assert len(set(paths)) == len(CASES)
    _, found = measure(one, tmp_path)
    assert [m.case for m in found] == list(CASES) and all(m.reused for m in found)
    assert found[0].run.tokens == [[1, 2]]
    assert read(paths[0], "other digest") is None
    paths[1].write_text(paths[1].read_text()[:-20])
    assert todo(one, tmp_path) == (Case(4),)


def test_only_what_is_missing_is_given_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = spec(tmp_path)
    finish(one, tmp_path, CASES[1])
    asked = []

    def child(args: list[str], *_: object) -> int:
        asked.extend(json.loads(Path(args[0]).read_text())["cases"])
        for case in (CASES[0], CASES[2]):
            finish(one, tmp_path, case)
        return 0

    monkeypatch.setattr(module, "_run_child", child)
    _, found = measure(one, tmp_path)
    assert asked == [asdict(CASES[0]), asdict(CASES[2])]
    assert [m.reused for m in found] == [False, True, False]


def test_what_was_done_before_a_fault_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = spec(tmp_path)

    def child(_args: list[str], log: Path, *_: object) -> int:
        log.write_text("")
        finish(one, tmp_path, CASES[0])
        return -9

    monkeypatch.setattr(module, "_run_child", child)
    with pytest.raises(RunError, match="killed by SIGKILL"):
        measure(one, tmp_path)
    assert todo(one, tmp_path) == CASES[1:]


def test_the_digest_is_of_the_work_not_of_names_and_places(tmp_path: Path) -> None:
    one = spec(tmp_path)
    first = one.digest(CASES[0])
    elsewhere = replace(one, verifier="/x", environment={"A": "1"}, cases=CASES[:1])
    assert elsewhere.digest(CASES[0]) == first
    assert one.digest(CASES[1]) != first != replace(one, verifier_id="w").digest(CASES[0])
    # Times of two machines are not held against each other.
    assert replace(one, machine={"cpu": "another"}).digest(CASES[0]) != first
    # The verifier alone serves any k: k and a digest with k in it do not count.
    other_k = replace(one, workload=make_workload(["b"], [[1, 2]], 4, 5))
    assert other_k.digest(CASES[0]) == first
    draft = replace(one, draft="/d", draft_digest="d", speculative={}, k=3)
    assert draft.digest(CASES[0]) not in (first, replace(draft, k=5).digest(CASES[0]))


def test_a_fault_is_told_by_the_last_meaningful_line(tmp_path: Path) -> None:
    with pytest.raises(RunError) as e:
        measure(one := spec(tmp_path, PYTHONOPTIMIZE="0"), tmp_path)
    line, log = e.value.line(), tmp_path / f"baseline-{one.digest()[:16]}.log"
    assert line.startswith(f"{log}: baseline engine failed:")
    assert "KeyError" in line  # the spec's engine lacks settings: told, not "exit code 1"
    assert todo(one, tmp_path) == CASES


def test_what_a_child_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine process that outlives the child holds its output open: nobody waits for that."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nsleep 30 &\nexit 5\n")
    program.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(program))
    start = time.monotonic()
    assert module._run_child([], tmp_path / "log", dict(os.environ), None) == 5
    assert time.monotonic() - start < 20


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
