"""Intervals over prompts: how far a figure would move had other prompts of the kind been asked.

The percentile bootstrap (Efron & Tibshirani 1993, chapter 13): prompts are drawn with replacement
DRAWS times and each figure is made anew; the middle 95% of what comes is the interval. Prompts are
the unit, not tokens or drafts, for those of one answer depend on each other. With and without the
draft the same prompts are drawn together, so that a speed-up's interval is a paired one. The price
of its simplicity: with 16 prompts it is somewhat too narrow.

Not in it: noise of the machine from run to run, and prompts of another kind.
"""

from __future__ import annotations

from typing import Any

DRAWS, LEVEL = 2000, 0.95


def intervals(
    histograms: list[list[int]],
    k: int,
    speed: tuple[list[int], list[float], list[int], list[float]] | None,
    seed: int,
) -> dict[str, Any]:
    """Figure -> [low, high], named as in results.json; all None for fewer than two prompts.

    histograms: one a prompt, element j counts the drafts of which j tokens were accepted; a prompt
    without a draft has an empty one. speed: tokens and seconds a prompt with the draft, then
    without; None where prompts share the engine's steps and have no seconds of their own.
    """
    import numpy as np

    n = len(histograms)
    names = ("acceptance_length", "acceptance_per_position", "conditional_acceptance", "speedup")
    if n < 2:
        return dict.fromkeys((*names, "tokens_per_second"))
    counts = np.zeros((n, k + 1))
    for row, histogram in zip(counts, histograms, strict=True):
        row[: len(histogram)] = histogram[: k + 1]
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(n, np.full(n, 1 / n), size=DRAWS)
    totals = drawn @ counts  # [DRAWS, k + 1]
    reached = totals[:, ::-1].cumsum(axis=1)[:, ::-1]  # at least j accepted
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = reached[:, 1:] / reached[:, :1]
        found: dict[str, Any] = {
            "acceptance_length": _middle(1 + shares.sum(axis=1)),
            "acceptance_per_position": [_middle(c) for c in shares.T],
            "conditional_acceptance": [_middle(c) for c in (reached[:, 1:] / reached[:, :-1]).T],
            "tokens_per_second": None,
            "speedup": None,
        }
        if speed is not None:
            tokens, seconds, tokens_alone, seconds_alone = (drawn @ np.array(s) for s in speed)
            with_draft, alone = tokens / seconds, tokens_alone / seconds_alone
            found["tokens_per_second"] = {"draft": _middle(with_draft), "baseline": _middle(alone)}
            found["speedup"] = _middle(with_draft / alone)
    return found


def _middle(values: Any) -> list[float] | None:
    """[low, high] of the middle LEVEL; draws without the figure (0 / 0) do not count."""
    import numpy as np

    there = values[np.isfinite(values)]
    if not there.size:
        return None
    edge = (1 - LEVEL) / 2
    return [float(v) for v in np.quantile(there, [edge, 1 - edge])]
