"""Short ways to look at a run and to spoil it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1])]
from hidden_run import record_of  # noqa: E402
from kimi_eagle.data import samples  # noqa: E402
from kimi_eagle.proof import Report  # noqa: E402
from kimi_eagle.shards import Shard  # noqa: E402
from kimi_eagle.stages.context import Context  # noqa: E402

UNITS = ("00000", "00001", "00002", "00003", "00004", "00005")


def file(ctx: Context, unit: str, end: str = ".safetensors", stage: str = "extract") -> Path:
    return record_of(ctx, unit, stage).path(end)


def tokens_part(ctx: Context, unit: str) -> list[samples.Sample]:
    return samples.read_samples(file(ctx, "all", f".{unit}.tokens.parquet", "prepare"))


def found(report: Report) -> set[tuple[str, str]]:
    return {(d.stage, d.unit) for d in report.damage}


def marks(ctx: Context) -> list[str]:
    return sorted(str(p.relative_to(ctx.run.path)) for p in ctx.run.path.glob("*/damaged/*"))


def names(ctx: Context, unit: str) -> list[str]:
    return Shard(file(ctx, unit)).sample_ids


def edit(ctx: Context, unit: str, stage: str, change: Callable[[dict], None]) -> None:
    """Rewrite a record, as somebody with an editor would."""
    path = ctx.run.stage(stage).records
    (path,) = path.glob(f"{unit}.*.json")
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def swap(one: Path, other: Path) -> None:
    third = one.with_name("third")
    one.rename(third)
    other.rename(one)
    third.rename(other)


def no_json(ctx: Context) -> None:
    (path,) = ctx.run.stage("extract").records.glob("00002.*.json")
    path.write_text(path.read_text()[:100])
