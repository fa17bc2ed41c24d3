"""A run with hidden states, made without vLLM: what the tests of proof and damage share.

prepare and vocab are the real stages; the states are drawn, and written by the real writer and
worker under the real keys; train and benchmark are records with files of the real shape.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from kimi_eagle.data import samples  # noqa: E402
from kimi_eagle.ledger import Record  # noqa: E402
from kimi_eagle.recipe import load  # noqa: E402
from kimi_eagle.rundir import create_run, follow  # noqa: E402
from kimi_eagle.shards import ShardWriter  # noqa: E402
from kimi_eagle.stages import module, train  # noqa: E402
from kimi_eagle.stages.context import Context, open_context, recipe_digest  # noqa: E402
from kimi_eagle.worker import Attempt, Worker  # noqa: E402

TINY = ROOT / "tests/recipes/tiny.toml"
ROWS = 12


def recipe_file(folder: Path, codec: str = "raw") -> Path:
    """The tiny recipe on conversations whose answers are given."""
    folder.mkdir(exist_ok=True)
    turns = ("human", "How much is {0} and {0}?"), ("gpt", "{0} and {0} is {1}, not {2} or {3}.")
    rows = [
        # Numbers of two digits: all samples have equal lengths, all shards equal sizes.
        {
            "conversations": [
                {"from": w, "value": t.format(i, 2 * i, i + 1, i + 2)} for w, t in turns
            ]
        }
        for i in range(10, 10 + ROWS)
    ]
    (folder / "given.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    text = TINY.read_text().replace("../../jobs/data/prompts.jsonl", str(folder / "given.jsonl"))
    text = text.replace("../../", f"{ROOT}/")
    text = text.replace("[regenerate]", "[regenerate]\nenabled = false")
    text = text.replace("unit_tokens = 240", "unit_tokens = 140")
    text = text.replace("[extract]", f'[extract]\ncodec = "{codec}"')
    path = folder / "tiny.toml"
    path.write_text(text)
    return path


def started(folder: Path, codec: str = "raw") -> Context:
    """A run in folder/run whose prepare and vocab are done."""
    path = recipe_file(folder, codec)
    recipe, run = load(path), create_run(folder / "run")
    follow(run, recipe, path)
    ctx = Context(run, recipe)
    for stage in ("prepare", "vocab"):
        with Worker(run.stage(stage), recipe_digest=recipe_digest(recipe)) as worker:
            module(stage).work(ctx, worker)
    return ctx


def bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """uint16: bits of bfloat16 numbers around 0, none of them inf or NaN."""
    values = rng.standard_normal(shape, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def write_states(ctx: Context, attempt: Attempt, *, reject: int = 0, **changes) -> None:
    """One unit of extract, as stages/extract.py commits it. reject: samples left out, the first.

    changes: `layers`, `verifier_id` or `codec` other than the run's; `agreement` of the probe;
    `part`: samples other than the unit's.
    """
    section = ctx.recipe.extract
    part = changes.get("part") or samples.read_samples(attempt.unit.payload)
    paths = [attempt.path("safetensors"), attempt.path("index.parquet")]
    rng = np.random.default_rng(int(attempt.unit.name))
    writer = ShardWriter(
        paths[0].parent,
        paths[0].stem,
        changes.get("layers", section.layers),
        ctx.verifier.hidden_size,
        {"verifier_id": changes.get("verifier_id", ctx.verifier.id())},
        codec=changes.get("codec", section.codec),
    )
    with writer:
        for sample in part[reject:]:
            shape = len(sample.input_ids), len(section.layers), ctx.verifier.hidden_size
            writer.add(sample.sample_id, bf16(rng, *shape), sample.input_ids, sample.loss_mask)
    counts = {
        "samples": len(part) - reject,
        "rejected": reject,
        "tokens": writer.tokens,
        "bytes": sum(p.stat().st_size for p in paths),
    }
    info = {
        "rejected": [{"sample_id": s.sample_id, "rule": "not-finite"} for s in part[:reject]],
        "probe": {"agreement": changes.get("agreement", 1.0), "positions": len(part)},
        "content": writer.content,
    }
    attempt.commit(paths, counts=counts, info=info, digests=writer.digests)


def extract(ctx: Context, only: set[str] | None = None, **changes) -> list[str]:
    """Do the open units of extract (or those named); -> their names."""
    units, done = module("extract").plan(ctx), []
    with Worker(ctx.run.stage("extract"), recipe_digest=recipe_digest(ctx.recipe)) as worker:
        worker.ledger.write_plan(units)
        todo = [u for u in units if only is None or u.name in only]
        for attempt in worker.attempts(todo):
            with attempt:
                write_states(ctx, attempt, **changes)
                done.append(attempt.unit.name)
    return done


def finish(ctx: Context) -> None:
    """train and benchmark, as records; RUN/draft as train puts it there."""
    made = {
        "train": {"draft/model.safetensors": bytes(5000), "draft/config.json": b"{}"},
        "benchmark": {"results.json": b'{"acceptance_length": 1.5}'},
    }
    made["train"]["curves.jsonl"] = b'{"step": 20}\n'
    for stage, contents in made.items():
        units = module(stage).plan(ctx)
        with Worker(ctx.run.stage(stage), recipe_digest=recipe_digest(ctx.recipe)) as worker:
            worker.ledger.write_plan(units)
            for attempt in worker.attempts(units):
                with attempt:
                    paths = []
                    for name, data in contents.items():
                        path = attempt.path(name)
                        path.parent.mkdir(exist_ok=True)
                        path.write_bytes(data)
                        paths.append(path)
                    attempt.commit(paths, counts={"tokens": 1})
        if stage == "train":
            train.publish(ctx)


def whole_run(folder: Path, codec: str = "raw") -> Path:
    """A finished run."""
    ctx = started(folder, codec)
    extract(ctx)
    finish(ctx)
    return ctx.run.path


def copied(original: Context, to: Path) -> Context:
    """A copy of a run, to be spoilt; hard links of the draft stay hard links."""
    run = original.run.path
    shutil.copytree(run, to)
    for path in (to / "draft").glob("*"):
        if found := list(to.glob(f"train/files/*draft/{path.name}")):
            path.unlink()
            path.hardlink_to(found[0])
    ctx = open_context(to)
    for name in ("verifier", "template", "selection"):  # read once; no run changes them
        ctx.__dict__[name] = getattr(original, name)
    return ctx


def record_of(ctx: Context, name: str, stage: str = "extract") -> Record:
    """The record of a unit under its current key."""
    (unit,) = [u for u in ctx.plan(stage) if u.name == name]
    found = ctx.ledger(stage).record(unit)
    assert found is not None
    return found


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Change one bit of a file; size and times of the folder stay. at < 0 counts from the end."""
    with open(path, "r+b") as f:
        place = at if at >= 0 else path.stat().st_size + at
        f.seek(place)
        (byte,) = f.read(1)
        f.seek(place)
        f.write(bytes([byte ^ (1 << bit)]))
