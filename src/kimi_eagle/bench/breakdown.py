"""Where the time of decoding goes: 64 steps of the measured engine under vLLM's torch profiler.

Reads the engine that has just done its measurements (`[benchmark] profile`), writes beside them
KIND-DIGEST.profile/: one trace a rank, as torch writes it (for Perfetto or chrome://tracing), and
breakdown.json, what `trace.py` finds in them. The profiler starts when all prompts have their first
token, so that the trace holds decoding only, and vLLM itself ends it after the steps: the engine of
several GPUs runs on its own, faster than this process looks.

Its figures are shares. The times are those of steps that are watched, longer than the measured
ones, on a CPU far longer; none of them enters the other results. That, and some 10 MB a rank on
disk, is why a recipe must ask for it. What fails here is told in the results and fails no
benchmark.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle import files
from kimi_eagle.bench import trace
from kimi_eagle.errors import KimiEagleError, RunError

if TYPE_CHECKING:
    from kimi_eagle.bench.measure import Spec

FORMAT = "breakdown/1"
STEPS = 64
_MORE = 16
"""Steps that this process looks on beyond those recorded: it may lag behind the engine."""
_TRACES = "*.pt.trace.json*"


def place(spec: Spec, folder: Path) -> Path:
    """Where the breakdown of this load lies; folder: of its measurements. The same before and after
    later turns became prompts: a load's traces go where it was told at its start."""
    asked = spec.workload
    still = replace(spec, workload=replace(asked, prompts=(), later=(), template=""))
    parts = [FORMAT, STEPS, still.digest(spec.profile), asked.digest]
    return folder / f"{spec.kind}-{files.digest(parts)[:16]}.profile"


def wanted(spec: Spec, folder: Path) -> bool:
    """Whether this load is to be profiled and was not yet."""
    return spec.profile is not None and found(spec, folder) is None


def found(spec: Spec, folder: Path) -> dict[str, Any] | None:
    """What was written of this load: see `combined`, or {"error": why there is none}. None where
    nobody asked, or nothing lies there yet."""
    if spec.profile is None:
        return None
    data = files.read_json(place(spec, folder) / "breakdown.json")
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        return None
    return data


def settings(spec: Spec, folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """vLLM's profiler_config (0.31.0, config/profiler.py). It costs nothing until the start."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(place(spec, folder)),
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
        "max_iterations": steps,
        "ignore_frontend": True,
    }


def profiled(llm: Any, spec: Spec, folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """Record the steps and write what they say; -> what `found` reads.

    llm: loaded with `settings`, idle. Prompts are the workload's first, as many as the batch holds,
    the same again where there are fewer; answers go on over their end, greedily. Adds to `combined`
    batch_size, k, context_tokens (mean prompt), asked_steps, and missing_ranks: those of which no
    trace was found, so that the figures are the others'.
    """
    target = place(spec, folder)
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob(_TRACES):
        old.unlink()
    prompts = spec.workload.prompts
    asked = [prompts[i % len(prompts)] for i in range(spec.profile.batch_size)]
    ranks = spec.engine.get("tp", 1) * spec.engine.get("pp", 1)
    try:
        _decode(llm, asked, steps, spec)
        made = sorted(target.glob(_TRACES))
        if not made:
            raise RunError("the profiler left no trace", where=target, fix="read the engine's log")
        data = combined(made) | {
            "batch_size": spec.profile.batch_size,
            "k": spec.k,
            "context_tokens": sum(map(len, asked)) / len(asked),
            "asked_steps": steps,
            "missing_ranks": max(0, ranks - len(made)),
        }
    except KimiEagleError as e:
        data = {"error": e.line()}
    except Exception as e:  # of vLLM, which raises what it likes; the measurements are done
        data = {"error": f"{type(e).__name__}: {e}"}
    _write(target, data)
    return data


def failed(spec: Spec, folder: Path, why: str) -> None:
    """Note that the process died over it: what was measured before is whole."""
    (target := place(spec, folder)).mkdir(parents=True, exist_ok=True)
    _write(target, {"error": why})


def _write(target: Path, data: dict[str, Any]) -> None:
    files.write_atomic(target / "breakdown.json", json.dumps({"format": FORMAT} | data, indent=1))


def combined(traces: Sequence[Path]) -> dict[str, Any]:
    """The ranks of one engine together.

    device, steps, wall_seconds, busy_seconds, longest: of the first rank (see trace.look).
    shares: {kind: 0..1} of the time of all kernels (on a CPU operators), mean over ranks.
    seconds: {kind: mean over ranks}. idle_share: of the wall time, in which nothing ran, of the
    first rank. communication_least: the least share of any rank; the others' may be more because
    they wait for it. ranks: [{name, trace, shares, seconds}].
    """
    ranks = []
    for path in traces:
        seen = trace.look(trace.read(path))
        name = path.name.split(".")[0]
        ranks.append({"name": name, "trace": path.name, **seen})
    first = ranks[0]
    each = [trace.shares(r["seconds"]) for r in ranks]
    if None in each:
        raise RunError("all events of a trace are empty", where=traces[each.index(None)])
    mean = {k: sum(r["seconds"][k] for r in ranks) / len(ranks) for k in trace.KINDS}
    wall, busy = first["wall_seconds"], first["busy_seconds"]
    return {
        "device": first["device"],
        "steps": first["steps"],
        "shares": {k: sum(s[k] for s in each) / len(each) for k in trace.KINDS},
        "seconds": mean,
        "wall_seconds": wall,
        "busy_seconds": busy,
        "idle_share": 1 - busy / wall if wall else None,
        "communication_least": min(s["communication"] for s in each),
        "longest": first["longest"],
        "ranks": [
            {"name": r["name"], "trace": r["trace"], "shares": s, "seconds": r["seconds"]}
            for r, s in zip(ranks, each, strict=True)
        ],
    }


def _decode(llm: Any, prompts: Sequence[Sequence[int]], steps: int, spec: Spec) -> None:
    """Prefill all, then record: at most `steps` of them, fewer where a context has no more room."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, names, begun = llm.llm_engine, [], set()
    longest = (steps + 2 * _MORE + len(prompts)) * ((spec.k or 0) + 1)
    for number, ids in enumerate(prompts):
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=max(1, min(longest, spec.engine["max_model_len"] - len(ids) - 1)),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        names.append(f"profiled-{number}")
        engine.add_request(names[-1], {"prompt_token_ids": list(ids)}, params)
    while len(begun) < len(names) and engine.has_unfinished_requests():
        begun.update(output.request_id for output in engine.step())
    llm.start_profile()
    try:
        for _ in range(steps + _MORE):
            if not engine.has_unfinished_requests():
                break
            engine.step()
    finally:
        llm.stop_profile()  # says nothing where vLLM has stopped it already
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
