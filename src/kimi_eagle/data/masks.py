"""Which tokens of a rendered conversation are the answer: by position, never by marker strings.

Reads and writes nothing. The template's text is rendered for prefixes of the conversation; where
one prefix's text begins and ends inside the whole one is a character position, and the tokenizer's
offsets turn it into token numbers. An answer or a prompt may therefore quote any marker.

A token belongs to the answer when it holds at least one of the answer's characters, as in
transformers' own `return_assistant_tokens_mask` (5.17.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix

Spans = list[tuple[int, int]]
"""Character ranges [start, end) of the answers in a rendered text."""


def token_mask(offsets: Sequence[tuple[int, int]], spans: Spans) -> list[bool]:
    """One flag a token: does it hold a character of one of the spans?

    offsets: each token's characters [start, end), ascending, as a fast tokenizer gives them.
    """
    mask = [False] * len(offsets)
    at = 0
    for start, end in spans:
        while at < len(offsets) and offsets[at][1] <= start:
            at += 1
        while at < len(offsets) and offsets[at][0] < end:
            mask[at] = True
            at += 1
    return mask


def prefix_mask(
    ids: Sequence[int], bounds: list[tuple[Sequence[int], Sequence[int]]]
) -> list[bool]:
    """The same for tokenizers without offsets: token ids of the text up to each answer's start and
    up to its end. A token that differs from the prefix's own holds the next character already.
    """
    mask = [False] * len(ids)
    for before, until in bounds:
        start, end = common_length(ids, before), common_length(ids, until)
        end += end < len(until)  # the answer's last character lies in a token that goes on
        mask[start:end] = [True] * (end - start)
    return mask


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning of two sequences of ids."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def common_text(a: str, b: str) -> int:
    """Length of the common beginning of two texts."""
    return len(commonprefix([a, b]))
