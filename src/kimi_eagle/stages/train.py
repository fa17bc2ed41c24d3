"""train: speculators' Eagle3 Trainer over the shards; the best checkpoint becomes `draft/`.

shards + mapping -> checkpoints in files/work-KEY (taken up again by any later attempt) -> draft.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle import files
from kimi_eagle.files import digest
from kimi_eagle.ledger import Record, Unit
from kimi_eagle.provenance import version
from kimi_eagle.stages.context import Context
from kimi_eagle.worker import Stopped

if TYPE_CHECKING:
    from kimi_eagle.worker import Attempt, Worker

FORMAT = "draft/1"


def plan(ctx: Context) -> list[Unit]:
    """One unit; its key holds the keys of the shards and the digest of the mapping."""
    shards = ctx.gate("extract")
    (mapping,) = ctx.gate("vocab")
    parts = {
        "format": FORMAT,
        "train": ctx.recipe.train.model_dump(mode="json"),
        "seed": ctx.recipe.seed,
        "shards": digest([r.key for r in shards]),
        "vocab": mapping.info["digest"],
        "speculators": version("speculators"),
        "torch": version("torch"),
    }
    tokens = sum(r.counts["tokens"] for r in shards) * ctx.recipe.train.epochs
    return [Unit(name="all", parts=parts, tokens=tokens, payload=(shards, mapping))]


def work(ctx: Context, worker: Worker) -> None:
    """Train, or go on training, then export."""
    units = plan(ctx)
    worker.ledger.write_plan(units)
    for attempt in worker.attempts(units, max_failures=1):
        with attempt:
            _train(ctx, attempt, worker)
    publish(ctx)


def _train(ctx: Context, attempt: Attempt, worker: Worker) -> None:
    """Take up the checkpoints of this key, or start; commit the exported draft."""
    from kimi_eagle.shards.reader import ShardSet
    from kimi_eagle.training import launch
    from kimi_eagle.training.export import export

    shards, mapping = attempt.unit.payload
    paths = [r.path(".safetensors") for r in shards]

    def on_progress(step: dict[str, Any]) -> None:
        worker.tokens = step["tokens"]
        worker.progress(step["step"] / max(1, step["steps"]), step["tokens"])
        worker.note(step=step["step"], total_steps=step["steps"], loss=step["loss"])

    with worker.phase("work"):
        result = launch.run(
            ctx.recipe,
            ctx.verifier,
            paths,
            order=list(ShardSet(paths)),
            d2t=mapping.path("d2t.npy"),
            t2d=mapping.path("t2d.npy"),
            workdir=worker.dir.files / f"work-{attempt.unit.key}",
            should_stop=worker.stopping,
            on_progress=on_progress,
        )
    if result.interrupted:
        raise Stopped("stop file")
    with worker.phase("export"):
        out = export(
            result.checkpoint,
            attempt.path("draft"),
            ctx.verifier,
            dtype=ctx.recipe.train.export_dtype,
        )
        curves = attempt.path("curves.jsonl")
        shutil.copyfile(result.curves, curves)
        attempt.commit(
            [*sorted(p for p in out.iterdir() if p.is_file()), curves],
            counts={"steps": result.steps, "tokens": result.tokens},
            info={"checkpoint": result.checkpoint.name, "seconds": round(result.seconds, 1)},
        )


def publish(ctx: Context) -> None:
    """Make RUN/draft hold the files of the current record (hard links, replaced as a whole)."""
    (record,) = ctx.gate("train")
    target, marker = ctx.run.draft, f"{record.key}.a{record.data['attempt']}"
    if files.read_json(target / "record.json") == marker:
        return
    fresh = files.temporary_name(target)
    fresh.mkdir()
    for source in draft_files(record):
        (fresh / source.name).hardlink_to(source)
    files.write_atomic(fresh / "record.json", files.to_json(marker))
    if target.exists():
        old = files.temporary_name(target)
        target.rename(old)
        fresh.rename(target)
        shutil.rmtree(old)
    else:
        fresh.rename(target)
    files.fsync_dir(target.parent)


def draft_files(record: Record) -> list[Path]:
    """The files of the exported draft that a record names."""
    names = [f["name"] for f in record.data["files"]]
    return [record.stage_dir.files / n for n in names if "/" in n]
