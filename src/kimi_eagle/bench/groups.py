"""Figures of a part of the prompts: by category, by source, and of one alone.

From the histograms that vLLM 0.31.0 keeps for each request (RequestSpecDecodeMetrics in
v1/metrics/stats.py): drafts by how many of their tokens were accepted. Speed has no such parts:
prompts share the engine's steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kimi_eagle.bench.measure import Run
from kimi_eagle.bench.rows import acceptance
from kimi_eagle.bench.workload import Workload


def by_group(
    groups: Sequence[str], k: int, draft: Run, baseline: Run, kept: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Group -> figures, in the order in which groups first occur; {} where prompts have none.

    groups: one a prompt. kept: indices of the prompts that make the figures (rows.kept_prompts).
    prompts: of those; left_out: the group's others, with loops for answers. acceptance_length,
    acceptance_per_position: as in results.json, over all drafts of the group; None without any.
    output_tokens, identical_prompts: of the prompts that make the figures.
    """
    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    return {name: _figures(k, draft, baseline, rows, kept) for name, rows in members.items()}


def accepted_lengths(workload: Workload, k: int, draft: Run) -> list[dict[str, Any]]:
    """What is told of each prompt: its category and source, drafts and acceptance length."""
    found = []
    for i, histogram in enumerate(draft.histograms or [[]] * len(workload.prompts)):
        length = acceptance([histogram], k)["acceptance_length"]
        told: dict[str, Any] = {"drafts": sum(histogram), "acceptance_length": length}
        if workload.categories:
            told |= {"category": workload.categories[i], "source": workload.sources[i]}
        found.append(told)
    return found


def _figures(
    k: int, draft: Run, baseline: Run, rows: list[int], kept: Sequence[int]
) -> dict[str, Any]:
    counted = [i for i in rows if i in set(kept)]
    histograms = [draft.histograms[i] for i in counted] if draft.histograms else []
    found = acceptance(histograms, k)
    return {
        "prompts": len(counted),
        "left_out": len(rows) - len(counted),
        "drafts": sum(map(sum, histograms)),
        "output_tokens": sum(len(draft.tokens[i]) for i in counted),
        "acceptance_length": found["acceptance_length"],
        "acceptance_per_position": found["acceptance_per_position"],
        "identical_prompts": sum(draft.tokens[i] == baseline.tokens[i] for i in counted),
    }
