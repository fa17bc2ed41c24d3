"""Trainings beside each other: each in a process of its own, taking turns on the same data."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def arguments(about: str, ways: Sequence[str], pairs: int) -> argparse.Namespace:
    """--steps and --pairs; --train WAY --folder DIR are what `trained` starts."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--pairs", type=int, default=pairs)
    parser.add_argument("--train", choices=ways, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def trained(script: str, way: str, folder: Path, steps: int, **env: str) -> Any:
    """One training in a new process of the bench `script`; what it gave to `tell`."""
    command = [sys.executable, script, "--train", way, "--steps", str(steps)]
    done = subprocess.run(
        [*command, "--folder", str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{way}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(done.stdout.rpartition("RESULT ")[2])


def tell(result: Any) -> None:
    """The last line of a training's process."""
    print("RESULT", json.dumps(result), flush=True)


def in_turns(ways: Sequence[str], pairs: int, once: Callable[[str], Any]) -> dict[str, list[Any]]:
    """`pairs` results of each way, the order turned round each time."""
    found: dict[str, list[Any]] = {way: [] for way in ways}
    for turn in range(pairs):
        for way in ways[:: 1 if turn % 2 else -1]:
            found[way].append(once(way))
    return found


def compared(first: Sequence[float], other: Sequence[float]) -> tuple[float, str]:
    """How many times as fast the other is, from seconds in pairs: the median, and the spread."""
    ratios = [a / b for a, b in zip(first, other, strict=True)]
    return statistics.median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"
