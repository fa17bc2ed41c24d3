"""Samples and batches straight from shards: those that speculators' own loaders give."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import numpy as np
import pytest

from kimi_eagle.shards import ShardSet
from kimi_eagle.shards.sampling import Sampling

SEQ_LEN = 64
SPLIT = 21


@pytest.fixture
def loaders(tmp_path):
    """`loaders(shards, workers=0)`: training and validation loaders as training makes them."""
    import torch

    from kimi_eagle.training.damage import NAME, DamageLog
    from kimi_eagle.training.dataset import ShardBatchSampler, ShardDataset, ShardLoader

    def make(shards: list[Path], *, workers: int = 0, seed: int = 3, skip: bool = False):
        store = ShardSet(shards)

        def loader(samples: range, seed: int) -> ShardLoader:
            log = DamageLog(tmp_path / NAME, skip=skip)
            data = ShardDataset(store, samples, SEQ_LEN, torch.bfloat16, log)
            sampler = ShardBatchSampler(Sampling(data.approx_lengths, SEQ_LEN, seed=seed))
            return ShardLoader(
                data, sampler, hidden_size=576, target_layers=3, workers=workers, pin_memory=False
            )

        return loader(range(SPLIT), seed), loader(range(SPLIT, len(store)), 0)

    return make


@pytest.fixture
def theirs(corpus, tmp_path):
    """speculators' own loaders over the same samples, by the view and the `shards` backend."""
    import torch

    from kimi_eagle.training.backend import ShardsTransfer, write_view

    write_view(corpus.shards, corpus.order, tmp_path / "view")
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.dataloader import create_train_val_loaders

    return create_train_val_loaders(
        data_path=str(tmp_path / "view"),
        total_seq_len=SEQ_LEN,
        hidden_states_dtype=torch.bfloat16,
        transfer=ShardsTransfer(tmp_path / "view", corpus.shards),
        vllm_endpoint="",
        on_missing="raise",
        verifier_name_or_path="",
        request_timeout=None,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=576,
        num_target_layers=3,
        num_workers=0,
        prefetch_factor=4,
        preprocess=shift_batch,
        train_data_ratio=SPLIT / len(corpus.order) + 1e-9,
        seed=3,
    )


def same(one: dict, other: dict) -> bool:
    import torch

    return one.keys() == other.keys() and all(
        torch.equal(v, other[k]) and v.dtype == other[k].dtype
        if isinstance(v, torch.Tensor)
        else v == other[k]
        for k, v in one.items()
    )


@pytest.mark.filterwarnings("ignore:.*pin_memory")
@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_batches_are_those_of_speculators_loaders(loaders, theirs, corpus, tmp_path, codec):
    """Both loaders, two epochs, bit for bit and in order."""
    (tmp_path / codec).mkdir()
    shards = corpus.shards if codec == "raw" else corpus.write(tmp_path / codec, codec)
    seen = 0
    for own, their in zip(loaders(shards), theirs, strict=True):
        for epoch in (0, 1):
            own.batch_sampler.set_epoch(epoch)
            their.batch_sampler.set_epoch(epoch)
            assert len(own) == len(their)
            for got, want in zip(own, their, strict=True):
                assert same(got, want)
                seen += 1
    assert seen > 20


@pytest.mark.campaign
def test_data_workers_change_nothing(loaders, corpus):
    """Two spawned processes a loader give the same batches, in order, epoch after epoch."""
    alone, helped = loaders(corpus.shards)[0], loaders(corpus.shards, workers=2)[0]
    for epoch in (0, 1):
        for loader in (alone, helped):
            loader.batch_sampler.set_epoch(epoch)
        for got, want in zip(helped, alone, strict=True):
            assert same(got, want)


def test_the_dataset_travels_to_data_workers(loaders, corpus):
    data = loaders(corpus.shards)[0].dataset
    data.__getitems__([0, 1, 2])  # opens files and starts threads
    again = pickle.loads(pickle.dumps(data))
    assert len(pickle.dumps(data)) < 5_000, "no states in it"
    assert same(again[2], data[2])


@pytest.fixture
def reads(monkeypatch):
    """Numbers of the samples that were read, in order."""
    seen: list[int] = []
    original = ShardSet.proven
    monkeypatch.setattr(
        ShardSet, "proven", lambda self, number: seen.append(number) or original(self, number)
    )
    return seen


def test_a_sample_is_read_once_an_epoch_and_not_long_before(loaders, corpus, reads):
    from kimi_eagle.training.dataset import BATCHES_AHEAD

    loader = loaders(corpus.shards)[0]
    wanted = [list(batch) for batch in loader.batch_sampler]
    for step, _batch in enumerate(loader):
        ahead = [i for batch in wanted[: step + 1 + BATCHES_AHEAD] for i in batch]
        assert set(reads) <= set(ahead)
    assert sorted(reads) == list(range(SPLIT))


def test_skipped_steps_are_not_read(loaders, corpus, reads):
    loader = loaders(corpus.shards)[0]
    loader.batch_sampler.set_epoch(1)
    whole = list(loader)
    reads.clear()
    loader.batch_sampler.set_epoch(1, first_step=3)
    assert all(same(got, want) for got, want in zip(loader, whole[3:], strict=True))
    left_out = {i for batch in loader.batch_sampler.sampling.batches(1)[:3] for i in batch}
    assert not left_out & set(reads) and len(reads) == SPLIT - len(left_out)
    loader.batch_sampler.set_epoch(2)
    assert len(list(loader)) == loader.batch_sampler.sampling.steps(2), "the next epoch is whole"


def test_a_rank_that_accumulates_gets_the_batches_of_several():
    from kimi_eagle.training.dataset import ShardBatchSampler

    def steps(ranks: int, accumulate: int, first_step: int = 0) -> list[list[list[int]]]:
        """By step, the batches of all ranks."""
        sampling = Sampling(lengths, SEQ_LEN, ranks=ranks * accumulate)
        found = []
        for rank in range(ranks):
            sampler = ShardBatchSampler(sampling, rank, accumulate)
            sampler.set_epoch(1, first_step)
            flat = [batch.tolist() for batch in sampler]
            found.append([flat[i : i + accumulate] for i in range(0, len(flat), accumulate)])
        return [sum(parts, []) for parts in zip(*found, strict=True)]

    lengths = np.random.default_rng(0).integers(5, SEQ_LEN, 100)
    four = steps(4, 1)
    assert len(four) > 10 and all(len(batches) == 4 for batches in four)
    assert steps(2, 2) == steps(1, 4) == four
    assert steps(2, 2, first_step=7) == four[7:]


def test_the_thread_ends_with_the_iteration(loaders, corpus):
    def threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name == "batches-ahead"]

    iteration = iter(loaders(corpus.shards)[0])
    next(iteration)
    assert threads()
    iteration.close()
    assert not threads()
    list(loaders(corpus.shards)[1])
    assert not threads()


def test_an_error_comes_at_its_batch(loaders, corpus, monkeypatch):
    loader = loaders(corpus.shards)[0]
    third = loader.batch_sampler.sampling.batches(0)[2][0]
    original = ShardSet.proven

    def fails(self, number):
        if number == third:
            raise ValueError("boom")
        return original(self, number)

    monkeypatch.setattr(ShardSet, "proven", fails)
    iteration = iter(loader)
    next(iteration), next(iteration)
    with pytest.raises(ValueError, match="boom"):
        next(iteration)


def test_several_ranks_read_no_sample_twice(corpus, tmp_path, reads):
    import torch

    from kimi_eagle.training.damage import DamageLog
    from kimi_eagle.training.dataset import ShardBatchSampler, ShardDataset, ShardLoader

    store, steps = ShardSet(corpus.shards), []
    for rank in range(2):
        log = DamageLog(tmp_path / "none", skip=False)
        data = ShardDataset(store, range(len(store)), SEQ_LEN, torch.bfloat16, log)
        sampling = Sampling(data.approx_lengths, SEQ_LEN, ranks=2, shard_of=data.shard_of, window=1)
        sampler = ShardBatchSampler(sampling, rank)
        loader = ShardLoader(
            data, sampler, hidden_size=576, target_layers=3, workers=0, pin_memory=False
        )
        steps.append(len(list(loader)))
    assert steps[0] == steps[1] > 5
    assert len(set(reads)) == len(reads) >= len(store) - 1
