"""Tokens in memory -> counts -> mapping, beside speculators' own two functions.

    python tests/bench/bench_vocab.py [--tokens 4000000] [--pairs 5]

Both start from Arrow columns in memory and end with d2t and t2d for a vocabulary of 163,840 and a
draft vocabulary of 32,000. Ours: count_table + build_mapping. Theirs (0.9.0):
save_token_frequency_distribution, which writes token_freq.pt, read back, then
build_vocab_mappings_from_distribution. The two results are compared. The limit is numpy.bincount
alone over the loss tokens as one array. Runs alternate; medians of the pairs are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from speculators.train.vocab_mapping import (
    build_vocab_mappings_from_distribution,
    save_token_frequency_distribution,
)

from kimi_eagle import vocab

VOCAB, DRAFT, LENGTH = 163_840, 32_000, 1024


def make(tokens: int) -> tuple[pa.Table, Dataset, np.ndarray]:
    """The same samples as our columns, as speculators' dataset, and the loss tokens alone."""
    rng = np.random.default_rng(0)
    count = tokens // LENGTH
    ids = np.minimum(rng.zipf(1.15, count * LENGTH), VOCAB).astype(np.int32) - 1
    mask = rng.random((count, LENGTH)) < 0.7
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * LENGTH)

    def column(values: np.ndarray) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, pa.array(values.ravel()))

    ours = pa.table({"input_ids": column(ids), "loss_mask": column(mask)})
    theirs = pa.table(
        {"input_ids": column(ids.astype(np.int64)), "loss_mask": column(mask.astype(np.int64))}
    )
    return ours, Dataset(theirs).with_format("torch"), ids[mask.ravel()]


def ours(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    mapping = vocab.build_mapping(vocab.count_table(table, VOCAB), DRAFT)
    return mapping.d2t, mapping.t2d


def theirs(rows: Dataset, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    path = folder / "token_freq.pt"
    path.unlink(missing_ok=True)
    with contextlib.redirect_stderr(io.StringIO()):
        save_token_frequency_distribution(rows, path)
    freq = torch.load(path, weights_only=True)
    d2t, t2d = build_vocab_mappings_from_distribution(freq, DRAFT, VOCAB)
    return d2t.numpy(), t2d.numpy()


def timed(function, *args):
    start = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4_000_000)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    table, rows, flat = make(args.tokens)
    tokens = table.num_rows * LENGTH
    times: dict[str, list[float]] = {"ours": [], "speculators": [], "bincount": []}
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(-1, args.pairs):  # the first pair warms up
            first, mine = timed(ours, table)
            second, other = timed(theirs, rows, Path(folder))
            third, _ = timed(np.bincount, flat, None, VOCAB)
            assert all(np.array_equal(a, b) for a, b in zip(mine, other, strict=True))
            if pair >= 0:
                for name, seconds in zip(times, (first, second, third), strict=True):
                    times[name].append(seconds)
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in median.items():
        read = len(flat) if name == "bincount" else tokens
        print(f"{name:12} {seconds:8.4f} s  {read / seconds / 1e6:8.1f}M tokens/s")
    pairs = [b / a for a, b in zip(times["ours"], times["speculators"], strict=True)]
    print(
        f"ratio speculators / ours: {statistics.median(pairs):.1f} (goal >= 10; median of "
        f"{args.pairs} pairs, {min(pairs):.1f} to {max(pairs):.1f})"
    )
    print(f"ratio ours / bincount alone: {median['ours'] / median['bincount']:.2f}")


if __name__ == "__main__":
    main()
