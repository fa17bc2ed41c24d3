"""A job in the image beside the same job without: start of a process, and tokens a second.

    python tests/bench/bench_container.py [--image FILE] [--tokens 6000] [--rounds 4] [--pairs 3]

The image is the CPU image of this checkout, built if needed, or FILE. Start: the run's own start.sh
around /bin/true, median of 15, as whoever runs this. Tokens a second: vLLM prefill of one batch in
two processes, one inside and one outside, which take turns, so that a busy machine hits both alike;
each round starts them anew in the other order. The Python outside is this one, with the packages of
the same lock. Goals: at most 0.5 s a start, at least 0.98 of the tokens a second.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there by itself in the image
from bench_extract import SECTION, Child, make  # noqa: E402

from kimi_eagle.containers.exec import ExecSettings, Mount, node_script  # noqa: E402

HERE = Path(__file__).resolve().parent


def serve(model: str, tokens: int) -> None:
    """Child: one line in, one timed batch, its seconds out."""
    from kimi_eagle.capture.engine import GenerationEngine

    batch = make(tokens)
    with GenerationEngine(Path(model), SECTION) as engine:
        engine.generate(batch, max_tokens=1)  # warm-up
        print("RESULT 0", flush=True)
        for _ in sys.stdin:
            start = time.perf_counter()
            engine.generate(batch, max_tokens=1)
            print("RESULT", time.perf_counter() - start, flush=True)


def start_seconds(image: str, folder: Path, runs: int) -> float:
    script = folder / "true.sh"
    script.write_text(node_script(ExecSettings(image=image), ["/bin/true"]))
    seconds = []
    for _ in range(runs):
        before = time.perf_counter()
        subprocess.run(["bash", str(script)], check=True)
        seconds.append(time.perf_counter() - before)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image")
    parser.add_argument("--tokens", type=int, default=6_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--model")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.model, args.tokens)
        return
    from kimi_eagle.demo_model import default_path

    model = args.model or str(default_path())
    if args.image is None:
        sys.path.insert(0, str(HERE.parent / "containers_room"))
        from stack import stack_image

        args.image = str(stack_image())
    with tempfile.TemporaryDirectory(prefix="ke-bench-", dir="/tmp") as name:
        folder = Path(name)
        print(f"start of a process: {start_seconds(args.image, folder, 15):.2f} s (median of 15)")
        mounts = tuple(Mount(path, path) for path in (model, str(HERE)))
        script = folder / "python.sh"
        script.write_text(node_script(ExecSettings(image=args.image, mounts=mounts), ["python"]))
        compare({"inside": ["bash", str(script)], "outside": [sys.executable]}, model, args)


def compare(programs: dict[str, list[str]], model: str, args: argparse.Namespace) -> None:
    total, ratios = sum(map(len, make(args.tokens))), []
    for number in range(args.rounds):
        kinds = ("inside", "outside") if number % 2 else ("outside", "inside")
        told = [__file__, "--serve", "--model", model, "--tokens", str(args.tokens)]
        children = {kind: Child([*programs[kind], *told]) for kind in kinds}
        for pair in range(args.pairs):
            order = kinds if pair % 2 else kinds[::-1]
            found = {kind: total / children[kind].once() for kind in order}
            ratios.append(found["inside"] / found["outside"])
            print(
                f"round {number + 1}: outside {found['outside']:.0f} tok/s,"
                f" inside {found['inside']:.0f} tok/s, ratio {ratios[-1]:.3f}",
                flush=True,
            )
        for child in children.values():
            child.close()
    print(
        f"median ratio inside / outside: {statistics.median(ratios):.3f} in tokens a second"
        f" ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} pairs in {args.rounds} rounds)"
    )


if __name__ == "__main__":
    main()
