"""`kimi-eagle verify` of runs with many units, without reading a sample: time and growth.

    python tests/bench/bench_verify.py [--units 100,1000,10000] [--runs 3]

A finished run whose extract stage has so many units of 1,000 tokens of SmolLM2. Indexes, headers
and records are real, the states sparse; prepare's parts are links to one file. `check` is
`proof.verify` in this process and `cpu` its CPU seconds (of one core; less than the time on a busy
machine), `survey` the part of it that plans all stages, and `command` the
whole command in a process of its own, with the tokenizer. The limit is a stat of every file.
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
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
import hidden_run  # noqa: E402
from kimi_eagle import files, proof  # noqa: E402
from kimi_eagle.shards import ShardWriter, index  # noqa: E402
from kimi_eagle.shards.layout import PAGE, index_path  # noqa: E402
from kimi_eagle.stages import module  # noqa: E402
from kimi_eagle.stages.context import Context, open_context, recipe_digest  # noqa: E402
from kimi_eagle.survey import survey  # noqa: E402
from kimi_eagle.worker import Worker  # noqa: E402

GOAL_SECONDS, GOAL_UNITS = 2.0, 10_000
SAMPLES, TOKENS = 10, 1_000


def make_run(folder: Path, count: int) -> Path:
    """A finished run with `count` units of extract."""
    ctx = hidden_run.started(folder)
    prepare(ctx, count)
    redo_vocab(ctx)
    template, columns, meta = one_shard(ctx, folder)
    size = template.stat().st_size
    head = template.read_bytes()[:PAGE]
    units = module("extract").plan(ctx)
    with Worker(ctx.run.stage("extract"), recipe_digest=recipe_digest(ctx.recipe)) as worker:
        worker.ledger.write_plan(units)
        for unit in units:
            with hidden_run.Attempt(worker, unit, 3) as attempt:
                paths = [attempt.path("safetensors"), attempt.path("index.parquet")]
                paths[0].write_bytes(head)
                os.truncate(paths[0], size)
                ids = [f"{unit.name}{i:027x}" for i in range(SAMPLES)]
                paths[1].write_bytes(index.write(columns | {"sample_id": ids}, meta))
                info = {"probe": {"agreement": 1.0, "positions": 640}}
                counts = {"samples": SAMPLES, "tokens": TOKENS}
                digests = {paths[0]: (meta["header_xxh3"], "header")}
                attempt.commit(paths, counts=counts, info=info, digests=digests)
    hidden_run.finish(ctx)
    return ctx.run.path


def one_shard(ctx: Context, folder: Path) -> tuple[Path, dict, dict]:
    """A real shard, the columns and the metadata of its index: all others differ in ids alone."""
    layers, hidden = ctx.recipe.extract.layers, ctx.verifier.hidden_size
    states = np.zeros((TOKENS // SAMPLES, len(layers), hidden), np.uint16)
    with ShardWriter(folder, "one", layers, hidden, {"verifier_id": ctx.verifier.id()}) as writer:
        for i in range(SAMPLES):
            writer.add(f"{i:032x}", states, [0] * len(states), [0] * len(states))
    found = index.read(index_path(writer.path))
    columns = {k: list(v) for k, v in found.columns.items()}
    columns["xxh3"] = found.digests
    return writer.path, columns, dict(found.meta)


def prepare(ctx: Context, count: int) -> None:
    """prepare's record again, with `count` parts."""
    old = hidden_run.record_of(ctx, "all", "prepare")
    part = old.path(".00000.tokens.parquet")
    ctx.ledger("prepare").set_aside(old, "bench")
    with Worker(ctx.run.stage("prepare")) as worker:
        for attempt in worker.attempts(module("prepare").plan(ctx)):
            with attempt:
                paths, digest = [], files.file_digest(part)
                for i in range(count):
                    paths.append(attempt.path(f"{i:05d}.tokens.parquet"))
                    paths[-1].hardlink_to(part)
                info = {
                    "parts": [
                        {
                            "name": f"{i:05d}", "samples": SAMPLES, "tokens": TOKENS,
                            "loss_tokens": 1, "digest": f"{i:032x}",
                        }
                        for i in range(count)
                    ]
                }  # fmt: skip
                digests = dict.fromkeys(paths, (digest, None))
                counts = {"samples": count * SAMPLES, "loss_tokens": 1}
                attempt.commit(paths, counts=counts, info=info, digests=digests)


def redo_vocab(ctx: Context) -> None:
    """vocab's record again, of the new parts; the files are the old ones."""
    (old,) = ctx.ledger("vocab").records_of("all")
    with Worker(ctx.run.stage("vocab")) as worker:
        for attempt in worker.attempts(module("vocab").plan(ctx)):
            with attempt:
                paths = []
                for entry in old.data["files"]:
                    paths.append(attempt.path(entry["name"].split(".", 2)[2]))
                    paths[-1].hardlink_to(old.stage_dir.files / entry["name"])
                attempt.commit(paths, counts=old.counts, info=old.info)


def seconds(call) -> float:  # noqa: ANN001
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def stats(run: Path) -> None:
    for stage in ("prepare", "extract"):
        with os.scandir(run / stage / "files") as entries:
            assert all(e.stat().st_size >= 0 for e in entries)


def shown(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", default="100,1000,10000")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    print(f"medians of {args.runs} runs, seconds")
    print(f"{'units':>8} {'check':>7} {'cpu':>7} {'survey':>7} {'command':>8} {'stat':>7}")
    found = {}
    for count in map(int, args.units.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            # Making them durable would take most of the time, and is not what is measured.
            with mock.patch.object(os, "fsync", lambda fd: None):
                run = make_run(Path(folder), count)
            ctx, times = open_context(run), []
            survey(ctx)  # tokenizer and model headers are read once
            command = [sys.executable, "-m", "kimi_eagle", "verify", str(run)]
            for _ in range(args.runs):
                report, cpu = [], time.process_time()
                check = seconds(lambda ctx=ctx, report=report: report.append(proof.verify(ctx)))
                cpu = time.process_time() - cpu
                planned = seconds(lambda ctx=ctx: survey(ctx))
                whole = seconds(lambda command=command: shown(command))
                times.append((check, cpu, planned, whole, seconds(lambda run=run: stats(run))))
                rows = {r.stage: r for r in report[0].rows}
                assert not report[0].damage and rows["extract"].ok == count
                assert rows["benchmark"].ok == 1
        check, cpu, planned, whole, plain = (statistics.median(t) for t in zip(*times, strict=True))
        found[count] = check
        print(f"{count:8,} {check:7.3f} {cpu:7.3f} {planned:7.3f} {whole:8.3f} {plain:7.3f}")
    most, least = max(found), min(found)
    more = (found[most] - found[least]) / max(1, most - least) * 1000
    print(f"each further 1,000 units: {more:.3f} s; goal {GOAL_SECONDS} s at {GOAL_UNITS:,}")
    return 0 if found.get(GOAL_UNITS, 0) <= GOAL_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
