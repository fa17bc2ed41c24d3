"""One measurement: one vLLM engine, with or without a draft, in a process of its own.

`measure` starts `python -m kimi_eagle.bench.measure SPEC.json OUT.json`; the child loads the
engine once and answers all prompts greedily at each batch size. A process of its own because an
in-process engine cannot be loaded twice reliably, and because its memory is then surely given
back; the price is the import of vLLM twice a benchmark (about 5 s each).

Reads the spec, writes OUT.json (atomically) and a log beside it. A child whose parent dies ends
itself: it watches its standard input, which only the parent holds open.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kimi_eagle.bench.workload import Workload
from kimi_eagle.errors import RunError

FORMAT = "measurement/2"
_MARK = "@kimi-eagle "
# Counters of vllm/v1/spec_decode/metrics.py (0.31.0), without their prefix.
_COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")

Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Spec:
    """All that makes a measurement what it is; equal digests may share a result file.

    engine: what capture.settings.settings made of the recipe's section, vLLM's version included.
    environment: variables of the child's process. speculative: vLLM's speculative_config without
    path and k, None for the baseline. verifier_id, draft_digest: contents behind the two paths;
    neither the paths nor the environment enter the digest. template: the recipe's section, with
    which the baseline makes prompts of the workload's later turns.
    """

    verifier: str
    verifier_id: str
    engine: dict[str, Any]
    environment: dict[str, str]
    workload: Workload
    batch_sizes: tuple[int, ...]
    draft: str | None = None
    draft_digest: str | None = None
    speculative: dict[str, Any] | None = None
    trust_remote_code: bool = False
    template: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """`draft` or `baseline`."""
        return "draft" if self.draft else "baseline"

    def digest(self) -> str:
        """sha256 hex; k does not enter the baseline's, so that other k can reuse it."""
        data = asdict(self) | {"format": FORMAT}
        del data["verifier"], data["draft"], data["environment"], data["template"]
        for told in ("names", "categories", "sources"):
            del data["workload"][told]
        if not self.draft:
            del data["workload"]["k"], data["workload"]["digest"]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Run:
    """All prompts answered once with at most `batch_size` in flight.

    seconds: from the first request to the last answer, prefill included. tokens, finish_reasons:
    one entry a prompt. counters: vLLM's spec-decode counters of this run, None without a draft.
    histograms: one a prompt, element j counts the drafts of which j tokens were accepted; also
    None without a draft.
    """

    batch_size: int
    seconds: float
    tokens: list[list[int]]
    finish_reasons: list[str]
    counters: dict[str, Any] | None
    histograms: list[list[int]] | None = None

    @property
    def output_tokens(self) -> int:
        """Generated tokens of all prompts."""
        return sum(len(t) for t in self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second, prefill time included."""
        return self.output_tokens / self.seconds


@dataclass(frozen=True)
class Measurement:
    """What one engine did; runs in the order of the spec's batch sizes.

    workload: what was asked, where the spec's had later turns; else None.
    """

    spec_digest: str
    kind: str
    load_seconds: float
    measure_seconds: float
    peak_memory_bytes: int
    runs: list[Run]
    versions: dict[str, str]
    threads: int
    workload: Workload | None = None
    reused: bool = False


def measure(spec: Spec, out: Path, on_progress: Progress | None = None) -> Measurement:
    """Run `spec` in a fresh process, or take `out` if it already holds this spec's result.

    out: the result file, in an existing folder; STEM.spec.json and STEM.log lie beside it.
    on_progress gets dicts from the time the engine is loaded: share (0..1 of the prompts at all
    batch sizes), tokens (generated so far). Raises RunError with the log's last meaningful line
    if the process fails.
    """
    found = read(out, spec.digest())
    if found is not None:
        return found
    from kimi_eagle.files import write_atomic

    spec_file, log = out.with_suffix(".spec.json"), out.with_suffix(".log")
    write_atomic(spec_file, json.dumps(asdict(spec)).encode())
    code = _run_child([str(spec_file), str(out)], log, _environment(spec), on_progress)
    found = read(out, spec.digest())
    if code != 0 or found is None:
        raise RunError(
            f"{spec.kind} engine failed: {_reason(code, log)}",
            where=log,
            fix="read the log; the other measurement, if done, is kept",
        )
    return Measurement(**{**vars(found), "reused": False})


def read(out: Path, digest: str) -> Measurement | None:
    """The finished measurement in `out` if it is one and its spec has this digest."""
    try:
        data = json.loads(out.read_text(encoding="utf-8"))
        if data.pop("format") != FORMAT or data["spec_digest"] != digest:
            return None
        data["runs"] = [Run(**run) for run in data["runs"]]
        data["workload"] = data.get("workload") and Workload(**data["workload"])
        return Measurement(**data, reused=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _run_child(
    args: list[str], log: Path, env: dict[str, str], on_progress: Progress | None
) -> int:
    command = [sys.executable, "-m", "kimi_eagle.bench.measure", *args]
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
        )
        try:
            for line in child.stdout:
                if not line.startswith(_MARK):
                    sink.write(line)
                    sink.flush()
                elif on_progress:
                    on_progress(json.loads(line[len(_MARK) :]))
            return child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            child.stdin.close()


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


# ------------------------------------------------------------------ the child process


def main(argv: list[str]) -> int:
    """Child: SPEC.json in, OUT.json out."""
    started = time.monotonic()
    spec_file, out = (Path(a) for a in argv)
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    spec["workload"] = Workload(**spec["workload"])
    _end_with_parent()
    llm = _load(spec)
    loaded = time.monotonic()
    _tell(share=0.0, tokens=0, load_seconds=round(loaded - started, 2))
    digest, kind, later = Spec(**spec).digest(), Spec(**spec).kind, bool(spec["workload"].later)
    if later:
        spec["workload"] = _asked_on(llm, spec)
    ready = time.monotonic()
    runs: list[Run] = []
    for size in spec["batch_sizes"]:
        runs.append(_run(llm, spec, size, runs))
    result = {
        "format": FORMAT,
        "spec_digest": digest,
        "kind": kind,
        "load_seconds": loaded - started,
        "measure_seconds": time.monotonic() - ready,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "runs": [asdict(run) for run in runs],
        "versions": spec["versions"],
        "threads": _threads(),
        "workload": asdict(spec["workload"]) if later else None,
    }
    from kimi_eagle.files import write_atomic

    write_atomic(out, json.dumps(result).encode())
    return 0


def _end_with_parent() -> None:
    """Exit when standard input ends: the parent is gone, and nobody waits for the result."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def _load(spec: dict[str, Any]) -> Any:
    from vllm import LLM

    from kimi_eagle.capture import vllm_cpu
    from kimi_eagle.capture.settings import engine_arguments

    vllm_cpu.prepare(spec["engine"])
    arguments = engine_arguments(spec["engine"], Path(spec["verifier"]), spec["trust_remote_code"])
    arguments["disable_log_stats"] = False  # the spec-decode counters are stats
    if spec["draft"]:
        arguments["speculative_config"] = {
            **spec["speculative"],
            "model": spec["draft"],
            "num_speculative_tokens": spec["workload"].k,
        }
        arguments["per_request_spec_decode_metrics"] = "summary"
    return LLM(**arguments)


def _asked_on(llm: Any, spec: dict[str, Any]) -> Workload:
    """The workload with its later turns as prompts, after this engine's own answers."""
    from kimi_eagle.bench.later import with_later_turns
    from kimi_eagle.data.template import ChatTemplate
    from kimi_eagle.recipe import TemplateSection
    from kimi_eagle.verifier import open_verifier

    verifier = open_verifier(spec["verifier"], trust_remote_code=spec["trust_remote_code"])
    template = ChatTemplate(verifier, TemplateSection(**spec["template"]))
    size, most = max(spec["batch_sizes"]), spec["workload"].max_tokens

    def answer(prompts: Any) -> list[list[int]]:
        found = {i: ids for i, ids, *_ in _answers(llm, prompts, size, most, "earlier")}
        return [found[i] for i in range(len(prompts))]

    return with_later_turns(spec["workload"], answer, template, spec["engine"]["max_model_len"])


def _run(llm: Any, spec: dict[str, Any], batch_size: int, earlier: list[Run]) -> Run:
    """Answer all prompts, at most `batch_size` in flight, after a short warm-up of that size."""
    workload = spec["workload"]
    short = min(4, workload.max_tokens)
    for _ in _answers(llm, workload.prompts[:batch_size], batch_size, short, "warm-up"):
        pass
    before = _counters(llm)
    found: dict[int, tuple[list[int], str, list[int]]] = {}
    tokens = sum(run.output_tokens for run in earlier)
    start = time.perf_counter()
    for index, ids, *rest in _answers(
        llm, workload.prompts, batch_size, workload.max_tokens, "measured"
    ):
        found[index] = (ids, *rest)
        tokens += len(ids)
        done = len(earlier) + len(found) / len(workload.prompts)
        _tell(share=done / len(spec["batch_sizes"]), tokens=tokens, batch_size=batch_size)
    seconds = time.perf_counter() - start
    after = _counters(llm)
    counters = None
    if spec["draft"]:
        counters = {name: _difference(after[name], before[name]) for name in _COUNTERS}
    ids, reasons, accepted = (list(c) for c in zip(*(found[i] for i in sorted(found)), strict=True))
    return Run(batch_size, seconds, ids, reasons, counters, accepted if spec["draft"] else None)


def _answers(llm: Any, prompts: Any, batch_size: int, max_tokens: int, label: str) -> Any:
    """Yield (index, token ids, finish reason, histogram) as answers end.

    A free place is filled at once. histogram: as in Run, [] where the engine made no draft.

    Steps the engine itself instead of `LLM.generate`, whose concurrency is max_num_seqs: one
    engine then serves all batch sizes.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine = llm.llm_engine
    waiting = list(enumerate(prompts))[::-1]
    flying = 0
    while waiting or flying:
        while waiting and flying < batch_size:
            index, ids = waiting.pop()
            name = f"{label}-{batch_size}-{index}"
            engine.add_request(name, {"prompt_token_ids": list(ids)}, params)
            flying += 1
        for output in engine.step():
            if output.finished:
                flying -= 1
                answer = output.outputs[0]
                index = int(output.request_id.split("-")[-1])
                drafts = answer.spec_decode_metrics
                accepted = list(drafts.histogram) if drafts else []
                yield index, list(answer.token_ids), str(answer.finish_reason), accepted


def _counters(llm: Any) -> dict[str, Any]:
    """vLLM's running totals; zero where a counter does not exist yet."""
    found = {m.name: m for m in llm.get_metrics()}
    totals: dict[str, Any] = {}
    for name in _COUNTERS:
        metric = found.get(f"vllm:spec_decode_{name}")
        vector = name.endswith("_per_pos")
        totals[name] = (list(metric.values) if vector else metric.value) if metric else 0
    return totals


def _difference(after: Any, before: Any) -> Any:
    if isinstance(after, list):
        return [a - b for a, b in zip(after, before or [0] * len(after), strict=True)]
    return after - before


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _tell(**event: Any) -> None:
    print(_MARK + json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
