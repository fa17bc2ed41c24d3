"""What is in the toy: weights by chance, shaped so that its text has something to learn.

Plain chance gives text without any rule: no draft can learn it, and acceptance would say nothing.
Here lm_head is built from the embedding: the row of a word is the sum of the embeddings of the
four words that may come before it. So each word has four likely followers, and which of them comes
is decided by what the layers add, that is by all the words before. A draft that has learnt nothing
is right once in a thousand times, one that has learnt the pairs about half the time, one that reads
the states well more often. Nothing is trained: seconds instead of minutes, and the same bits on
every machine (numpy's PCG64, one stream a tensor).

Routing is by the word: each word's embedding says, in directions that the routers read, which two
experts are its own, well ahead of the others. Where chance decides, every eighth token or so sits
so near a tie that rounding sends it to another expert, in bf16 by any library; comparing states
would then measure ties.

Gains below keep the residual stream near an rms of 1 to 1.6: each of the 16 branches adds about
0.3, so that the word itself and its past weigh alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

WORDS = 1024
"""Words that the toy says; the rest of the vocabulary it only reads."""
FOLLOWERS = 4
FIRST = 32
"""Words with which an answer may begin."""
LAST = 24
"""Words after which an answer may end: some 70 tokens an answer."""
SHARPNESS = 16.0
"""Logits' scale: the likeliest of the four followers gets about 0.6."""
OWN, OTHER = 3.0, -1.0
"""A word's component along the direction of one of its own experts, and of any other."""
PER_WORD = 2
"""Experts of a word, as many as a token is sent to."""

GAINS = {
    "q_b_proj": 2.0,  # attention that picks words out instead of averaging over all
    "o_proj": 0.4,
    "mlp.down_proj": 0.5,
    "mlp.shared_experts.down_proj": 0.4,
    "mlp.experts.down_proj": 0.2,  # times routed_scaling_factor
}
"""Standard deviation of a matrix's outputs for inputs of rms 1; 1.0 where nothing is said."""


def values(name: str, shape: Sequence[int], seed: int) -> np.ndarray:
    """float32 values of one parameter by its name in transformers.

    Three are made of others: the embedding (`embedding`), the routers (`router`) and lm_head
    (`chain`).
    """
    normal = _stream(name, seed).standard_normal(shape, dtype=np.float32)
    if name.endswith("e_score_correction_bias"):
        return 0.02 * normal
    if "norm" in name and name.endswith(".weight"):
        return 1 + 0.1 * normal
    if name.endswith(("bias", "position_embeddings")):
        return 0.02 * normal
    fan_in = int(np.prod(shape[1:])) if "patch_embed" in name else shape[-1]
    gain = next((g for part, g in GAINS.items() if f".{part}" in name), 1.0)
    return normal * (gain / fan_in**0.5)


def embedding(
    vocab: int, hidden: int, experts: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(embedding [V, H], the same without what routers read, routers' directions [experts, H])."""
    rng = _stream("embedding", seed)
    plain = rng.standard_normal((vocab, hidden), dtype=np.float32)
    directions = np.linalg.qr(rng.standard_normal((hidden, experts)))[0].T.astype(np.float32)
    plain -= (plain @ directions.T) @ directions
    order = np.argsort(rng.random((vocab, experts)), axis=1)
    parts = np.where(order < PER_WORD, np.float32(OWN), np.float32(OTHER))
    return plain + parts @ directions, plain, directions


def router(name: str, directions: np.ndarray, seed: int) -> np.ndarray:
    """mlp.gate.weight [experts, H] of a layer: the directions in an order of its own, and noise."""
    rng = _stream(name, seed)
    noise = rng.standard_normal(directions.shape, dtype=np.float32) / directions.shape[1] ** 0.5
    return rng.permutation(directions) + 0.1 * noise


def _stream(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def chain(plain: np.ndarray, words: Sequence[int], begin: int, end: int, seed: int) -> np.ndarray:
    """lm_head float32 [V, H] from the embedding without what routers read [V, H].

    words: ids that the toy says, WORDS of them. begin: the last token of every prompt. end: the
    end-of-turn id.
    """
    rng = _stream("chain", seed)
    words = np.asarray(words)
    head = rng.standard_normal(plain.shape, dtype=np.float32) * 0.01
    scaled = plain * (SHARPNESS / plain.shape[1])
    for _ in range(FOLLOWERS):
        head[words] += scaled[rng.permutation(words)]
    head[rng.choice(words, FIRST, replace=False)] += scaled[begin]
    head[end] += scaled[rng.choice(words, LAST, replace=False)].sum(axis=0)
    return head
