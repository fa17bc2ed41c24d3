"""Which samples a training step gets: a seeded order, and packing to seq_len for several ranks.

Reads the lengths that the indexes give, nothing else; numpy only.

The packing is that of speculators' `MultipackDistributedBatchSamplerV2` (0.9.0), bit for bit, on
any number of ranks: the same indices in the same order. A step takes the longest run of the order
that longest-processing-time-first scheduling puts into `ranks` bins of seq_len tokens, found by
the same bisection. Theirs sorts with numpy and keeps a rank's batch at every try; here a try keeps
only the fill of the bins, and a batch is put together when it is asked for. 1,000,000 samples of
2,000 tokens, seq_len 20,000, 8 ranks: 0.9 s against 4.7 s (one core).

What the order is: epoch e is `default_rng(seed + e).permutation(n)` (window 0). With window N the
shards come in a random order and samples are mixed within N shards at a time, so that a disk
reads in few places; N at or above the number of shards gives window 0's order.

A position is (epoch, step): `batches(epoch, rank)[step:]` goes on from there and reads nothing of
what lies before. The order does not depend on the number of ranks and each step takes a run of it
(`first_sample`): with another number of ranks the same samples come in the same order, but in
other steps, so a position taken within an epoch means other samples then. Who goes on with other
ranks counts samples, as training does: `step_at(epoch, samples)` reads none of them twice.

As there, the last samples of an epoch are left out when fewer than `ranks` remain; samples longer
than seq_len count as seq_len.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from heapq import heapreplace
from typing import overload

import numpy as np


def epoch_order(
    n: int, epoch: int, *, seed: int, shard_of: np.ndarray | None = None, window: int = 0
) -> np.ndarray:
    """Numbers 0..n-1 in the order of an epoch, int64 [n].

    shard_of: int [n], the number of each sample's shard, 0 or more; needed for window > 0.
    ValueError where it is not given or of another length.
    """
    rng = np.random.default_rng(seed=seed + epoch)
    order = rng.permutation(n)
    if window == 0:
        return order
    if shard_of is None or len(shard_of) != n:
        raise ValueError(f"window {window} needs the shard of each of the {n} samples")
    place = rng.permutation(int(shard_of.max(initial=-1)) + 1) // window
    # Stable: within a window the samples keep the random order that they have already.
    return order[np.argsort(place[shard_of[order]], kind="stable")]


def step_bounds(lengths: np.ndarray, seq_len: int, ranks: int) -> np.ndarray:
    """Where steps begin and end, int64 [steps + 1]: step s takes lengths[bounds[s]:bounds[s+1]].

    lengths: int64 [n] in the order of the epoch, none above seq_len.
    """
    if ranks == 1:
        return _runs(lengths, seq_len)
    # Every length is tried some log2(samples a step) times: lists of plain integers are faster here
    # than slices of arrays.
    sizes, sums = lengths.tolist(), np.cumsum(lengths).tolist()

    def fits(start: int, count: int) -> bool:
        falling = sorted(sizes[start : start + count], reverse=True)
        fills = falling[ranks - 1 :: -1]  # one to each bin; rising, so a heap
        for size in falling[ranks:]:
            heapreplace(fills, fills[0] + size)
        return max(fills) <= seq_len

    budget, n = seq_len * ranks, len(sizes)
    bounds, start, before = [0], 0, 0
    while n - start >= ranks:
        low, high = 1, 1 + bisect.bisect_right(sums, before + budget, start) - start
        while high - low > 1 and high > ranks:
            middle = (low + high) // 2
            # Each of `ranks` samples finds a bin of its own.
            if middle <= ranks or fits(start, middle):
                low = middle
            else:
                high = middle
        start += low
        before = sums[start - 1]
        bounds.append(start)
    return np.asarray(bounds, dtype=np.int64)


def _runs(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """step_bounds of one rank: the longest runs of at most seq_len tokens."""
    sums = np.cumsum(lengths).tolist()
    bounds, start, before, n = [0], 0, 0, len(sums)
    while start < n:
        start = bisect.bisect_right(sums, before + seq_len, start)
        before = sums[start - 1]
        bounds.append(start)
    return np.asarray(bounds, dtype=np.int64)


def deal(lengths: np.ndarray, ranks: int, rank: int, step: int) -> list[int]:
    """The places in lengths (int64 [k]) that `rank` gets in step `step`, longest first.

    The longest sample goes to the emptiest bin, ties to the lowest one; bins move on by one rank
    a step, so that no rank always has the many short samples.
    """
    # The same sort as speculators', which is not stable: equal lengths must fall alike.
    falling = np.argsort(lengths)[::-1]
    if ranks == 1:
        return falling.tolist()
    mine, slot = [], (rank - step) % ranks
    heap = list(range(ranks))
    for place, size in zip(falling.tolist(), (lengths[falling] * ranks).tolist(), strict=True):
        if heap[0] % ranks == slot:
            mine.append(place)
        heapreplace(heap, heap[0] + size)
    return mine


class Sampling:
    """Batches of every epoch and rank; may be pickled."""

    def __init__(
        self,
        lengths: np.ndarray,
        seq_len: int,
        *,
        ranks: int = 1,
        seed: int = 0,
        shard_of: np.ndarray | None = None,
        window: int = 0,
    ):
        """lengths: tokens of each sample, int [n]. shard_of, window: see epoch_order.

        ValueError where seq_len or ranks is not positive or window is negative.
        """
        if seq_len < 1 or ranks < 1 or window < 0:
            raise ValueError(f"seq_len {seq_len}, ranks {ranks}, window {window}")
        self.lengths = np.minimum(np.asarray(lengths, dtype=np.int64), seq_len)
        self.seq_len, self.ranks, self.seed = seq_len, ranks, seed
        self.shard_of, self.window = shard_of, window
        self._bounds: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.lengths)

    def order(self, epoch: int) -> np.ndarray:
        """Samples in the order of an epoch, int64 [n]; the same for any number of ranks."""
        return epoch_order(
            len(self), epoch, seed=self.seed, shard_of=self.shard_of, window=self.window
        )

    def bounds(self, epoch: int) -> np.ndarray:
        """int64 [steps + 1]: step s takes order[bounds[s]:bounds[s+1]]; kept for each epoch."""
        if epoch not in self._bounds:
            order = self.order(epoch)
            self._bounds[epoch] = step_bounds(self.lengths[order], self.seq_len, self.ranks)
        return self._bounds[epoch]

    def steps(self, epoch: int) -> int:
        """Steps of an epoch, the same on every rank."""
        return len(self.bounds(epoch)) - 1

    def step_sums(self, epoch: int, values: np.ndarray) -> np.ndarray:
        """For each step the sum of values (one a sample) over all ranks, int64 [steps]."""
        bounds = self.bounds(epoch)
        sums = np.concatenate([[0], np.cumsum(np.asarray(values, np.int64)[self.order(epoch)])])
        return np.diff(sums[bounds])

    def first_sample(self, epoch: int, step: int) -> int:
        """How many samples of the epoch's order come before a step (all ranks together)."""
        return int(self.bounds(epoch)[step])

    def step_at(self, epoch: int, sample: int) -> int:
        """The first step that takes no sample before place `sample` of the epoch's order; their
        number where there is none."""
        return int(min(np.searchsorted(self.bounds(epoch), sample), self.steps(epoch)))

    def batches(self, epoch: int, rank: int = 0) -> Batches:
        """The batches of a rank in an epoch; ValueError for a rank that is not there."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} of {self.ranks}")
        return Batches(self.lengths, self.order(epoch), self.bounds(epoch), self.ranks, rank)


class Batches(Sequence[np.ndarray]):
    """The batches of one rank in one epoch, each int64 [samples], put together when asked for."""

    def __init__(
        self,
        lengths: np.ndarray,
        order: np.ndarray,
        bounds: np.ndarray,
        ranks: int,
        rank: int,
        steps: range | None = None,
    ):
        """See Sampling.batches. steps: those that this part holds; all by default."""
        self._lengths, self._order, self._bounds = lengths, order, bounds
        self._ranks, self._rank = ranks, rank
        self._steps = range(len(bounds) - 1) if steps is None else steps

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, at: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, at: slice) -> Batches: ...

    def __getitem__(self, at: int | slice) -> np.ndarray | Batches:
        steps = self._steps[at]
        if isinstance(steps, range):
            return Batches(self._lengths, self._order, self._bounds, self._ranks, self._rank, steps)
        run = self._order[self._bounds[steps] : self._bounds[steps + 1]]
        return run[deal(self._lengths[run], self._ranks, self._rank, steps)]
