"""Extraction beside plain vLLM prefill of the same batch.

    python tests/bench/bench_extract.py [--tokens 6000] [--rounds 4] [--pairs 3] [--model DIR]

Two engines with equal settings, one process each: ExtractionEngine (states in memory, handed over
one by one) and plain vLLM with the same requests (max_tokens = 1). Lengths vary between 32 and
800 tokens. The two take turns, so that a busy machine hits both alike; each round starts them
anew in the other order, because where a process's memory lies moves its matrix products by 10%
and more. The median of all pairs' ratios is printed. Goal: at most 5% over plain prefill.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kimi_eagle.recipe import EngineSection

LAYERS = (2, 15, 27, 30)
SECTION = EngineSection(max_model_len=1024)


def make(tokens: int) -> list[list[int]]:
    rng = random.Random(0)
    batch: list[list[int]] = []
    while sum(map(len, batch)) < tokens:
        batch.append([rng.randrange(100, 40000) for _ in range(rng.randrange(32, 800))])
    return batch


def serve(kind: str, model: Path, tokens: int) -> None:
    """Child: one line in, one timed batch, its seconds out."""
    from kimi_eagle.capture.engine import ExtractionEngine, GenerationEngine

    batch = make(tokens)
    if kind == "extract":
        engine = ExtractionEngine(model, SECTION, LAYERS, Path(tempfile.gettempdir()))

        def once() -> None:
            for _, states, _ in engine.extract(batch):
                del states
    else:
        engine = GenerationEngine(model, SECTION)

        def once() -> None:
            engine.generate(batch, max_tokens=1)

    with engine:
        once()  # warm-up
        print("RESULT ready", flush=True)
        for _ in sys.stdin:
            start, cpu = time.perf_counter(), time.process_time()
            once()
            seconds = time.perf_counter() - start
            print("RESULT", json.dumps([seconds, time.process_time() - cpu]), flush=True)


class Child:
    """A serving process that waits between its turns: a line in, `RESULT JSON` out."""

    def __init__(self, command: list[str]):
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def once(self) -> Any:
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return json.loads(self._answer())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> str:
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return line.removeprefix("RESULT ").strip()
        raise SystemExit(f"a child ended with {self._process.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=6_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--serve", choices=["extract", "plain"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model is None:
        from kimi_eagle.demo_model import default_path

        args.model = default_path()
    if args.serve:
        serve(args.serve, args.model, args.tokens)
        return
    total = sum(map(len, make(args.tokens)))
    walls: list[float] = []
    cpus: list[float] = []
    for number in range(args.rounds):
        kinds = ("extract", "plain") if number % 2 else ("plain", "extract")
        told = ["--model", str(args.model), "--tokens", str(args.tokens)]
        children = {
            kind: Child([sys.executable, __file__, "--serve", kind, *told]) for kind in kinds
        }
        for pair in range(args.pairs):
            order = kinds if pair % 2 else kinds[::-1]
            found = {kind: children[kind].once() for kind in order}
            walls.append(found["extract"][0] / found["plain"][0])
            cpus.append(found["extract"][1] / found["plain"][1])
            rates = {kind: total / seconds for kind, (seconds, _) in found.items()}
            print(
                f"round {number + 1}: plain {rates['plain']:.0f} tok/s, "
                f"extract {rates['extract']:.0f} tok/s, ratio of seconds {walls[-1]:.3f} "
                f"(of CPU seconds {cpus[-1]:.3f})",
                flush=True,
            )
        for child in children.values():
            child.close()
    print(
        f"median ratio extract / plain prefill: {statistics.median(walls):.3f} in seconds, "
        f"{statistics.median(cpus):.3f} in CPU seconds ({total} tokens, {len(walls)} pairs in "
        f"{args.rounds} rounds)"
    )


if __name__ == "__main__":
    main()
