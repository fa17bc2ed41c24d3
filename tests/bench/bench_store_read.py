"""Random samples out of the store, beside speculators' FileTransfer and a plain copy.

    python tests/bench/bench_store_read.py [--samples 2000] [--rounds 5] [--folder DIR]

Two shapes: SmolLM2's [64..448, 4, 576] and Kimi-K2.5's [4..36, 4, 7168], of about as many bytes
(1.2 MB). Every way of reading ends with a sample's states in one torch buffer that is used again
and again, copied there by torch with all cores, as training puts its batches together:

    copy      a slice of one numpy map over all states: the limit
    raw       ShardSet.at; `proven`: with the digest compared
    lossless  ShardSet.read (two threads ahead), digests compared
    fp8       the same
    files     speculators' FileTransfer, one file a sample

Hot: all in the page cache. Cold: pages dropped (posix_fadvise) and files mapped anew before each
turn; a tenth of the samples. The ways take turns; medians over the rounds. Goals: raw at least
0.9 of copy (hot and cold) and 3 times files (hot).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from hs_connectors import FileTransfer
from safetensors.torch import save_file
from states import by_chance

from kimi_eagle.shards import ShardSet, ShardWriter
from kimi_eagle.training.tensors import bfloat16_view

SHAPES = {"smollm2": ((64, 448), 4, 576), "kimi": ((4, 36), 4, 7168)}
PER_SHARD = 1000
"""Of 256 tokens on average; the default unit of 4 million tokens would hold 15,600."""


def make(folder: Path, count: int, shape: str) -> None:
    """The same samples as shards of three codecs, one flat file, and one file a sample."""
    lengths, layers, hidden = SHAPES[shape]
    (folder / "files").mkdir(parents=True)
    samples = by_chance(count, lengths, layers, hidden)
    with open(folder / "flat.bin", "wb") as flat:
        for start in range(0, count, PER_SHARD):
            some = [next(samples) for _ in range(min(PER_SHARD, count - start))]
            for codec in ("raw", "lossless", "fp8"):
                stem = f"{codec}-{start:05d}"
                ids = list(range(layers))
                with ShardWriter(folder, stem, ids, hidden, {}, codec=codec) as writer:
                    for sample in some:
                        writer.add(*sample)
            for i, (_, states, ids, _) in enumerate(some, start):
                flat.write(states)
                tensors = {
                    "hidden_states": torch.from_numpy(states.view(np.int16)).view(torch.bfloat16),
                    "token_ids": torch.from_numpy(ids).long(),
                }
                save_file(tensors, folder / "files" / f"hs_{i}.safetensors")
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb+") as f:
                os.fsync(f.fileno())


def forget(folder: Path) -> None:
    """Drop the pages of all files from the page cache (they are on the disk already)."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as f:
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ways(folder: Path, shape: str) -> dict[str, Callable[[np.ndarray], None]]:
    """name -> read the samples of these numbers; each call opens nothing that was open before."""
    lengths, layers, hidden = SHAPES[shape]
    out = torch.empty((lengths[1], layers, hidden), dtype=torch.bfloat16)

    def opened(codec: str) -> ShardSet:
        return ShardSet(sorted(folder.glob(f"{codec}-*.safetensors")))

    counts = opened("raw").lengths.astype(np.int64)
    ends = np.cumsum(counts)

    def copy(numbers: np.ndarray) -> Iterator[None]:
        flat = np.memmap(folder / "flat.bin", np.uint16, "r").reshape(-1, layers, hidden)
        for i in numbers:
            out[: counts[i]] = bfloat16_view(flat[ends[i] - counts[i] : ends[i]])
            yield

    def raw(numbers: np.ndarray) -> Iterator[None]:
        store = opened("raw")
        for i in numbers:
            states = bfloat16_view(store.at(i)["hidden_states"])
            out[: len(states)] = states
            yield

    def proven(numbers: np.ndarray) -> Iterator[None]:
        store = opened("raw")
        for i in numbers:
            states = bfloat16_view(store.proven(i)["hidden_states"])
            out[: len(states)] = states
            yield

    def decoded(codec: str) -> Callable[[np.ndarray], Iterator[None]]:
        def run(numbers: np.ndarray) -> Iterator[None]:
            for sample in opened(codec).read(numbers, ahead=8, threads=2):
                states = bfloat16_view(sample["hidden_states"])
                out[: len(states)] = states
                yield

        return run

    def files(numbers: np.ndarray) -> Iterator[None]:
        transfer = FileTransfer(folder / "files")
        for i in numbers:
            states = transfer.get_cached(int(i))["hidden_states"]
            out[: len(states)] = states
            yield

    return {
        "copy": copy,
        "raw": raw,
        "proven": proven,
        "lossless": decoded("lossless"),
        "fp8": decoded("fp8"),
        "files": files,
    }


def rate(way: Callable[[np.ndarray], Iterator[None]], numbers: np.ndarray, first: bool) -> float:
    """Samples a second. first: with the opening (cold), else after the first sample (hot)."""
    start = time.perf_counter()
    done = 0
    for done, _ in enumerate(way(numbers), 1):
        if done == 1 and not first:
            start = time.perf_counter()
    return (done - (not first)) / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the files are made (a disk)")
    parser.add_argument("--shapes", default="smollm2,kimi")
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as training does
    fine = True
    for shape in args.shapes.split(","):
        with tempfile.TemporaryDirectory(dir=args.folder) as temp:
            folder = Path(temp)
            make(folder, args.samples, shape)
            found: dict[tuple[str, str], list[float]] = {}
            rng = np.random.default_rng(1)
            methods = ways(folder, shape)
            for way in methods.values():  # into the page cache
                list(way(np.arange(args.samples)))
            for turn in range(args.rounds):
                numbers = rng.permutation(args.samples)
                order = list(methods.items())[:: 1 if turn % 2 else -1]
                for name, way in order:
                    found.setdefault(("hot", name), []).append(rate(way, numbers, first=False))
            for turn in range(args.rounds):
                numbers = rng.permutation(args.samples)[: args.samples // 10]
                for name, way in list(methods.items())[:: 1 if turn % 2 else -1]:
                    forget(folder)
                    found.setdefault(("cold", name), []).append(rate(way, numbers, first=True))
            fine &= report(shape, found)
    return 0 if fine else 1


def report(shape: str, found: dict[tuple[str, str], list[float]]) -> bool:
    fine = True
    for heat in ("hot", "cold"):
        rates = {name: values for (h, name), values in found.items() if h == heat}
        print(f"{shape} {heat}: samples/s (median), and the median of the rounds' ratios")
        for name, values in rates.items():
            to_copy, to_files = (
                statistics.median(a / b for a, b in zip(values, rates[other], strict=True))
                for other in ("copy", "files")
            )
            print(
                f"  {name:9} {statistics.median(values):8.0f}"
                f"   to copy {to_copy:5.2f}   to files {to_files:5.2f}"
            )
            if name == "raw":
                fine &= to_copy >= 0.9 and (heat == "cold" or to_files >= 3)
    return fine


if __name__ == "__main__":
    raise SystemExit(main())
