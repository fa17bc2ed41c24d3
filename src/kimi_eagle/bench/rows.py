"""The figures of one measurement with a draft beside the one without, in the same case.

Pure arithmetic on `measure.Run`s; what each figure means stands in results.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kimi_eagle.bench.intervals import intervals
from kimi_eagle.bench.measure import Case, Run
from kimi_eagle.errors import RunError


def kept_prompts(draft: Run, alone: Run) -> list[int]:
    """Indices of the prompts that make the figures: those whose answer, with the draft and without,
    is no loop. All of them where that leaves fewer than two, or none with a draft."""
    every = range(len(draft.tokens))
    kept = [i for i in every if not (draft.loops[i] or alone.loops[i])]
    drafted = any(sum(h) for h in (draft.histograms[i] for i in kept)) if draft.histograms else 0
    return kept if len(kept) > 1 and drafted else list(every)


def make_row(name: str, k: int, case: Case, draft: Run, alone: Run, seed: int) -> dict[str, Any]:
    """One row of results.json. name: the draft's. seed: of the intervals.

    RunError where the engine made no draft at all.
    """
    if not draft.histograms or not any(map(sum, draft.histograms)):
        raise RunError(
            "the engine made no draft", fix="raise benchmark.max_tokens: answers are too short"
        )
    kept, counters = kept_prompts(draft, alone), draft.counters or {}
    single = case.batch_size == 1
    histograms = [draft.histograms[i] for i in kept]
    speed = _speed(draft, alone, kept if single else None)
    every = acceptance(draft.histograms, k)
    same = identity(draft, alone) if case.greedy else None
    return {
        "draft": name,
        "k": k,
        "batch_size": case.batch_size,
        "temperature": case.temperature,
        "top_p": case.top_p,
        "prompts": len(kept),
        "left_out": len(draft.tokens) - len(kept),
        **acceptance(histograms, k),
        **speed,
        "time_to_first_token": _both(draft, alone, kept, "first_token_seconds"),
        "time_per_output_token": _both(draft, alone, kept, "token_seconds"),
        "intervals": intervals(histograms, k, _each(draft, alone, kept) if single else None, seed),
        "identical_prompts": same and same["identical_prompts"],
        "identity": same,
        "all_prompts": {"acceptance_length": every["acceptance_length"], **_speed(draft, alone)},
        "drafts": counters.get("num_drafts", 0),
        "draft_tokens": counters.get("num_draft_tokens", 0),
        "accepted_tokens": counters.get("num_accepted_tokens", 0),
        "output_tokens": {"draft": draft.output_tokens, "baseline": alone.output_tokens},
        "seconds": {"draft": draft.seconds, "baseline": alone.seconds},
        "mean_in_flight": {
            kind: sum(run.each_seconds) / run.seconds
            for kind, run in (("draft", draft), ("baseline", alone))
        },
        "warm_up": {"draft": draft.warm_up, "baseline": alone.warm_up},
    }


def acceptance(histograms: Sequence[Sequence[int]], k: int) -> dict[str, Any]:
    """acceptance_length, acceptance_per_position and conditional_acceptance; None without drafts.

    histograms: element j counts the drafts of which j tokens were accepted; may be shorter. A
    position that no draft reached has None for its conditional acceptance.
    """
    counts = [sum(h[j] for h in histograms if j < len(h)) for j in range(k + 1)]
    reached = [sum(counts[j:]) for j in range(k + 1)]  # drafts with at least j accepted
    drafts = reached[0]
    names = ("acceptance_length", "acceptance_per_position", "conditional_acceptance")
    if not drafts:
        return dict.fromkeys(names)
    steps = zip(reached[1:], reached[:-1], strict=True)
    found = (
        1 + sum(reached[1:]) / drafts,
        [n / drafts for n in reached[1:]],
        [n / before if before else None for n, before in steps],
    )
    return dict(zip(names, found, strict=True))


def identity(one: Run, other: Run) -> dict[str, Any]:
    """How far the tokens of two runs agree: prompts, share, and where the others part.

    first_difference: index of an answer's first token that differs, {"least", "median"} over the
    prompts that differ; None where none does.
    """
    pairs = list(zip(one.tokens, other.tokens, strict=True))
    places = [p for a, b in pairs if (p := first_difference(a, b)) is not None]
    same = len(pairs) - len(places)
    return {
        "identical_prompts": same,
        "prompts": len(pairs),
        "share": same / len(pairs),
        "first_difference": {"least": min(places), "median": _quantile(places, 0.5)}
        if places
        else None,
    }


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs (a shorter answer differs at its end)."""
    if a == b:
        return None
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _speed(draft: Run, alone: Run, kept: Sequence[int] | None = None) -> dict[str, Any]:
    """Tokens a second and the ratio, over all prompts together, or those that ran one by one."""
    rates = {}
    for kind, run in (("draft", draft), ("baseline", alone)):
        tokens = run.output_tokens if kept is None else sum(len(run.tokens[i]) for i in kept)
        seconds = run.seconds if kept is None else sum(run.each_seconds[i] for i in kept)
        rates[kind] = tokens / seconds
    return {"tokens_per_second": rates, "speedup": rates["draft"] / rates["baseline"]}


def _each(
    draft: Run, alone: Run, kept: Sequence[int]
) -> tuple[list[int], list[float], list[int], list[float]]:
    return (
        [len(draft.tokens[i]) for i in kept],
        [draft.each_seconds[i] for i in kept],
        [len(alone.tokens[i]) for i in kept],
        [alone.each_seconds[i] for i in kept],
    )


def _both(draft: Run, alone: Run, kept: Sequence[int], name: str) -> dict[str, Any]:
    """{"draft": {"median", "p90"}, "baseline": ...} in seconds; None where no prompt has one."""
    found = {}
    for kind, run in (("draft", draft), ("baseline", alone)):
        values = [v for i in kept if (v := getattr(run, name)[i]) is not None]
        found[kind] = (
            {"median": _quantile(values, 0.5), "p90": _quantile(values, 0.9)} if values else None
        )
    return found


def _quantile(values: Sequence[float], share: float) -> float:
    import numpy as np

    return float(np.quantile(values, share))
