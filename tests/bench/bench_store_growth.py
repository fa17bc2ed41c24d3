"""How the start of a training grows with the number of shards (sparse files).

    python tests/bench/bench_store_growth.py [--shards 100,1000,10000] [--runs 3]

Shards of 100 samples of some 2,000 tokens in Kimi-K2.5's shape: 11 GB each as it looks, a header
on the disk; indexes are real. `open` is ShardSet with the indexes' recorded digests, as training
has them; `sampler` the order of the first epoch and its packing for 8 ranks of 20,000 tokens;
`both` all that a training does before its first sample is read. The limit is to read the indexes
with pyarrow and throw them away. The fast verify of as many units is in bench_verify.py. Goal: 2 s
each at 10,000, linear.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kimi_eagle import files
from kimi_eagle.shards import ShardSet, index
from kimi_eagle.shards.layout import FORMAT, Layout, header_size, index_path
from kimi_eagle.shards.sampling import Sampling

LAYERS, HIDDEN, SAMPLES = [2, 30, 58, 61], 7168, 100
GOAL_SECONDS, GOAL_SHARDS = 2.0, 10_000


def make(folder: Path, count: int) -> list[Path]:
    rng = np.random.default_rng(0)
    meta = {"format": FORMAT, "codec": "raw", "layers": json.dumps(LAYERS)}
    meta |= {"hidden_size": str(HIDDEN), "verifier_id": "ab" * 16}
    paths = []
    for i in range(count):
        lengths = rng.integers(1_000, 3_000, SAMPLES)
        layout = Layout("raw", int(lengths.sum()), len(LAYERS), HIDDEN)
        header = layout.header(meta, header_size("raw", meta, len(LAYERS), HIDDEN))
        size = len(header) + sum(t[2] for t in layout.tensors().values())
        path = folder / f"{i:05d}.safetensors"
        with open(path, "wb") as f:
            f.write(header)
            f.truncate(size)
        rows = {
            "sample_id": [f"{i:016x}{k:016x}" for k in range(SAMPLES)],
            "start": np.cumsum(lengths) - lengths,
            "n_tokens": lengths,
            "xxh3": [rng.bytes(8).hex() for _ in range(SAMPLES)],
        }
        about = {k: meta[k] for k in ("codec", "layers", "hidden_size")}
        about |= {"tokens": str(layout.tokens), "bytes": str(size)}
        about["header_xxh3"] = files.bytes_digest(header)
        index_path(path).write_bytes(index.write(rows, about))
        paths.append(path)
    return paths


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def start_sampler(store: ShardSet) -> None:
    sampling = Sampling(store.lengths, 20_000, ranks=8, shard_of=store.shard_of, window=50)
    assert len(sampling.batches(0, rank=3)[0])


def parquet(path: Path) -> pa.Table:
    return pq.ParquetFile(pa.BufferReader(path.read_bytes())).read(use_threads=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", default="100,1000,10000")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    print(f"medians of {args.runs} runs, seconds")
    print(f"{'shards':>8} {'open':>7} {'sampler':>7} {'both':>7} {'pyarrow alone':>14}")
    found = {}
    for count in map(int, args.shards.split(",")):
        with tempfile.TemporaryDirectory() as temp:
            paths = make(Path(temp), count)
            digests = [files.file_digest(index_path(p)) for p in paths]
            store = ShardSet(paths, digests)
            assert len(store) == count * SAMPLES
            assert os.stat(paths[0]).st_blocks * 512 <= 1 << 16
            calls = (
                lambda paths=paths, digests=digests: ShardSet(paths, digests),
                lambda store=store: start_sampler(store),
                lambda paths=paths: [parquet(index_path(p)) for p in paths],
            )
            times = [[seconds(call) for call in calls] for _ in range(args.runs)]
        opened, sampler, plain = (statistics.median(t) for t in zip(*times, strict=True))
        found[count] = opened, sampler
        print(f"{count:8,} {opened:7.3f} {sampler:7.3f} {opened + sampler:7.3f} {plain:14.3f}")
    return 0 if max(found.get(GOAL_SHARDS, (0,))) <= GOAL_SECONDS else 1


if __name__ == "__main__":
    raise SystemExit(main())
