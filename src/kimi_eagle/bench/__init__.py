"""Workloads and measurement of a draft: what it accepts and what it saves.

`suites.py` reads rows of public benchmarks and our own, `workload.py` makes token ids of them,
`later.py` of a conversation's later turns, `overlap.py` finds what was trained on. `plan.py` says
which engines are loaded for which cases, `measure.py` has each measured in its own process, which
is `engine.py`. `results.py` compares the measurements and writes `results.json` (its schema stands
there): `rows.py` makes the figures of one, `intervals.py` says how sure they are, `loops.py` which
answers are left out, `groups.py` has the figures by category. `breakdown.py` records some steps
under torch's profiler, `trace.py` reads what took how long.
Nothing here imports torch or vllm in the calling process.
"""

from kimi_eagle.bench.results import run_benchmark

__all__ = ["run_benchmark"]
