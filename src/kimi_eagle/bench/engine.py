"""The measuring process: `python -m kimi_eagle.bench.engine SPEC.json FOLDER` (see measure.py).

Loads vLLM once, makes prompts of later turns where there are any, then answers all prompts in each
case of the spec and writes one file a case. Before each case the engine is warmed up: as many
prompts as the batch holds, answered for WARM_UP_TOKENS; they are counted nowhere.

A child whose parent dies ends itself and vLLM's processes: it watches its standard input, which
only the parent holds open.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kimi_eagle.bench.measure import FORMAT, MARK, Case, Run, Spec, asked_path
from kimi_eagle.bench.workload import Workload

WARM_UP_TOKENS = 16
"""Some steps with a draft and without; kernels that are compiled at first use are, then."""
# Counters of vllm/v1/spec_decode/metrics.py (0.31.0), without their prefix.
_COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")


@dataclass(frozen=True)
class Answer:
    """One prompt's answer: its index among the prompts, and what Run holds of it."""

    index: int
    tokens: list[int]
    finish_reason: str
    histogram: list[int]
    seconds: float
    first_token_seconds: float
    token_seconds: float | None


def main(argv: list[str]) -> int:
    """SPEC.json in; FOLDER/KIND-DIGEST.json out, one a case."""
    from kimi_eagle.bench import breakdown
    from kimi_eagle.files import write_atomic

    started = time.monotonic()
    spec, folder = read_spec(Path(argv[0])), Path(argv[1])
    _end_with_parent()
    profile = breakdown.settings(spec, folder) if breakdown.wanted(spec, folder) else None
    llm = _load(spec, profile)
    load_seconds = time.monotonic() - started
    _tell(share=0.0, tokens=0, load_seconds=round(load_seconds, 2))
    if spec.workload.later:
        path = asked_path(spec, folder)
        spec = replace(spec, workload=_asked_on(llm, spec))
        write_atomic(path, json.dumps(asdict(spec.workload)).encode())
    made = 0
    for number, case in enumerate(spec.cases):

        def tell(share: float, tokens: int, before: int = number, made: int = made) -> None:
            _tell(share=(before + share) / len(spec.cases), tokens=made + tokens)

        run = _run(llm, spec, case, tell)
        made += run.output_tokens
        found = {
            "format": FORMAT,
            "digest": spec.digest(case),
            "kind": spec.kind,
            "case": asdict(case),
            "run": asdict(run),
            "load_seconds": load_seconds,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "versions": spec.versions,
            "threads": _threads(),
        }
        write_atomic(spec.path(folder, case), json.dumps(found).encode())
    if profile:
        breakdown.profiled(llm, spec, folder)
    return 0


def read_spec(path: Path) -> Spec:
    """What measure.py wrote for this process."""
    data = json.loads(path.read_text(encoding="utf-8"))
    data["workload"] = Workload(**data["workload"])
    data["cases"] = tuple(Case(**case) for case in data["cases"])
    data["profile"] = data["profile"] and Case(**data["profile"])
    return Spec(**data)


def _end_with_parent() -> None:
    """Exit when standard input ends: the parent is gone, and nobody waits for the result."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        if os.getsid(0) == os.getpid():  # as measure.py starts it: vLLM's processes are in here
            os.killpg(0, signal.SIGKILL)
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def _load(spec: Spec, profile: dict[str, Any] | None = None) -> Any:
    from kimi_eagle.capture import vllm_cpu
    from kimi_eagle.capture.settings import engine_arguments

    arguments = engine_arguments(spec.engine, Path(spec.verifier), spec.trust_remote_code)
    arguments["disable_log_stats"] = False  # the spec-decode counters are stats
    if spec.draft:
        arguments["speculative_config"] = {
            **(spec.speculative or {}),
            "model": spec.draft,
            "num_speculative_tokens": spec.k,
        }
        arguments["per_request_spec_decode_metrics"] = "summary"
    if profile:
        arguments["profiler_config"] = profile
    vllm_cpu.prepare(spec.engine)
    from vllm import LLM

    return LLM(**arguments)


def _asked_on(llm: Any, spec: Spec) -> Workload:
    """The workload with its later turns as prompts, after this engine's own answers."""
    from kimi_eagle.bench.later import with_later_turns
    from kimi_eagle.data.template import ChatTemplate
    from kimi_eagle.recipe import TemplateSection
    from kimi_eagle.verifier import open_verifier

    verifier = open_verifier(spec.verifier, trust_remote_code=spec.trust_remote_code)
    template = ChatTemplate(verifier, TemplateSection(**spec.template))
    case, most = Case(spec.engine["max_num_seqs"]), spec.workload.max_tokens

    def answer(prompts: Any) -> list[list[int]]:
        found = {a.index: a.tokens for a in _answers(llm, prompts, case, most, 0, "earlier")}
        return [found[i] for i in range(len(prompts))]

    return with_later_turns(spec.workload, answer, template, spec.engine["max_model_len"])


def _run(llm: Any, spec: Spec, case: Case, tell: Callable[[float, int], None]) -> Run:
    """Answer all prompts in one case, after its warm-up."""
    prompts, most = spec.workload.prompts, spec.workload.max_tokens
    seed = spec.engine.get("seed", 0)
    start = time.perf_counter()
    short = min(WARM_UP_TOKENS, most)
    warm = list(_answers(llm, prompts[: case.batch_size], case, short, seed, "warm-up"))
    warm_up = {
        "prompts": len(warm),
        "tokens": sum(len(a.tokens) for a in warm),
        "seconds": time.perf_counter() - start,
    }
    before, found, tokens = _counters(llm), [], 0
    start = time.perf_counter()
    for answer in _answers(llm, prompts, case, most, seed, "measured"):
        found.append(answer)
        tokens += len(answer.tokens)
        tell(len(found) / len(prompts), tokens)
    seconds, after = time.perf_counter() - start, _counters(llm)
    found.sort(key=lambda a: a.index)
    counters = {name: _difference(after[name], before[name]) for name in _COUNTERS}
    return Run(
        seconds=seconds,
        tokens=[a.tokens for a in found],
        finish_reasons=[a.finish_reason for a in found],
        counters=counters if spec.draft else None,
        histograms=[a.histogram for a in found] if spec.draft else None,
        each_seconds=[a.seconds for a in found],
        first_token_seconds=[a.first_token_seconds for a in found],
        token_seconds=[a.token_seconds for a in found],
        warm_up=warm_up,
    )


def _answers(
    llm: Any, prompts: Sequence[Any], case: Case, max_tokens: int, seed: int, label: str
) -> Iterator[Answer]:
    """Answers as they end; a free place is filled at once.

    seed: sampled requests get seed + index, so that a measurement can be made again.

    Steps the engine itself instead of `LLM.generate`, whose concurrency is max_num_seqs: one
    engine then serves all batch sizes.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    waiting = list(enumerate(prompts))[::-1]
    since: dict[int, float] = {}
    while waiting or since:
        while waiting and len(since) < case.batch_size:
            index, ids = waiting.pop()
            params = SamplingParams(
                temperature=case.temperature,
                top_p=case.top_p,
                seed=None if case.greedy else seed + index,
                max_tokens=max_tokens,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            since[index] = time.perf_counter()
            name = f"{label}-{case.batch_size}-{index}"
            engine.add_request(name, {"prompt_token_ids": list(ids)}, params)
        for output in engine.step():
            if output.finished:
                index = int(output.request_id.split("-")[-1])
                yield _answer(index, output, time.perf_counter() - since.pop(index))


def _answer(index: int, output: Any, seconds: float) -> Answer:
    """What a finished RequestOutput says (vllm/outputs.py, v1/metrics/stats.py, 0.31.0)."""
    answer, stats = output.outputs[0], output.metrics
    drafts, tokens = answer.spec_decode_metrics, list(answer.token_ids)
    after_first = stats.last_token_ts - stats.first_token_ts
    return Answer(
        index,
        tokens,
        str(answer.finish_reason),
        list(drafts.histogram) if drafts else [],
        seconds,
        stats.first_token_latency,
        after_first / (len(tokens) - 1) if len(tokens) > 1 else None,
    )


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
    print(MARK + json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
