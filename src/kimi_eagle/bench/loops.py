"""Answers that go round in circles, which any draft guesses: they are left out of the headline.

Greedy decoding of a small or cornered model falls into loops (Holtzman et al. 2020, "The Curious
Case of Neural Text Degeneration", arXiv:1904.09751): with such a prompt an acceptance length of
3.93 was seen where chat gave 1.94. The rule here: an answer is a loop if somewhere in it a phrase
of any length comes at least REPEATS times in a row, LEAST_TOKENS tokens in all or more. Holtzman's
rule (a phrase of at least 2 tokens, 3 times at the end) also takes short ends such as a table's
rule or "ha ha ha"; hence the least length. A list whose numbers grow is no loop, nor are words that
come again elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPEATS, LEAST_TOKENS = 3, 24


def find_loop(tokens: Sequence[int]) -> dict[str, int] | None:
    """The longest loop of an answer: {"period", "start", "tokens"} (counts and an index of tokens).

    Of equally long ones that of the shortest period. A run of n tokens that each equal the one
    `period` before is n + period tokens that go round.
    """
    import numpy as np

    ids = np.asarray(tokens, dtype=np.int64)
    best: dict[str, int] | None = None
    for period in range(1, len(ids) // REPEATS + 1):
        edges = np.flatnonzero(np.diff(np.pad(ids[period:] == ids[:-period], 1).astype(np.int8)))
        if not edges.size:
            continue
        starts, ends = edges[::2], edges[1::2]
        at = int(np.argmax(ends - starts))
        covered = int(ends[at] - starts[at]) + period
        if covered >= max(REPEATS * period, LEAST_TOKENS) and (
            best is None or covered > best["tokens"]
        ):
            best = {"period": period, "start": int(starts[at]), "tokens": covered}
    return best


def told(skipped: Sequence[bool], names: Sequence[str]) -> dict[str, Any]:
    """What results.json says of the prompts whose answers are loops."""
    return {
        "prompts": sum(skipped),
        "of": len(skipped),
        "names": [name for name, out in zip(names, skipped, strict=True) if out],
        "rule": f"a phrase {REPEATS} times or more in a row, at least {LEAST_TOKENS} tokens in all",
    }
