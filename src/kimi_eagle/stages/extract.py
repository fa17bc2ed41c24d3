"""extract: the verifier reads every sample once; the states entering the recipe's layers are kept.

tokens part -> one closed batch through vLLM -> one shard (safetensors + index) a unit. The probe
(final state -> norm -> lm_head) must agree with what the engine itself says comes next, or the
states are not what we think they are.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_eagle.data import samples
from kimi_eagle.errors import RunError
from kimi_eagle.ledger import Unit
from kimi_eagle.shards.codecs import finite
from kimi_eagle.shards.writer import ShardWriter, bits
from kimi_eagle.stages.context import Context

if TYPE_CHECKING:
    import torch

    from kimi_eagle.capture.engine import ExtractionEngine
    from kimi_eagle.capture.probe import Probe
    from kimi_eagle.worker import Attempt, Worker

FORMAT = "shard/2"
PROBED_POSITIONS = 64
"""Positions a sample that the probe looks at: a matrix product with the vocabulary for each."""


def plan(ctx: Context) -> list[Unit]:
    """One unit for each part that prepare wrote; its key holds the samples, not the template."""
    (prepared,) = ctx.gate("prepare")
    common = {
        "format": FORMAT,
        "verifier": ctx.verifier.id(),
        "layers": list(ctx.recipe.extract.layers),
        "engine": ctx.engine_parts("extract"),
        "probe": ctx.recipe.extract.probe_min_agreement,
        # raw and lossless hold the same bits: a change between them makes nothing undone.
        "codec": "fp8" if ctx.recipe.extract.codec == "fp8" else "exact",
    }
    return [
        Unit(
            name=part["name"],
            parts={**common, "samples": part["digest"]},
            tokens=part["tokens"],
            samples=part["samples"],
            payload=prepared.kinds[f"{part['name']}.tokens.parquet"],
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
    from kimi_eagle.capture.probe import Probe

    with ExitStack() as stack:
        spool = stack.enter_context(tempfile.TemporaryDirectory(prefix="kimi-eagle-"))
        with worker.phase("load"):
            engine = stack.enter_context(
                ExtractionEngine(
                    ctx.verifier.path,
                    ctx.engine("extract"),
                    layers=ctx.recipe.extract.layers,
                    spool=Path(spool),
                    trust_remote_code=ctx.recipe.verifier.trust_remote_code,
                )
            )
            probe = Probe(ctx.verifier)
        for attempt in worker.attempts(units):
            with attempt, worker.phase("work"):
                _extract(ctx, engine, probe, attempt, worker)


def _extract(
    ctx: Context, engine: ExtractionEngine, probe: Probe, attempt: Attempt, worker: Worker
) -> None:
    """One unit: part in, shard out; a sample with inf or NaN is tried alone once, then rejected."""
    section, part = ctx.recipe.extract, samples.read_samples(attempt.unit.payload)
    before = worker.tokens
    greedy = ctx.recipe.regenerate.enabled and ctx.recipe.regenerate.temperature == 0
    probe.agreed = probe.seen = 0
    paths = [attempt.path("safetensors"), attempt.path("index.parquet")]
    writer = ShardWriter(
        paths[0].parent,
        paths[0].stem,
        layers=section.layers,
        hidden_size=ctx.verifier.hidden_size,
        meta={"verifier_id": ctx.verifier.id(), "engine": ctx.engine_parts("extract")},
        n_tokens=attempt.unit.tokens,
        codec=section.codec,
    )

    def keep(sample: samples.Sample, states: torch.Tensor, next_token: int) -> bool:
        if not finite(bits(states)):
            return False
        ids, mask = sample.input_ids, sample.loss_mask
        # Text that the verifier did not write greedily says nothing about its next token; the
        # engine's own choice after the last token always does.
        own = mask if greedy and sample.finish_reason != "given" else mask & False
        probe.add(states[:, -1], ids, own, next_token, limit=PROBED_POSITIONS)
        writer.add(sample.sample_id, states, ids, mask)
        worker.tokens = before + writer.tokens
        worker.progress(writer.tokens / attempt.unit.tokens, worker.tokens)
        return True

    with writer:
        batch = [s.input_ids.tolist() for s in part]
        again = [part[i] for i, *found in engine.extract(batch) if not keep(part[i], *found)]
        rejected = [s for s in again if not keep(s, *_alone(engine, s))]
        if probe.agreement < section.probe_min_agreement:
            raise RunError(
                f"probe: norm and lm_head of the last state name the next token at "
                f"{probe.agreement:.1%} of {probe.seen} positions",
                where=f"unit {attempt.unit.name}",
                expected=f"at least {section.probe_min_agreement:.0%}",
                fix="check extract.layers: the last id must be the number of layers",
            )
    counts = {
        "samples": len(part) - len(rejected),
        "rejected": len(rejected),
        "tokens": writer.tokens,
        "bytes": sum(p.stat().st_size for p in paths),
    }
    info = {
        "rejected": [{"sample_id": s.sample_id, "rule": "not-finite"} for s in rejected],
        "probe": {"agreement": round(probe.agreement, 4), "positions": probe.seen},
        "codec": section.codec,
        "content": writer.content,
        "stalled": round(writer.stalled, 3),
    }
    if section.codec == "fp8":
        info["error"] = writer.error.layers(section.layers)
    attempt.commit(paths, counts=counts, info=info, digests=writer.digests)


def _alone(engine: ExtractionEngine, sample: samples.Sample) -> tuple[torch.Tensor, int]:
    """States and next token of one sample in a batch of its own."""
    ((_, states, next_token),) = engine.extract([sample.input_ids.tolist()])
    return states, next_token
