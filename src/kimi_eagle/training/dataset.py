"""Training data straight from the shards: dataset, batch sampler and loader for the Trainer.

ShardDataset gives what speculators' ArrowDataset gives (0.9.0, train/data.py), but reads token
ids, mask and states of a sample together, when it is its turn: training starts from the indexes
alone. Every sample's digest is compared before its states are used; `damage.py` says what follows
from a difference. ShardLoader is torch's DataLoader with speculators' settings; without data
workers a thread makes the next batches while the model computes.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import BaseDataset, CollateFn
from speculators.train.recovery import SampleUnavailable
from torch.utils.data import DataLoader, Sampler, get_worker_info

from kimi_eagle.errors import RunError
from kimi_eagle.shards.sampling import Sampling
from kimi_eagle.shards.store import ShardSet
from kimi_eagle.training.damage import DamageLog
from kimi_eagle.training.tensors import bfloat16_view

READ_THREADS = 2
"""Threads that check and decode the samples of a batch, in a process without data workers."""

BATCHES_AHEAD = 2
"""Batches that wait for a process without data workers: 1.1 GB each for Kimi-K2.5 at 20,000."""

PREFETCH_FACTOR = 4
"""Batches that wait for each data worker, as speculators has it."""


class ShardDataset(BaseDataset):
    """Samples first..last-1 of a store; may be pickled for data workers, which open it anew."""

    def __init__(
        self,
        store: ShardSet,
        samples: range,
        max_len: int,
        hidden_states_dtype: torch.dtype,
        damage: DamageLog,
    ):
        """samples: numbers in the store. max_len: tokens of a batch (speculators' name for it)."""
        self.store, self.samples, self.damage = store, samples, damage
        self._pool: ThreadPoolExecutor | None = None
        super().__init__(max_len, hidden_states_dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pool": None}

    def __len__(self) -> int:
        return len(self.samples)

    def _compute_approx_lengths(self) -> np.ndarray:
        return self.store.lengths[self.samples.start : self.samples.stop]

    @property
    def shard_of(self) -> np.ndarray:
        """int32 [n]: the number of each sample's shard."""
        return self.store.shard_of[self.samples.start : self.samples.stop]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any] | SampleUnavailable]:
        """The samples of a batch, for torch's loader; states are decoded in threads."""
        if get_worker_info() is not None or len(indices) < 2:
            return [self[i] for i in indices]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READ_THREADS, "read-sample")
        return list(self._pool.map(self.__getitem__, indices))

    def _get_raw_data(self, index: int) -> dict[str, torch.Tensor] | SampleUnavailable:
        """hidden_states [T, (L-1) H] and verifier_last_hidden_states [T, H] bfloat16, input_ids and
        loss_mask int64 [T]. RunError for a damaged sample where those are not skipped."""
        number = self.samples[index]
        try:
            sample = self.store.proven(number)
        except RunError as e:
            return self._damaged(number, e.what)
        states = bfloat16_view(sample["hidden_states"])
        return {
            "hidden_states": states[:, :-1].flatten(1),
            "input_ids": torch.from_numpy(sample["token_ids"].astype(np.int64)),
            "verifier_last_hidden_states": states[:, -1],
            "loss_mask": torch.from_numpy(sample["loss_mask"].astype(np.int64)),
        }

    def _damaged(self, number: int, what: str) -> SampleUnavailable:
        path = self.store.shards[self.store.shard_of[number]].path
        try:
            path.stat()
        except OSError as e:
            # A file that is gone, or all of a file system: no reason to train without it.
            raise RunError(f"cannot be read any more: {e.strerror}", where=path) from e
        return SampleUnavailable(reason=self.damage.meet(path, self.store.ids[number], what).what)


class ShardBatchSampler(Sampler[np.ndarray]):
    """A rank's batches, epoch by epoch: `accumulate` for each step, one after the other.

    sampling: of ranks x accumulate bins. A rank takes its bins side by side, so that N ranks with
    one batch a step and one rank with N take the same samples in each step.
    """

    def __init__(self, sampling: Sampling, rank: int = 0, accumulate: int = 1):
        self.sampling, self.accumulate = sampling, accumulate
        self.lanes = range(rank * accumulate, (rank + 1) * accumulate)
        self.epoch, self.first_step = 0, 0

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """The epoch that is iterated next, and its step to begin with: no earlier one is read."""
        self.epoch, self.first_step = epoch, first_step

    def __len__(self) -> int:
        """Batches of the whole epoch."""
        return self.sampling.steps(self.epoch) * self.accumulate

    def __iter__(self) -> Iterator[np.ndarray]:
        rest = [self.sampling.batches(self.epoch, lane)[self.first_step :] for lane in self.lanes]
        return chain.from_iterable(zip(*rest, strict=True))


class ShardLoader(DataLoader):
    """speculators' loader (0.9.0, train/dataloader.py) over a ShardDataset.

    workers: processes that read; 0: threads of this process do, BATCHES_AHEAD batches ahead.
    Order and content of the batches do not depend on it, nor does torch's global random state.
    """

    on_batch: Callable[[], None] | None = None
    """Called each time before a batch is waited for."""

    def __init__(
        self,
        dataset: ShardDataset,
        sampler: ShardBatchSampler,
        *,
        hidden_size: int,
        target_layers: int,
        workers: int,
        pin_memory: bool,
    ):
        """target_layers: layers that the draft reads, without the verifier's last one."""
        super().__init__(
            dataset,
            batch_sampler=sampler,
            num_workers=workers,
            prefetch_factor=PREFETCH_FACTOR if workers else None,
            pin_memory=pin_memory,
            # torch draws the workers' seeds from it: a resumed epoch draws again, which must not
            # move the numbers that training draws.
            generator=torch.Generator(),
            collate_fn=CollateFn(
                dataset.max_len,
                hidden_size,
                num_target_layers=target_layers,
                dtype=dataset.hidden_states_dtype,
                preprocess=shift_batch,
            ),
            persistent_workers=workers > 0,
            multiprocessing_context="spawn" if workers else None,
            worker_init_fn=_start_worker if workers else None,
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with _one_thread_each():
            batches = super().__iter__()
        made = batches if self.num_workers else _ahead(batches, BATCHES_AHEAD, self.pin_memory)
        return made if self.on_batch is None else _told(made, self.on_batch)


def _told(batches: Iterator[Any], before: Callable[[], None]) -> Iterator[Any]:
    while True:
        before()
        try:
            batch = next(batches)
        except StopIteration:
            return
        yield batch


def _ahead(batches: Iterator[Any], depth: int, pinned: bool) -> Iterator[Any]:
    """The same batches, made by a thread; it ends with the iterator, and its errors come here."""
    made: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()
    room, over = threading.Semaphore(depth), threading.Event()

    def work() -> None:
        try:
            if pinned and torch.accelerator.is_available():
                _own_device()  # the current device belongs to the thread
            while True:
                room.acquire()
                if over.is_set():
                    return
                made.put((next(batches), None))
        except BaseException as e:
            made.put((None, e))

    thread = threading.Thread(target=work, name="batches-ahead", daemon=True)
    thread.start()
    try:
        while True:
            batch, fault = made.get()
            if isinstance(fault, StopIteration):
                return
            if fault is not None:
                raise fault
            room.release()
            yield batch
    finally:
        over.set()
        room.release()
        if not sys.is_finalizing():  # then the thread stands still already
            thread.join()


def _start_worker(_number: int) -> None:
    torch.set_num_threads(1)
    if torch.accelerator.is_available():
        _own_device()


def _own_device() -> None:
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Data workers start with pools of one thread: they import numpy and torch anew."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    for name in names:
        os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
