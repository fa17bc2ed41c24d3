"""Order and packing of samples: speculators' own batches, found faster, with windows of shards."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest

from kimi_eagle.shards.sampling import Sampling, epoch_order, step_bounds


def some_lengths(rng: np.random.Generator, kind: str, seq_len: int) -> np.ndarray:
    n = int(rng.integers(0, 300))
    if kind == "even":
        return rng.integers(1, seq_len + 1, n)
    if kind == "ties":
        return rng.integers(1, 4, n)
    lengths = rng.lognormal(np.log(max(2, seq_len / 8)), 1.0, n).astype(int) + 1
    lengths[rng.random(n) < 0.1] = 3 * seq_len  # longer than a step: counted as seq_len
    return lengths


@pytest.mark.parametrize("kind", ["even", "ties", "long"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_batches_are_those_of_speculators(kind, ranks):
    """The same indices in the same order, on every rank, in any epoch."""
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    rng = np.random.default_rng(ranks)
    seen = 0
    for seed in range(15):
        seq_len = int(rng.integers(4, 200))
        lengths = some_lengths(rng, kind, seq_len)
        ours = Sampling(lengths, seq_len, ranks=ranks, seed=seed)
        for rank in range(ranks):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs = MultipackDistributedBatchSamplerV2(
                    seq_len, lengths.tolist(), ranks, rank, seed=seed
                )
            for epoch in (0, 4):
                theirs.set_epoch(epoch)
                got = [batch.tolist() for batch in ours.batches(epoch, rank)]
                assert got == [batch.tolist() for batch in theirs]
                seen += len(got)
    assert seen > 100


@pytest.mark.parametrize("window", [0, 3])
def test_ranks_share_the_samples_and_the_steps(window):
    rng = np.random.default_rng(0)
    lengths, shard_of = rng.integers(1, 60, 1000), np.repeat(np.arange(20), 50)
    sampling = Sampling(lengths, 100, ranks=4, shard_of=shard_of, window=window)
    parts = [sampling.batches(0, rank) for rank in range(4)]
    assert {len(part) for part in parts} == {sampling.steps(0)}
    taken = np.concatenate([batch for part in parts for batch in part])
    assert len(np.unique(taken)) == len(taken) > 1000 - 4, "fewer than `ranks` are left out"
    fills = np.array([[lengths[batch].sum() for batch in part] for part in parts])
    assert fills.max() <= 100
    assert np.array_equal(sampling.step_sums(0, lengths), fills.sum(axis=0))


def test_windows_keep_shards_together():
    """Samples of `window` shards are mixed, then come those of the next ones."""
    shard_of = np.repeat(np.arange(12), 10)
    order = epoch_order(120, 0, seed=1, shard_of=shard_of, window=3)
    assert sorted(order) == list(range(120))
    groups = [set(shard_of[part]) for part in order.reshape(4, 30)]
    assert [len(g) for g in groups] == [3, 3, 3, 3] and set.union(*groups) == set(range(12))
    assert any(len(set(shard_of[order[i : i + 10]])) == 3 for i in range(0, 30, 10))
    assert [min(g) for g in groups] != sorted(min(g) for g in groups), "shards come in random order"
    other = epoch_order(120, 1, seed=1, shard_of=shard_of, window=3)
    assert [set(shard_of[part]) for part in other.reshape(4, 30)] != groups


def test_a_window_over_all_shards_is_none():
    shard_of = np.repeat(np.arange(12), 10)
    whole = epoch_order(120, 5, seed=2)
    assert np.array_equal(epoch_order(120, 5, seed=2, shard_of=shard_of, window=12), whole)
    with pytest.raises(ValueError, match="window 3"):
        epoch_order(120, 5, seed=2, window=3)


def test_the_order_is_the_seeds_alone():
    lengths = np.full(50, 7)
    one, again, other = (Sampling(lengths, 20, seed=s) for s in (3, 3, 4))
    assert np.array_equal(one.order(2), again.order(2))
    assert not np.array_equal(one.order(2), other.order(2))
    assert not np.array_equal(one.order(2), one.order(3))
    assert np.array_equal(one.order(1), Sampling(lengths, 40, ranks=4, seed=3).order(1))


def test_going_on_from_a_position():
    lengths = np.random.default_rng(0).integers(1, 60, 500)
    sampling = Sampling(lengths, 100, ranks=2, seed=1)
    whole = [batch.tolist() for batch in sampling.batches(1, 1)]
    again = pickle.loads(pickle.dumps(sampling))
    rest = again.batches(1, 1)[7:]
    assert len(rest) == len(whole) - 7
    assert [batch.tolist() for batch in rest] == whole[7:]
    assert rest[2:][0].tolist() == whole[9] and rest[-1].tolist() == whole[-1]
    with pytest.raises(IndexError):
        rest[len(rest)]


def test_another_number_of_ranks_goes_on_by_samples():
    """Nothing is read twice, and less than a step's worth is left out."""
    lengths = np.random.default_rng(0).integers(1, 60, 2000)
    eight, two = (Sampling(lengths, 100, ranks=r, seed=1) for r in (8, 2))
    done = [i for r in range(8) for batch in eight.batches(0, r)[:20] for i in batch]
    assert eight.first_sample(0, 20) == len(done)
    step = two.step_at(0, len(done))
    rest = [i for r in range(2) for batch in two.batches(0, r)[step:] for i in batch]
    assert not set(done) & set(rest)
    per_step = np.diff(two.bounds(0)).max()
    assert 2000 - len(done) - len(rest) < per_step + 2
    assert two.step_at(0, two.first_sample(0, 5)) == 5


def test_other_ranks_at_the_end_of_an_epoch_have_no_step_left():
    """One rank reads the samples that eight leave out."""
    lengths = np.full(987, 30)
    one, eight = (Sampling(lengths, 100, ranks=r) for r in (1, 8))
    assert one.first_sample(0, one.steps(0)) == 987 > eight.first_sample(0, eight.steps(0))
    assert eight.step_at(0, 987) == eight.steps(0)


@pytest.mark.parametrize(("window", "ranks"), [(0, 1), (0, 8), (64, 8)])
def test_a_million_samples_are_packed_well(window, ranks):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(1700), 0.6, 10**6), 16, 20_000).astype(np.int32)
    shard_of = np.repeat(np.arange(10_000, dtype=np.int32), 100)
    sampling = Sampling(lengths, 20_000, ranks=ranks, shard_of=shard_of, window=window)
    first = sampling.batches(0)[0]
    assert len(first)
    fill = sampling.step_sums(0, lengths).sum() / (sampling.steps(0) * ranks * 20_000)
    assert fill > (0.92 if ranks == 1 else 0.975)
    if window:
        run = sampling.order(0)[: sampling.first_sample(0, 10)]
        assert len(np.unique(shard_of[run])) <= window


@pytest.mark.parametrize("ranks", [1, 4])
def test_no_samples_no_steps(ranks):
    assert step_bounds(np.zeros(0, np.int64), 10, ranks).tolist() == [0]
    sampling = Sampling(np.zeros(0), 10, ranks=ranks)
    assert sampling.steps(0) == 0 and list(sampling.batches(0)) == []


@pytest.mark.parametrize("wrong", [{"seq_len": 0}, {"ranks": 0}, {"window": -1}])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="seq_len"):
        Sampling(np.ones(3), **{"seq_len": 4, **wrong})
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Sampling(np.ones(3), 4, ranks=2).batches(0, 2)
