"""A trace of torch's profiler, read: how long which kind of work took.

Reads the Chrome-trace JSON that torch writes (`*.pt.trace.json`, plain or gz): complete events
(`ph` "X") with `ts` and `dur` in microseconds, `cat`, `pid` and `tid`. Where events of a GPU are
among them (kernel, gpu_memcpy, gpu_memset) those alone count; else the operators of the CPU do
(cpu_op), each with the time that lies in no operator inside it. Imports no torch.

Kinds: communication, attention (with the writing of its cache), moe, dense (matrix products
elsewhere), rest. A kernel has the kind of its name; RULES is the one table of names, each with its
source. An operator without a kind, or of dense, has that of the operator around it: a product
inside `vllm::moe_forward` is work of the experts. Communication is so wherever it stands, and on a
GPU it holds the time that a rank waits for others, for its kernels spin until all have come.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_eagle.errors import RunError

KINDS = ("communication", "attention", "moe", "dense", "rest")
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of what runs on a GPU (Kineto, libkineto/src/ActivityType.cpp)."""
# Sources: vLLM 0.31.0 where nothing else is said (csrc/ in its repository, the rest in the wheel).
# Names in lower case, as patterns; the first that is found in a name wins.
RULES: tuple[tuple[str, str, str], ...] = (
    ("communication", r"nccl", "NCCL's ncclDevKernel_*: device_communicators/pynccl.py"),
    ("communication", r"cross_device_reduce", "csrc/custom_all_reduce.cuh"),
    ("communication", r"allreduce_prototype|quick_?reduce", "csrc/quickreduce"),
    (
        "communication",
        r"multimem_|(one|two)_shot_all_reduce",
        "torch's CUDASymmetricMemoryOps.cu: device_communicators/symm_mem.py",
    ),
    (
        "communication",
        r"allreduce_fusion|lamport|mnnvl|fused_allreduce",
        "FlashInfer's: device_communicators/flashinfer_all_reduce.py, "
        "compilation/passes/fusion/allreduce_rms_fusion.py",
    ),
    ("communication", r"deep_ep::|nvshmem|pplx", "device_communicators/all2all.py"),
    ("communication", r"memcpy ptop|dcp_a2a", "between GPUs; v1/attention/ops/dcp.py"),
    ("communication", r"c10d::|gloo:", "torch's process groups, on CPUs gloo"),
    (
        "communication",
        r"shm_(allreduce|gather|all_gather|send|recv)",
        "_custom_ops.py: device_communicators/cpu_communicator.py",
    ),
    (
        "communication",
        r"vllm::(all_reduce|all_gather|reduce_scatter)",
        "operators of distributed/parallel_state.py",
    ),
    ("moe", r"moe|topkgating|grouped_topk|topk_softmax", "csrc/moe, layers/fused_moe"),
    ("moe", r"expert|biased_topk", "layers/fused_moe/experts, _custom_ops.py (fused_experts_cpu)"),
    (
        "moe",
        r"^bmm_[a-z0-9]+_[a-z0-9]+",
        "TensorRT-LLM's grouped products: layers/fused_moe/experts/trtllm_*.py",
    ),
    (
        "attention",
        r"mla|flash_?fwd|flash::|flash_?attn|fmha|flash_attention",
        "vllm_flash_attn, FlashMLA, CUTLASS MLA, trtllm-gen: v1/attention/backends",
    ),
    (
        "attention",
        r"withpagedkvcache|withraggedkvcache|mergestates|merge_attn_states|batchprefill|batchdecode",
        "FlashInfer's: v1/attention/backends/flashinfer.py",
    ),
    (
        "attention",
        r"attention|attn|reduce_segments|_fwd_(grouped_)?kernel",
        "Triton's: v1/attention/ops; _custom_ops.py (cpu_attention_with_kv_cache)",
    ),
    ("attention", r"reshape_and_cache|concat_and_cache|kv_cache_update", "csrc/cache_kernels.cu"),
    (
        "dense",
        r"gemm|gemv|nvjet|cutlass|cublas|splitk|marlin|machete",
        "cuBLAS, CUTLASS, Marlin: model_executor/kernels/linear",
    ),
    (
        "dense",
        r"aten::(linear|addmm|mm|bmm|baddbmm|matmul)$|onednn|mkldnn|scaled_mm|packed_linear|_mm_",
        "torch's and oneDNN's products: _custom_ops.py",
    ),
)
_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern, _ in RULES)
_STEP = re.compile(r"^execute_context_(\d+)\(\d+\)_generation_(\d+)\((\d+)\)$")
"""vLLM's note around a step (v1/worker/gpu_worker.py, annotate_profile): requests and tokens."""
LONGEST = 15
"""Names told one by one."""


@dataclass(frozen=True)
class Event:
    """One complete event; times in microseconds, lane: (pid, tid)."""

    name: str
    category: str
    start: float
    duration: float
    lane: tuple[Any, Any]

    @property
    def end(self) -> float:
        """When it was over."""
        return self.start + self.duration


def kind_of(name: str) -> str:
    """The kind of a kernel or an operator by its name alone."""
    low = name.lower()
    return next((kind for kind, pattern in _COMPILED if pattern.search(low)), "rest")


def read(path: Path) -> list[Event]:
    """The complete events of a trace. RunError for a file that is none."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        found = json.loads(data)
        events = found["traceEvents"] if isinstance(found, dict) else found
        return [
            Event(
                str(e["name"]),
                str(e.get("cat", "")),
                float(e["ts"]),
                max(0.0, float(e["dur"])),
                (e.get("pid"), e.get("tid")),
            )
            for e in events
            if e.get("ph") == "X"
        ]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as e:
        raise RunError(
            f"no trace of torch's profiler: {type(e).__name__}: {e}",
            where=path,
            expected="Chrome-trace JSON",
        ) from None


def look(events: Iterable[Event]) -> dict[str, Any]:
    """What one rank's trace says.

    device: "cuda" or "cpu". steps: {number, with_prefill, requests, tokens}, by vLLM's notes;
    tokens: put through the verifier a step. seconds: {kind: own time}. wall_seconds: from the first
    event counted to the end of the last; busy_seconds: of it, time in which at least one ran.
    longest: [{name, kind, seconds, calls}]. RunError for a trace with nothing to count.
    """
    found = list(events)
    device = [e for e in found if e.category in DEVICE]
    counted = device or [e for e in found if e.category == "cpu_op"]
    if not counted:
        raise RunError(
            "the trace holds neither kernels nor operators",
            expected="a trace of torch's profiler with at least one step",
            fix="on GPUs, see whether profiling is allowed there (CUPTI)",
        )
    own = ((e.name, kind_of(e.name), e.duration) for e in device) if device else _nested(counted)
    seconds, names = dict.fromkeys(KINDS, 0.0), defaultdict(lambda: [0.0, 0])
    for name, kind, microseconds in own:
        seconds[kind] += microseconds / 1e6
        names[name, kind][0] += microseconds / 1e6
        names[name, kind][1] += 1
    longest = sorted(names.items(), key=lambda item: -item[1][0])[:LONGEST]
    wall = max(e.end for e in counted) - min(e.start for e in counted)
    return {
        "device": "cuda" if device else "cpu",
        "steps": _steps(found),
        "seconds": seconds,
        "wall_seconds": wall / 1e6,
        "busy_seconds": _covered(counted) / 1e6,
        "longest": [
            {"name": name, "kind": kind, "seconds": time, "calls": calls}
            for (name, kind), (time, calls) in longest
        ],
    }


def shares(seconds: dict[str, float]) -> dict[str, float] | None:
    """Kind -> share of the time of all kinds, 0..1; None where there is none."""
    whole = sum(seconds.values())
    return {kind: seconds[kind] / whole for kind in KINDS} if whole else None


def _nested(operators: list[Event]) -> Iterator[tuple[str, str, float]]:
    """(name, kind, own time) of each operator: without what runs inside it, in the same thread."""
    lanes: dict[Any, list[Event]] = defaultdict(list)
    for event in operators:
        lanes[event.lane].append(event)
    for lane in lanes.values():
        lane.sort(key=lambda e: (e.start, -e.duration))
        open_: list[list[Any]] = []  # [event, kind, time of its own left]
        for event in lane:
            while open_ and open_[-1][0].end <= event.start:
                yield _closed(open_.pop())
            kind = kind_of(event.name)
            if open_:
                outer = open_[-1]
                outer[2] -= min(event.duration, outer[0].end - event.start)
                if kind != "communication" and outer[1] not in ("rest", "dense"):
                    kind = outer[1]
                elif kind == "rest":
                    kind = outer[1]
            open_.append([event, kind, event.duration])
        while open_:
            yield _closed(open_.pop())


def _closed(item: list[Any]) -> tuple[str, str, float]:
    event, kind, left = item
    return event.name, kind, max(0.0, left)


def _covered(events: list[Event]) -> float:
    """Microseconds in which at least one of them ran."""
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e.start):
        total += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    return total


def _steps(events: list[Event]) -> dict[str, Any]:
    notes = [_STEP.match(e.name) for e in events if e.category == "user_annotation"]
    found = [tuple(map(int, m.groups())) for m in notes if m]
    requests, tokens = [s[1] for s in found], [s[2] for s in found]
    return {
        "number": len(found),
        "with_prefill": sum(bool(s[0]) for s in found),
        "requests": sum(requests) / len(found) if found else None,
        "tokens": sum(tokens) / len(found) if found else None,
    }
