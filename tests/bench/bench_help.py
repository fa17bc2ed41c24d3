"""Time of `kimi-eagle --help` beside an interpreter that does nothing.

    python tests/bench/bench_help.py

Every benchmark in this folder is a script of its own: no arguments needed, prints one line for
each figure with its unit, the thing it is compared with and the ratio, and exits 1 when a stated
goal is missed. `make bench` runs them all.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 21
GOAL_SECONDS = 0.15


def median_seconds(command: list[str]) -> float:
    """Median wall time of a command over RUNS runs, after one to warm the file cache."""
    times = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> int:
    """Print both medians; 1 if the goal is missed."""
    script = Path(sys.executable).with_name("kimi-eagle")
    empty = median_seconds([sys.executable, "-c", "pass"])
    ours = median_seconds([str(script), "--help"])
    print(
        f"kimi-eagle --help: median {ours:.3f} s over {RUNS} runs (goal {GOAL_SECONDS} s); "
        f"python -c pass: {empty:.3f} s; ratio {ours / empty:.1f}"
    )
    return 0 if ours <= GOAL_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
