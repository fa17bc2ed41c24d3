"""extract: the verifier reads every sample once; the states entering the recipe's layers are kept.

tokens part -> one closed batch through vLLM -> one shard (safetensors + index) a unit. The probe
(final state -> norm -> lm_head) must agree with what the engine itself says comes next, or the
states are not what we think they are.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_eagle.data import samples
from kimi_eagle.errors import RunError
from kimi_eagle.ledger import Unit
from kimi_eagle.stages.context import Context

if TYPE_CHECKING:
    from kimi_eagle.capture.engine import ExtractionEngine
    from kimi_eagle.worker import Attempt, Worker

FORMAT = "shard/1"


def plan(ctx: Context) -> list[Unit]:
    """One unit for each part that prepare wrote; its key holds the samples, not the template."""
    (prepared,) = ctx.gate("prepare")
    common = {
        "format": FORMAT,
        "verifier": ctx.verifier.id(),
        "layers": list(ctx.recipe.extract.layers),
        "engine": ctx.engine_parts("extract"),
        "probe": ctx.recipe.extract.probe_min_agreement,
    }
    return [
        Unit(
            name=part["name"],
            parts={**common, "samples": part["digest"]},
            tokens=part["tokens"],
            payload=prepared.path(f".{part['name']}.tokens.parquet"),
        )
        for part in prepared.info["parts"]
    ]


def work(ctx: Context, worker: Worker) -> None:
    """Extract the open units."""
    units = plan(ctx)
    worker.ledger.write_plan(units)
    if not worker.ledger.open_units(units):
        return
    from kimi_eagle.capture.engine import ExtractionEngine

    spool = Path(tempfile.mkdtemp(prefix="kimi-eagle-"))
    try:
        with worker.phase("load"):
            engine = ExtractionEngine(
                ctx.verifier.path,
                ctx.engine("extract"),
                layers=ctx.recipe.extract.layers,
                spool=spool,
                trust_remote_code=ctx.recipe.verifier.trust_remote_code,
            ).__enter__()
        try:
            for attempt in worker.attempts(units):
                with attempt, worker.phase("work"):
                    _extract(ctx, engine, attempt, worker)
        finally:
            engine.__exit__(None, None, None)
    finally:
        shutil.rmtree(spool, ignore_errors=True)


def _extract(ctx: Context, engine: ExtractionEngine, attempt: Attempt, worker: Worker) -> None:
    """One unit: part in, shard out; a sample that fails is tried alone once, then rejected."""
    from kimi_eagle.capture.probe import Probe
    from kimi_eagle.shards import ShardWriter

    part = samples.read_samples(attempt.unit.payload)
    probe = Probe(ctx.verifier)
    rejected: list[dict[str, str]] = []
    before = worker.tokens
    writer = ShardWriter(
        attempt.path("safetensors"),
        layers=ctx.recipe.extract.layers,
        hidden_size=ctx.verifier.hidden_size,
        meta={"verifier_id": ctx.verifier.id(), "engine": ctx.engine_parts("extract")},
    )
    attempt.path("index.parquet")
    with writer:
        for i, states, next_token in engine.extract([s.input_ids.tolist() for s in part]):
            sample = part[i]
            if not writer.is_finite(states):
                (_, states, next_token), *_ = engine.extract([sample.input_ids.tolist()])
            if not writer.is_finite(states):
                rejected.append({"sample_id": sample.sample_id, "rule": "not-finite"})
                continue
            probe.add(states[:, -1], next_token, sample)
            writer.add(sample.sample_id, states, sample.input_ids, sample.loss_mask)
            worker.tokens += len(sample.input_ids)
            worker.progress((worker.tokens - before) / attempt.unit.tokens, worker.tokens)
        if probe.agreement < ctx.recipe.extract.probe_min_agreement:
            raise RunError(
                f"probe: the last state names the engine's next token for {probe.agreement:.1%}"
                f" of {probe.compared} samples",
                where=f"extract unit {attempt.unit.name}",
                expected=f"at least {ctx.recipe.extract.probe_min_agreement:.0%}",
                fix="check extract.layers: the last id must be the number of layers",
            )
        paths = writer.close()
    counts = {
        "samples": len(part) - len(rejected),
        "rejected": len(rejected),
        "tokens": writer.tokens,
        "bytes": sum(p.stat().st_size for p in paths),
    }
    info = {"rejected": rejected, "probe": probe.summary()}
    attempt.commit(paths, counts=counts, info=info)
