"""Measurements: one vLLM engine, with or without a draft, in a process of its own.

`measure` starts `python -m kimi_eagle.bench.engine SPEC.json FOLDER`; the child loads the engine
once and answers all prompts in each case (batch size, sampling). Each case is one measurement and
one file, written as soon as it is whole: a benchmark that was killed does only the rest. A process
of its own because an in-process engine cannot be loaded twice reliably, and because its memory is
then surely given back; the price is the import of vLLM once a load (about 5 s).

Writes FOLDER/{draft,baseline}-DIGEST.json, one a measurement, FOLDER/workload-DIGEST.json where
prompts have later turns, and a spec and a log beside them, one a load.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kimi_eagle.bench.loops import find_loop
from kimi_eagle.bench.workload import Workload
from kimi_eagle.errors import RunError

FORMAT = "measurement/3"
MARK = "@kimi-eagle "
"""A line of the child's output that starts so is an event (JSON), not a line for the log."""

Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Case:
    """How prompts are answered: at most `batch_size` in flight, greedily at temperature 0."""

    batch_size: int
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        """Whether the same tokens are to be expected each time."""
        return self.temperature == 0.0

    def __str__(self) -> str:
        """For a person: `batch 16`, `batch 1, temperature 0.6, top-p 0.95`."""
        how = "" if self.greedy else f", temperature {self.temperature:g}, top-p {self.top_p:g}"
        return f"batch {self.batch_size}{how}"


@dataclass(frozen=True)
class Spec:
    """One engine load, and all that makes its measurements what they are.

    engine: what capture.settings.settings made of the recipe's section, vLLM's version included.
    environment: variables of the child's process. machine: what times depend on (plan.machine); in
    the digest, lest a benchmark that goes on elsewhere hold one machine's times against another's.
    speculative: vLLM's speculative_config without path and k, None for the baseline. verifier_id,
    draft_digest: contents behind the two paths; neither the paths nor the environment enter a
    digest. k: draft tokens a step, None for the baseline, which serves every k. template: the
    recipe's section, with which the baseline makes prompts of the workload's later turns. profile:
    the case of which breakdown.py records some steps after the measurements, None for none; in no
    digest, for it changes no measurement.
    """

    verifier: str
    verifier_id: str
    engine: dict[str, Any]
    environment: dict[str, str]
    workload: Workload
    cases: tuple[Case, ...]
    draft: str | None = None
    draft_digest: str | None = None
    speculative: dict[str, Any] | None = None
    k: int | None = None
    trust_remote_code: bool = False
    template: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    profile: Case | None = None

    @property
    def kind(self) -> str:
        """`draft` or `baseline`."""
        return "draft" if self.draft else "baseline"

    def digest(self, case: Case | None = None) -> str:
        """sha256 hex of a measurement; of the load where no case is given."""
        data = asdict(self) | {"format": FORMAT, "cases": case and asdict(case)}
        del data["verifier"], data["draft"], data["environment"], data["template"], data["profile"]
        for told in ("names", "categories", "sources", "k", "digest"):
            del data["workload"][told]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def path(self, folder: Path, case: Case) -> Path:
        """Where this measurement lies."""
        return folder / f"{self.kind}-{self.digest(case)[:16]}.json"


@dataclass(frozen=True)
class Run:
    """All prompts answered once, in one case. Lists have one entry a prompt; times are seconds.

    seconds: from the first request to the last answer, prefill included. counters: vLLM's
    spec-decode counters of this run, None without a draft. histograms: element j counts the drafts
    of which j tokens were accepted; also None without a draft. each_seconds: from the request to
    its whole answer, by our clock. first_token_seconds: to the first token, by vLLM's
    (RequestStateStats.first_token_latency, its own time-to-first-token metric).
    token_seconds: a token after the first, mean of the answer, None for an answer of one token.
    warm_up: what was answered before and is counted nowhere: prompts, tokens, seconds.
    """

    seconds: float
    tokens: list[list[int]]
    finish_reasons: list[str]
    counters: dict[str, Any] | None = None
    histograms: list[list[int]] | None = None
    each_seconds: list[float] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    token_seconds: list[float | None] = field(default_factory=list)
    warm_up: dict[str, Any] = field(default_factory=dict)

    @property
    def output_tokens(self) -> int:
        """Generated tokens of all prompts."""
        return sum(len(t) for t in self.tokens)

    @cached_property
    def loops(self) -> list[dict[str, int] | None]:
        """Of each answer its loop, None where it is none (loops.find_loop)."""
        return [find_loop(answer) for answer in self.tokens]


@dataclass(frozen=True)
class Measurement:
    """One case of one engine. load_seconds, peak_memory_bytes: of the process that measured it."""

    digest: str
    kind: str
    case: Case
    run: Run
    load_seconds: float
    peak_memory_bytes: int
    versions: dict[str, str]
    threads: int
    reused: bool = False


def measure(
    spec: Spec, folder: Path, on_progress: Progress | None = None
) -> tuple[Spec, list[Measurement]]:
    """Measure the cases of `spec` that `folder` does not hold yet, all in one fresh process.

    -> the spec as it was measured (its workload with later turns as prompts) and one measurement a
    case, in order. folder: exists. on_progress gets dicts from the time the engine is loaded: share
    (0..1 of what this process has to do), tokens (generated so far). Raises RunError with the log's
    last meaningful line if the process ends before its last case; those that were whole are kept.
    """
    from kimi_eagle.bench import breakdown
    from kimi_eagle.files import write_atomic

    asked = asked_path(spec, folder)
    told = _asked(spec, asked)
    missing = todo(told, folder)
    if not missing and not breakdown.wanted(told, folder):
        return told, [_found(told, folder, case, before=True) for case in told.cases]
    stem = folder / f"{spec.kind}-{spec.digest()[:16]}"
    spec_file, log = stem.with_suffix(".spec.json"), stem.with_suffix(".log")
    write_atomic(spec_file, json.dumps(asdict(replace(told, cases=missing))).encode())
    code = _run_child([str(spec_file), str(folder)], log, _environment(spec), on_progress)
    told = _asked(spec, asked)
    found = [_found(told, folder, case, before=case not in missing) for case in spec.cases]
    if None not in found and breakdown.wanted(told, folder):
        breakdown.failed(told, folder, f"the engine died: {_reason(code, log)}")
    if None in found:
        raise RunError(
            f"{spec.kind} engine failed: {_reason(code, log)}",
            where=log,
            fix="read the log; measurements that were done are kept",
        )
    return told, found


def todo(spec: Spec, folder: Path) -> tuple[Case, ...]:
    """The cases that `folder` does not hold."""
    if spec.workload.later:  # what will be asked is not known yet
        return spec.cases
    return tuple(c for c in spec.cases if read(spec.path(folder, c), spec.digest(c)) is None)


def read(path: Path, digest: str) -> Measurement | None:
    """The measurement in `path` if it is one and has this digest."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format") != FORMAT or data["digest"] != digest:
            return None
        data["case"], data["run"] = Case(**data["case"]), Run(**data["run"])
        return Measurement(**data, reused=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def asked_path(spec: Spec, folder: Path) -> Path:
    """Where the child puts a workload whose later turns it has made prompts of."""
    return folder / f"workload-{spec.digest()[:16]}.json"


def _asked(spec: Spec, path: Path) -> Spec:
    """The spec with later turns as prompts, as soon as the verifier's answers are known."""
    if not spec.workload.later:
        return spec
    try:
        found = Workload(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return spec
    return replace(spec, workload=found)


def _found(spec: Spec, folder: Path, case: Case, *, before: bool) -> Measurement | None:
    found = read(spec.path(folder, case), spec.digest(case))
    return found and replace(found, reused=before)


def _run_child(
    args: list[str], log: Path, env: dict[str, str], on_progress: Progress | None
) -> int:
    """Exit code of the child, which has a session of its own: vLLM's engine and workers are other
    processes on GPUs, outlive a child that is killed, and hold its output open and the memory."""
    command = [sys.executable, "-m", "kimi_eagle.bench.engine", *args]
    with log.open("w", encoding="utf-8") as sink:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=_end_with, args=(child,), daemon=True).start()
        try:
            for line in child.stdout:
                if not line.startswith(MARK):
                    sink.write(line)
                    sink.flush()
                elif on_progress:
                    on_progress(json.loads(line[len(MARK) :]))
            return child.wait()
        finally:
            if child.poll() is None:
                child.kill()
            _end_with(child)
            child.stdin.close()


def _end_with(child: subprocess.Popen[str]) -> None:
    """Wait for the child, then end what is left of its session."""
    child.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _environment(spec: Spec) -> dict[str, str]:
    """The child's environment: ours, the engine's, and the package found where it is here."""
    env = os.environ | spec.environment
    package = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(p for p in (package, env.get("PYTHONPATH")) if p)
    return env


def _reason(code: int, log: Path) -> str:
    """Why the child failed, in one line: the signal, or the last line that names an error."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    lines = [line.strip() for line in log.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception|Interrupt)\b\s*:", line)]
    text = (errors or lines or ["no output"])[-1]
    return text if len(text) <= 400 else text[:400] + " ..."
