"""Time of `kimi-eagle check` on the Kimi recipe against a stand-in of the whole checkpoint.

    python tests/bench/bench_check.py

The stand-in (tests/kimi/standin.py) has the names, shapes and sizes of the published INT4
checkpoint: 64 files, 208,550 tensors, 595 GB apparent. Compared with reading index and headers with
the standard library and nothing else, below which no check of them can fall.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "kimi"))
import standin  # noqa: E402

RUNS = 7
GOAL_SECONDS = 3.0


def seconds(command: list[str], env: dict[str, str]) -> tuple[float, float]:
    """Median wall and CPU time of a command over RUNS runs, after one to warm the file cache and
    Python's own. Where other programs compute, the first is much longer, the second a little."""
    walls, loads = [], []
    for _ in range(RUNS + 1):
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, stdout=subprocess.PIPE, env=env)
        walls.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        loads.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        if done.returncode > 1:
            sys.exit(f"{command}: exit code {done.returncode}")
    return statistics.median(walls[1:]), statistics.median(loads[1:])


BARE = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
json.loads((folder / "model.safetensors.index.json").read_bytes())
for file in folder.glob("*.safetensors"):
    with open(file, "rb") as f:
        json.loads(f.read(int.from_bytes(f.read(8), "little")))
"""

WHERE = """
import sys, time
start = time.perf_counter()
from kimi_eagle.contracts import BOUNDARIES, Facts, judge, rules
from kimi_eagle.recipe import load
facts, every = Facts(load(sys.argv[1])), list(rules().values())
print(f"imports and recipe {time.perf_counter() - start:.3f} s")
for step in ("weight_map", "opened"):
    start = time.perf_counter()
    getattr(facts.verifier, step)
    print(f"{step} {time.perf_counter() - start:.3f} s")
for boundary in BOUNDARIES:
    start = time.perf_counter()
    judge(facts, [r for r in every if r.boundary == boundary])
    print(f"rules of {boundary} {time.perf_counter() - start:.3f} s")
"""


def main() -> int:
    """Print where the time goes, then the figure; 1 if the goal is missed."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        model = standin.build(Path(folder) / "model")
        apparent = sum(p.stat().st_size for p in model.iterdir()) / 1e9
        real = sum(p.stat().st_blocks for p in model.iterdir()) * 512 / 1e6
        print(
            f"stand-in: {apparent:.0f} GB apparent, {real:.0f} MB real, "
            f"made in {time.perf_counter() - start:.1f} s"
        )
        recipe = Path(folder) / "kimi.toml"
        text = (ROOT / "jobs" / "kimi-k2.5.toml").read_text()
        recipe.write_text(text.replace('"/shared/kimi-k2.5-int4"', json.dumps(str(model))))
        assert str(model) in recipe.read_text()
        where = [sys.executable, "-c", WHERE, str(recipe)]
        print(subprocess.run(where, capture_output=True, text=True, check=True).stdout.rstrip())
        script = str(Path(sys.executable).with_name("kimi-eagle"))
        told = subprocess.run(
            [script, "check", str(recipe), "--json"], capture_output=True, text=True
        ).stdout
        print(f"rules: {json.loads(told)['counts']}")
        # Compiled once, as an installed program is, whatever this shell says of bytecode.
        env = {**os.environ, "PYTHONPYCACHEPREFIX": str(Path(folder) / "bytecode")}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        ours, ours_cpu = seconds([script, "check", str(recipe)], env)
        bare, bare_cpu = seconds([sys.executable, "-c", BARE, str(model)], env)
    print(
        f"kimi-eagle check: median {ours:.2f} s, {ours_cpu:.2f} s of CPU, over {RUNS} runs "
        f"(goal {GOAL_SECONDS:.0f} s); index and headers parsed alone: {bare:.2f} s, "
        f"{bare_cpu:.2f} s of CPU; ratio {ours_cpu / bare_cpu:.1f}"
    )
    return 0 if ours <= GOAL_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
