"""benchmark: vLLM with and without the draft on held-out prompts, then the report."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_eagle import files
from kimi_eagle.ledger import Unit
from kimi_eagle.stages import train
from kimi_eagle.stages.context import Context

if TYPE_CHECKING:
    from kimi_eagle.worker import Worker


def plan(ctx: Context) -> list[Unit]:
    """One unit: this draft on this workload with these engine settings."""
    from kimi_eagle.bench.draftdir import quick_digest
    from kimi_eagle.bench.results import FORMAT
    from kimi_eagle.bench.workload import load_workload
    from kimi_eagle.capture.vllm_cpu import served

    (trained,) = ctx.gate("train")
    workload = load_workload(ctx.recipe, ctx.template)
    parts = {
        "format": FORMAT,
        "verifier": ctx.verifier.id(),
        "draft": files.digest([f["xxh3"] for f in trained.data["files"] if "/" in f["name"]]),
        "workload": workload.digest,
        "groups": files.digest([workload.names, workload.categories, workload.sources]),
        "benchmark": ctx.recipe.benchmark.model_dump(
            mode="json", exclude={"prompts", "sources", "limit", "engine", "against"}
        ),
        "against": {str(a.name): quick_digest(a.path) for a in ctx.recipe.benchmark.against},
        "engine": served(ctx.engine_parts("benchmark"), ctx.verifier.config),
    }
    return [Unit(name="all", parts=parts, tokens=workload.max_tokens, payload=(trained, workload))]


def work(ctx: Context, worker: Worker) -> None:
    """Measure with and without the drafts, write results.json and the report."""
    from kimi_eagle.bench import overlap, run_benchmark

    units = plan(ctx)
    worker.ledger.write_plan(units)
    train.publish(ctx)
    for attempt in worker.attempts(units, max_failures=1):
        with attempt, worker.phase("work"):
            _trained, workload = attempt.unit.payload
            workdir = worker.dir.files / f"work-{attempt.unit.key}"
            take_earlier(worker.dir.files, workdir / "measurements")
            found = overlap.near_duplicates(ctx.recipe, ctx.selection.rows, ctx.verifier.vocab_size)
            if word := overlap.warning(found):
                print(f"warning: {word}", file=sys.stderr, flush=True)
            run_benchmark(
                ctx.recipe,
                ctx.verifier,
                ctx.run.draft,
                workdir,
                workload=workload,
                results=(path := attempt.path("results.json")),
                duplicates=found,
                on_plan=lambda lines: _tell(worker, lines),
                on_progress=lambda fraction, tokens: worker.progress(fraction, tokens),
            )
            results = files.read_json(path)
            shown = ("acceptance_length", "identical_outputs", "tokens_per_second", "k")
            info = {k: results[k] for k in shown} | ({"warning": word} if word else {})
            attempt.commit([path], info=info)
    publish(ctx)


def take_earlier(work: Path, folder: Path) -> None:
    """Link the measurements of earlier keys into `folder`: one more k, batch size or draft in the
    recipe measures just that. Their names and contents hold the digest of what was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in work.glob("work-*/measurements/*.json"):
        with suppress(FileExistsError):
            (folder / earlier.name).hardlink_to(earlier)


def _tell(worker: Worker, lines: list[str]) -> None:
    """What will be loaded and measured: into the log, and its sum into status."""
    print("\n".join(lines), file=sys.stderr, flush=True)
    worker.note(plan=lines[0].partition(" of ")[0])


def publish(ctx: Context) -> None:
    """Make RUN/bench/results.json and RUN/report.html those of the current record."""
    from kimi_eagle.report.page import EARLIER
    from kimi_eagle.summary import write_report

    (record,) = ctx.gate("benchmark")
    ctx.run.bench.mkdir(exist_ok=True)
    found, target = record.path("results.json").read_bytes(), ctx.run.bench / "results.json"
    if target.is_file() and target.read_bytes() == found and ctx.run.report.is_file():
        if EARLIER.encode() not in ctx.run.report.read_bytes():
            return  # else the recipe went elsewhere and came back
    files.write_atomic(target, found)
    write_report(ctx)
