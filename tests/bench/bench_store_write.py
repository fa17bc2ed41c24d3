"""Writing shards: raw beside a plain sequential write, lossless beside the codec libraries alone.

    python tests/bench/bench_store_write.py [--mb 1000] [--pairs 5] [--folder DIR]

raw, on a disk: ShardWriter (checks, digests, index, fsync, names) beside os.write of the same
states from the same memory into one file and fsync. Goal: 0.9.

lossless, into memory (/dev/shm), real states of SmolLM2, two threads each: ShardWriter beside

    zstd     the bare codec: byte planes and libzstd as in codecs.py, result thrown away
    blosc2   blosc2.compress2 of the same bytes (shuffle of 2 bytes, zstd 1), result thrown away
    zipnn    ZipNN.compress of the same bytes, result thrown away (where it is installed)

so the libraries neither check, digest, index nor write. Goal: 0.95 of blosc2. It takes turns; the
medians of the pairs' ratios are printed. The share of `add` that waited for the queue (the time an
engine would have been held up) is printed for a source as fast as memory and for one of 660
tokens/s, what SmolLM2 gives on two cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from states import SMOLLM2, smollm2, toy_kimi

from kimi_eagle.shards import ShardWriter, codecs

THREADS = 2


def shard(folder: Path, samples: list[np.ndarray], codec: str, pause: float = 0.0) -> float:
    """Write all samples as one shard; -> seconds that `add` was held up."""
    with ShardWriter(folder, "u", SMOLLM2, 576, {}, codec=codec, threads=THREADS) as writer:
        for i, states in enumerate(samples):
            writer.add(f"{i:032x}", states, np.zeros(len(states)), np.ones(len(states)))
            if pause:
                time.sleep(pause)
    for path in folder.iterdir():
        path.unlink()
    return writer.stalled


def plain(folder: Path, samples: list[np.ndarray]) -> None:
    fd = os.open(folder / "plain", os.O_CREAT | os.O_WRONLY)
    for states in samples:
        view = memoryview(states.reshape(-1).view(np.uint8))
        while view:
            view = view[os.write(fd, view) :]
    os.fsync(fd)
    os.close(fd)
    (folder / "plain").unlink()


def libraries() -> dict[str, Callable[[np.ndarray], int]]:
    """name -> compressed size of one sample."""
    found: dict[str, Callable[[np.ndarray], int]] = {
        "zstd": lambda x: sum(memoryview(p).nbytes for p in codecs.compress(x))
    }
    try:
        import blosc2

        found["blosc2"] = lambda x: len(
            blosc2.compress2(
                x.reshape(-1),
                codec=blosc2.Codec.ZSTD,
                clevel=1,
                filters=[blosc2.Filter.SHUFFLE],
                typesize=2,
                nthreads=1,
            )
        )
    except ImportError:
        print("blosc2 is not installed: pip install blosc2 (in a folder of its own) to see it")
    try:
        from zipnn import ZipNN

        found["zipnn"] = lambda x: len(
            ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1).compress(x.tobytes())
        )
    except ImportError:
        print("zipnn is not installed: pip install zipnn (in a folder of its own) to see it")
    return found


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def pairs(ours: Callable[[], object], theirs: Callable[[], object], count: int) -> tuple:
    """Median seconds of both, median of theirs / ours."""
    found = []
    for turn in range(count + 1):
        order = (ours, theirs) if turn % 2 else (theirs, ours)
        times = {call: seconds(call) for call in order}
        found.append((times[ours], times[theirs]))
    a, b = zip(*found[1:], strict=True)
    ratios = [y / x for x, y in zip(a, b, strict=True)]
    return statistics.median(a), statistics.median(b), statistics.median(ratios), ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    args = parser.parse_args()
    base = smollm2(8192)
    samples = base * max(1, round(args.mb * 1e6 / sum(s.nbytes for s in base)))
    total = sum(s.nbytes for s in samples) / 1e6
    fine = True
    with tempfile.TemporaryDirectory(dir=args.folder) as temp:
        folder = Path(temp)
        ours, theirs, ratio, all_ = pairs(
            lambda: shard(folder, samples, "raw"), lambda: plain(folder, samples), args.pairs
        )
        print(f"raw      {total / ours:6.0f} MB/s  plain write {total / theirs:6.0f} MB/s", end="")
        print(f"  ratio {ratio:.2f} ({min(all_):.2f} to {max(all_):.2f}), goal 0.9")
        fine &= ratio >= 0.9
    for model, some in (("SmolLM2", base), ("a toy Kimi-K2.5, weights by chance", toy_kimi(4096))):
        stored = sum(memoryview(p).nbytes for s in some for p in codecs.compress(s))
        share = stored / sum(s.nbytes for s in some)
        print(f"lossless {share:.4f} of raw on states of {model}, goal 0.72")
        fine &= share <= 0.72
    with tempfile.TemporaryDirectory(dir="/dev/shm") as temp:
        folder = Path(temp)
        pool = ThreadPoolExecutor(THREADS)
        for name, compress in libraries().items():
            ours, theirs, ratio, all_ = pairs(
                lambda: shard(folder, samples, "lossless"),
                lambda compress=compress: sum(pool.map(compress, samples)),
                args.pairs,
            )
            print(f"lossless {total / ours:6.0f} MB/s  {name:8} {total / theirs:6.0f} MB/s", end="")
            print(f"  ratio {ratio:.2f} ({min(all_):.2f} to {max(all_):.2f})")
            fine &= name != "blosc2" or ratio >= 0.95
        few = samples[:16]
        for words, pause in (("memory", 0.0), ("660 tokens/s", 512 / 660)):
            stalled = shard(folder, few, "lossless", pause)
            print(
                f"held up by the queue, a source of {words}: {stalled:.3f} s of {len(few)} samples"
            )
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
