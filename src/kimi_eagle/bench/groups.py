"""Figures of a part of the prompts: by category, by source, and of one alone.

From the histograms that vLLM 0.31.0 keeps for each request (RequestSpecDecodeMetrics in
v1/metrics/stats.py): drafts by how many of their tokens were accepted. Speed has no such parts:
prompts share the engine's steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kimi_eagle.bench.measure import Run
from kimi_eagle.bench.workload import Workload


def by_group(groups: Sequence[str], k: int, draft: Run, baseline: Run) -> dict[str, dict[str, Any]]:
    """Group -> figures, in the order in which groups first occur; {} where prompts have none.

    groups: one a prompt. acceptance_length, acceptance_per_position: as in results.json, over all
    drafts of the group; None where it has no draft.
    """
    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    return {name: _figures(k, draft, baseline, rows) for name, rows in members.items()}


def accepted_lengths(workload: Workload, draft: Run) -> list[dict[str, Any]]:
    """What is told of each prompt: its category and source, drafts and acceptance length."""
    found = []
    for i, histogram in enumerate(draft.histograms or [[]] * len(workload.prompts)):
        told = {"drafts": sum(histogram), "acceptance_length": _length(histogram)}
        if workload.categories:
            told |= {"category": workload.categories[i], "source": workload.sources[i]}
        found.append(told)
    return found


def by_category(results: Mapping[str, Any]) -> Iterator[str]:
    """Lines for a person: acceptance length by category and by source."""
    details = results["details"]
    for kind in ("category", "source"):
        for name, found in details[f"by_{kind}"].items() if len(details[f"by_{kind}"]) > 1 else ():
            length = found["acceptance_length"]
            told = "no draft" if length is None else f"{length:.2f}"
            yield f"  {kind} {name}: {told}, {found['prompts']} prompts"


def _figures(k: int, draft: Run, baseline: Run, rows: list[int]) -> dict[str, Any]:
    histograms = [draft.histograms[i] for i in rows] if draft.histograms else []
    counts = [sum(h[j] for h in histograms if j < len(h)) for j in range(k + 1)]
    drafts = sum(counts)
    return {
        "prompts": len(rows),
        "drafts": drafts,
        "output_tokens": sum(len(draft.tokens[i]) for i in rows),
        "acceptance_length": _length(counts),
        "acceptance_per_position": [sum(counts[j:]) / drafts for j in range(1, k + 1)]
        if drafts
        else None,
        "identical_prompts": sum(draft.tokens[i] == baseline.tokens[i] for i in rows),
    }


def _length(histogram: Sequence[int]) -> float | None:
    """Tokens a verifier step yields: 1 + accepted / drafts."""
    drafts = sum(histogram)
    return 1 + sum(j * n for j, n in enumerate(histogram)) / drafts if drafts else None
