"""train: speculators' Eagle3 Trainer over the shards; the best checkpoint becomes `draft/`.

shards + mapping -> checkpoints in files/work-KEY (taken up again by any later attempt) -> draft.
Damaged samples that training meets (work-KEY/damaged.jsonl) become marks of their extract units.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle import files
from kimi_eagle.errors import RunError
from kimi_eagle.files import digest
from kimi_eagle.ledger import Record, Unit
from kimi_eagle.provenance import version
from kimi_eagle.recipe_train import NOT_IN_KEY
from kimi_eagle.stages.context import Context
from kimi_eagle.training.draftfiles import DraftFiles
from kimi_eagle.worker import Stopped

if TYPE_CHECKING:
    from kimi_eagle.recipe import Recipe
    from kimi_eagle.shards.store import ShardSet
    from kimi_eagle.training.damage import Damage
    from kimi_eagle.worker import Attempt, Worker

FORMAT = "draft/1"
LATER = {"accumulate": 1, "parallel": "ddp"}
LATER_OF_DRAFT = {"norm_before_fc": True, "fc_norm": False, "norm_output": True}
"""Fields younger than the format: in the key where they are set, so that older drafts stay done."""
INDEX = ".index.parquet"


def plan(ctx: Context) -> list[Unit]:
    """One unit; its key holds the keys of the shards and the digest of the mapping."""
    shards = ctx.gate("extract")
    (mapping,) = ctx.gate("vocab")
    parts = {
        "format": FORMAT,
        "train": of_recipe(ctx.recipe),
        "seed": ctx.recipe.seed,
        "shards": digest([r.key for r in shards]),
        "vocab": mapping.info["digest"],
        "speculators": version("speculators"),
        "torch": version("torch"),
    }
    if start := ctx.recipe.train.from_:
        parts["from"] = DraftFiles(start).digest()
    tokens = sum(r.counts["tokens"] for r in shards) * ctx.recipe.train.epochs
    return [Unit(name="all", parts=parts, tokens=tokens, payload=(shards, mapping))]


def of_recipe(recipe: Recipe) -> dict[str, Any]:
    """The recipe's part of the key; the draft to start from has a part of its own."""
    data = recipe.train.model_dump(mode="json", exclude=NOT_IN_KEY | {"from_"})
    return _without(LATER, data) | {"draft": _without(LATER_OF_DRAFT, data["draft"])}


def _without(later: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in data.items() if k not in later or v != later[k]}


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
    from kimi_eagle.training import checkpoints, damage, launch
    from kimi_eagle.training.export import export

    shards, mapping = attempt.unit.payload
    workdir = worker.dir.files / f"work-{attempt.unit.key}"
    store = _open(ctx, shards)

    def on_progress(step: dict[str, Any]) -> None:
        worker.tokens = step["tokens"]
        worker.progress(step["step"] / max(1, step["steps"]), step["tokens"])
        told = {k: step[k] for k in ("step", "loss", "estimated_acceptance") if k in step}
        worker.note(total_steps=step["steps"], **told)

    with worker.phase("work"), _marking(ctx, shards, workdir / damage.NAME):
        result = launch.run(
            ctx.recipe,
            ctx.verifier,
            store,
            d2t=mapping.path("d2t.npy"),
            t2d=mapping.path("t2d.npy"),
            workdir=workdir,
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
        info = {"checkpoint": result.checkpoint.name, "seconds": round(result.seconds, 1)}
        if estimate := checkpoints.estimated(result.checkpoint):
            info["estimated_acceptance"] = estimate
        if skipped := sorted({d.sample for d in damage.read(workdir / damage.NAME) if d.skipped}):
            info["skipped_samples"] = skipped
        attempt.commit(
            [*sorted(p for p in out.iterdir() if p.is_file()), curves],
            counts={"steps": result.steps, "tokens": result.tokens},
            info=info,
        )


def _open(ctx: Context, shards: list[Record]) -> ShardSet:
    """The shards of these records; a damaged index is marked and raised."""
    from kimi_eagle.shards.store import ShardSet

    paths = [r.path(".safetensors") for r in shards]
    indexes = [f["xxh3"] for r in shards for f in r.data["files"] if f["name"].endswith(INDEX)]
    try:
        return ShardSet(paths, indexes)
    except RunError as e:
        # Its file, or that of its index: both begin with the unit's name and attempt.
        for record, path in zip(shards, paths, strict=True):
            if Path(e.where).name.startswith(f"{path.name.removesuffix('.safetensors')}."):
                ctx.ledger("extract").mark_damaged(record, [e.what], [])
                raise RunError(e.what, where=e.where, fix=_fix(ctx)) from None
        raise


@contextmanager
def _marking(ctx: Context, shards: list[Record], log: Path) -> Iterator[None]:
    """Mark the units of the damaged samples that `log` names when training is over, however it
    ended; a stop for damage is told as one line, whichever process met it."""
    from kimi_eagle.training import damage

    try:
        yield
    except Exception as e:
        names = {r.path(".safetensors").name for r in shards}
        met = [d for d in damage.read(log) if not d.skipped and d.shard in names]
        if met and ctx.recipe.train.on_damage == "stop":
            raise met[-1].error(_fix(ctx)) from e
        raise
    finally:
        _mark(ctx, shards, damage.read(log))


def _mark(ctx: Context, shards: list[Record], found: list[Damage]) -> None:
    """A mark for each unit with damaged samples; those of files that were made again need none."""
    for record in shards:
        name = record.path(".safetensors").name
        if own := [d for d in found if d.shard == name]:
            reasons = [f"sample {d.sample}: {d.what}" for d in own]
            ctx.ledger("extract").mark_damaged(record, reasons, [d.sample for d in own])


def _fix(ctx: Context) -> str:
    return f"kimi-eagle retry {ctx.run.path} makes that unit again"


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
