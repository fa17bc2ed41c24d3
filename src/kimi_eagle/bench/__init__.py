"""Workloads, measurement and report of a draft: what it accepts and what it saves.

`workload.py` makes token ids of held-out prompts, `measure.py` runs one engine in its own process,
`results.py` compares two measurements and writes `results.json`, `report.py` writes `report.html`.
Nothing here imports torch or vllm in the calling process.
"""

from kimi_eagle.bench.results import run_benchmark

__all__ = ["run_benchmark"]
