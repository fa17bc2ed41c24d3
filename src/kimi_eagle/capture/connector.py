"""How hidden states leave vLLM: two connectors over the stock ExampleHiddenStatesConnector.

Reads the cache that vLLM's `extract_hidden_states` method fills; writes to this process's memory
(MemoryConnector) or one safetensors file a request (FileConnector).

MemoryConnector is for an engine that runs in this process (CPU, one rank): no file, no lock, one
copy. FileConnector is for engines with processes of their own (GPUs, tensor parallel). It differs
from the stock one in two ways: a file appears whole under its name or not at all (the stock one
asks readers to wait on flock, which not every file system honours), and it works on CPU, where
the stock one fails on pinned memory and CUDA streams. Its GPU path is vLLM's own, not run on a
GPU by this project's tests.

Overrides follow vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py,
vLLM 0.31.0. vLLM imports this module by name, so it may import torch and vLLM at the top.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
)

finished: deque[tuple[str, torch.Tensor, torch.Tensor]] = deque()
"""MemoryConnector's hand-over: (vLLM's request id, token ids int64 [T], states [T, L, H])."""


class _Done:
    """Stands for a CUDA event: a CPU copy is complete when the call returns."""

    def query(self) -> bool:
        return True


class _CpuConnector(ExampleHiddenStatesConnector):
    """Copies on CPU; subclasses say where the copy goes."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.use_lock = False

    def _submit_async_write(self, pending: PendingSave) -> None:
        """Called in a forward step for each finished request, before its blocks are freed."""
        if not self._is_tp_rank_zero:
            return
        self._deliver(pending, _gather(self._kv_cache, pending))
        self._req_copy_events[pending.req_id] = _Done()

    def _deliver(self, pending: PendingSave, states: torch.Tensor) -> None:
        raise NotImplementedError


class MemoryConnector(_CpuConnector):
    """Appends every finished request to `finished`, in the order in which they finish."""

    def _deliver(self, pending: PendingSave, states: torch.Tensor) -> None:
        finished.append((pending.req_id, pending.token_ids, states))


class FileConnector(_CpuConnector):
    """One file a request, `hidden_states` and `token_ids`, whole or absent."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        if self._kv_cache is not None and self._kv_cache.is_cuda:
            ExampleHiddenStatesConnector._submit_async_write(self, pending)
        else:
            super()._submit_async_write(pending)

    def _deliver(self, pending: PendingSave, states: torch.Tensor) -> None:
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        _save_whole({"hidden_states": states, "token_ids": pending.token_ids}, pending.filename)

    @staticmethod
    def _write_tensors(
        tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None
    ) -> None:
        """The stock GPU path's writer thread; same arguments, but the file appears at once."""
        event.synchronize()
        _save_whole(tensors, filename)


def _save_whole(tensors: dict[str, torch.Tensor], filename: str) -> None:
    temp = f"{filename}.tmp-{os.getpid()}"
    save_file(tensors, temp)
    os.replace(temp, filename)


def _gather(cache: torch.Tensor, pending: PendingSave) -> torch.Tensor:
    """One request's states [T, L, H] out of the cache [blocks, L, block_size, H].

    Plain numpy copies block by block, on purpose: torch would share this small copy among its
    OpenMP threads and wait for them (500 tokens on a busy machine: 28 ms, not 0.06). The stock
    connector asks for [blocks, block_size, L, H] in memory, vLLM's CPU build keeps
    [blocks, L, block_size, H]; either works.
    """
    total, size = pending.token_ids.shape[0], cache.shape[2]
    states = torch.empty((total, cache.shape[1], cache.shape[3]), dtype=cache.dtype)
    source = cache.view(torch.uint8).numpy().transpose(0, 2, 1, 3)
    target = states.view(torch.uint8).numpy()
    for i, start in enumerate(range(0, total, size)):
        count = min(size, total - start)
        target[start : start + count] = source[pending.block_ids[i], :count]
    return states
