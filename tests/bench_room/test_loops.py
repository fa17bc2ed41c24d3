"""What counts as a loop, and what the intervals over prompts say."""

from __future__ import annotations

import random

import pytest

from kimi_eagle.bench.intervals import intervals
from kimi_eagle.bench.loops import LEAST_TOKENS, find_loop

TEXT = random.Random(1).sample(range(1000), 200)


@pytest.mark.parametrize(
    ("tokens", "loop"),
    [
        (TEXT, None),
        ([], None),
        ([7] * (LEAST_TOKENS - 1), None),  # "======" is no loop
        ([7] * LEAST_TOKENS, (1, 0, 24)),
        (TEXT[:50] + [1, 2, 3, 4] * 10, (4, 50, 40)),
        (TEXT[:50] + [1, 2, 3, 4] * 10 + [1, 2], (4, 50, 42)),  # cut off in a phrase
        ([2000, 2001] * 20 + TEXT[:60] + [0], (2, 0, 40)),  # got out of it
        (TEXT[:60] * 2, None),  # said twice
        (TEXT[:60] * 3, (60, 0, 180)),
        ([t for i in range(30) for t in (1, 2, 100 + i)], None),  # "step 1, step 2"
    ],
)
def test_loops(tokens: list[int], loop: tuple[int, int, int] | None) -> None:
    found = find_loop(tokens)
    assert found == (loop and dict(zip(("period", "start", "tokens"), loop, strict=True)))


def test_an_interval_narrows_with_prompts_and_holds_the_figure() -> None:
    rng = random.Random(0)
    widths = []
    for n in (8, 128):
        drawn = [sum(rng.random() < 0.5 for _ in range(20)) for _ in range(n)]
        histograms = [[20 - accepted, accepted] for accepted in drawn]
        found = intervals(histograms, 1, None, seed=0)
        low, high = found["acceptance_length"]
        assert low < 1 + sum(drawn) / (20 * n) < high
        assert found["acceptance_per_position"][0] == pytest.approx([low - 1, high - 1])
        assert found["speedup"] is None
        widths.append(high - low)
        assert found == intervals(histograms, 1, None, seed=0)
    # The spread of a mean of n prompts of 20 coin tosses: 2 * 1.96 * sqrt(0.25 / 20 / n).
    assert widths[1] == pytest.approx(0.0387, rel=0.25) and widths[0] > 2.5 * widths[1]


def test_speed_is_drawn_in_pairs() -> None:
    seconds = [1.0, 5.0, 2.0, 9.0]
    found = intervals([[1, 1]] * 4, 1, ([10] * 4, seconds, [10] * 4, [2 * s for s in seconds]), 0)
    assert found["speedup"] == pytest.approx([2.0, 2.0])  # however slow a prompt is by itself
    low, high = found["tokens_per_second"]["draft"]
    assert low < 40 / 17 < high


def test_one_prompt_has_no_interval() -> None:
    assert set(intervals([[1, 2]], 1, None, 0).values()) == {None}
