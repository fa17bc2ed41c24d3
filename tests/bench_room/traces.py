"""Traces for the tests of the breakdown: one recorded and cut short, one built as Kineto writes it.

`python traces.py TRACE.pt.trace.json.gz OUT.json.gz 2` made recorded/*.json.gz: the first steps of
a trace that `[benchmark] profile` recorded of toy Kimi on two CPU ranks (tensor parallel, float32,
batch 2, vLLM 0.31.0, torch 2.13.0), without the arguments of its events.

No GPU was at hand: `cuda` has kernel names as they stand in published profiles of vLLM on H200 and
B200, in the layout of torch 2.13.0 (Kineto, libkineto/src/output_json.cpp).
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

KEPT = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
# One decoder step in microseconds, one after another: name, duration.
STEP = (
    ("void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(c10::BFloat16*, c10::BFloat16 const*)", 5),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", 60),
    ("void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, __nv_bfloat16, 0>", 10),
    ("void flash::flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576, 64, 64, 8>>", 80),
    ("void flash::flash_fwd_splitkv_mla_combine_kernel<float, int, 512, 32>", 10),
    ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)", 200),
    ("void vllm::moe::grouped_topk_fused_kernel<float, float, int, 0>", 15),
    ("void marlin_moe_wna16::Marlin<1125899906909960l, 562949953487106l, 128, 1, 8, 4>", 255),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 315),
    ("triton_poi_fused_add_mul_0", 50),
)
SHARES = {"communication": 515, "attention": 100, "moe": 270, "dense": 60, "rest": 55}


def cuda(steps: int, *, requests: int = 4, tokens: int = 16) -> dict[str, Any]:
    """`steps` equal steps of 1000 us of kernels on stream 7, each after 250 us of nothing, and what
    else stands in such a trace: notes on both sides, calls of the runtime, operators, metadata."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "P",
         "ts": 0, "dur": steps * 1250.0},
    ]  # fmt: skip
    note = f"execute_context_0(0)_generation_{requests}({tokens})"

    def event(category: str, name: str, start: float, duration: float, tid: int, pid: int = 0):
        times = {"ts": start, "dur": duration}
        events.append({"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times})

    for step in range(steps):
        begin = 1000.0 + step * 1250
        event("user_annotation", note, begin, 200, 4242, 900)
        event("gpu_user_annotation", note, begin + 250, 1000, 7)
        event("cpu_op", "aten::mm", begin, 90, 4242, 900)
        event("cuda_runtime", "cudaGraphLaunch", begin, 80, 4242, 900)
        now = begin + 250
        for name, duration in STEP:
            event("kernel", name, now, duration, 7)
            now += duration
        events.append({"ph": "s", "id": step, "pid": 900, "tid": 4242, "ts": begin, "cat": "ac2g"})
    return {"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": events}


def trim(source: Path, target: Path, steps: int) -> None:
    """Keep what lies between the notes of the first step and of step `steps`, counted from 0."""
    events = json.loads(gzip.decompress(source.read_bytes()))["traceEvents"]
    notes = [e["ts"] for e in events if e["name"].startswith("execute_context_")]
    begin, end = min(notes), sorted(notes)[steps]
    kept = [
        {key: e[key] for key in KEPT}
        for e in events
        if e.get("ph") == "X" and begin <= e["ts"] and e["ts"] + e["dur"] <= end
    ]
    text = json.dumps({"schemaVersion": 1, "traceEvents": kept}, separators=(",", ":"))
    target.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    trim(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
