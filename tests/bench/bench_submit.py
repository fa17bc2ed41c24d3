"""`kimi-eagle submit` of one stage of 1,000 units with 4 workers, beside two bare sbatch calls.

    python tests/bench/bench_submit.py [--units 1000] [--runs 7]

Starts a testbed of its own (slurm/testbed) and wipes it. Every figure is the whole command in a
process of its own; the jobs may not start before an hour has passed and are cancelled. Pairs are
taken in turn, the ratio is the median of the pairs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kimi_eagle import recipe as recipes
from kimi_eagle.ledger import Ledger, Unit
from kimi_eagle.rundir import RunDir
from kimi_eagle.stages.context import recipe_digest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "tests/recipes/tiny.toml"
TESTBED = [sys.executable, str(ROOT / "slurm/testbed/testbed.py")]
GOAL_SECONDS = 2.0


def make_run(path: Path, count: int) -> None:
    """A run whose extract stage has `count` open units, planned by the recipe as it is."""
    run = RunDir(path)
    path.mkdir()
    run.spec.write_text("{}")
    ledger = Ledger(run.stage("extract").make(), recipe_digest(recipes.load(RECIPE)))
    ledger.write_plan([Unit(f"{n:05d}", {"n": n}) for n in range(count)])


def timed(argv: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--units", type=int, default=1000)
    options.add_argument("--runs", type=int, default=7)
    args = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="ke-bench-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)  # munge looks at the folders above its socket
        bed = ["--dir", f"{folder}/bed"]
        subprocess.run([*TESTBED, "up", *bed], check=True, stdout=subprocess.DEVNULL)
        os.environ["SLURM_CONF"] = f"{folder}/bed/etc/slurm.conf"
        try:
            compare(Path(folder), args.units, args.runs)
        finally:
            subprocess.run([*TESTBED, "wipe", *bed], check=True, stdout=subprocess.DEVNULL)


def compare(folder: Path, units: int, runs: int) -> None:
    """Pairs of our submit and of the two sbatch calls that it cannot do without."""
    site = folder / "site.toml"
    site.write_text('partition = "all"\nmemory = "1G"\nextra = ["--begin=now+1hour"]\n')
    bare = ["sbatch", "--begin=now+1hour", "--mem=1G", f"--output={folder}/%A", "--wrap=true"]
    ours, theirs = [], []
    for n in range(runs):
        run = folder / f"run{n}"
        make_run(run, units)
        command = [sys.executable, "-m", "kimi_eagle", "submit", str(RECIPE), "--only", "extract"]
        ours.append(timed([*command, "--site", str(site), "--run", str(run)]))
        theirs.append(timed(bare) + timed([*bare, "--array=0-2"]))
        subprocess.run(["scancel", "--me"], check=True)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    median = statistics.median(ours)
    print(f"submit, {units} units, 4 workers: {median:.2f} s (goal at most {GOAL_SECONDS:.0f} s)")
    print(f"two bare sbatch calls:            {statistics.median(theirs):.2f} s")
    print(f"ratio, median of {runs} pairs:      {ratio:.1f}")


if __name__ == "__main__":
    main()
