"""Workloads, measurement and report of a draft: what it accepts and what it saves.

`suites.py` reads rows of public benchmarks and our own, `workload.py` makes token ids of them,
`later.py` of a conversation's later turns, `overlap.py` finds what was trained on. `measure.py`
runs one engine in its own process, `results.py` compares two measurements and writes
`results.json`, `groups.py` has its figures by category, `report.py` and `tables.py` write
`report.html`.
Nothing here imports torch or vllm in the calling process.
"""

from kimi_eagle.bench.results import run_benchmark

__all__ = ["run_benchmark"]
