"""What a checkpoint holds of model, optimizers and random numbers, in one form for any ranks.

speculators writes the optimizer by parameter number where one process holds it all and by parameter
name where FSDP shares it out (0.9.0, train/checkpointer.py), so that neither goes on with what the
other left. Here both are torch's full state dict by name (torch.distributed.checkpoint.state_dict):
written by 2 ranks with FSDP, read by one process, or the other way round. All floats are float32.

Random numbers: an EAGLE-3 step of speculators 0.9.0 draws none (no dropout, no noise; the loader's
seed comes from a generator of its own, dataset.py). The state is kept all the same, for each rank,
so that a loss or a layer that draws is resumed exactly, too.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from speculators.train.checkpointer import (
    BaseCheckpointer,
    SingleGPUCheckpointer,
    convert_float_dtype,
    load_safetensors_state_dict,
    patch_config_dtype,
)
from speculators.train.distributed import get_rank, is_distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

RANDOM = "random-{}.pt"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class WholeCheckpointer(BaseCheckpointer):
    """speculators' checkpointer, with full states whether or not the model is shared out."""

    def load_model_state_dict(self, model: Any, float_dtype: torch.dtype | None = None) -> None:
        """Weights of the newest checkpoint into the model; what it lacks (the verifier's) stays.

        All ranks call it where the model is shared out (FSDP).
        """
        state = load_safetensors_state_dict(self.model_path(self.previous_epoch), "cpu")
        options = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=shared_out(model), strict=False
        )
        set_model_state_dict(model, state, options=options)

    def load_optimizer_state_dict(
        self, model: Any, optimizer: Any, float_dtype: torch.dtype | None = None
    ) -> None:
        """Optimizer states of the newest checkpoint, by parameter name or, as earlier versions of
        this package wrote them without FSDP, by number."""
        path = self.optimizer_path(self.previous_epoch)
        state = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        if isinstance(state, list) or any(isinstance(k, int) for k in state["state"]):
            SingleGPUCheckpointer.load_optimizer_state_dict(self, model, optimizer, float_dtype)
            return
        for each in optimizer:
            for group in each.param_groups:
                # torch lays the file over the optimizer's own keys; the scheduler, which adds this
                # one, comes later (KeyError 'param_groups.0.initial_lr', torch 2.13.0).
                group.setdefault("initial_lr", group["lr"])
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=shared_out(model))
        set_optimizer_state_dict(model, optimizer, state, options=options)
        del state
        _let_go_of_the_file(optimizer)

    def save_checkpoint(
        self,
        model: Any,
        optimizer: Any,
        epoch: int | str,
        float_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Write weights, config.json and optimizer states to the folder `epoch`; rank 0 does, all
        ranks call it."""
        weights = get_model_state_dict(model, options=WHOLE)
        steps = get_optimizer_state_dict(model, optimizer, options=WHOLE)
        if get_rank() == 0:
            folder = self.path / str(epoch)
            raw = getattr(model, "module", model)  # within DistributedDataParallel
            raw.save_pretrained(folder, state_dict=convert_float_dtype(weights, float_dtype))
            patch_config_dtype(folder / "config.json", float_dtype)
            torch.save(convert_float_dtype(steps, float_dtype), self.optimizer_path(epoch))
        if is_distributed():
            dist.barrier()


def _let_go_of_the_file(optimizers: list[torch.optim.Optimizer]) -> None:
    """What lies on the CPU (of AdamW on a GPU its step counters) is still in the map of the file.

    Training deletes checkpoints as it goes on, and NFS keeps a mapped file's folder from going.
    set_optimizer_state_dict leaves references in a cycle, too (torch 2.13.0).
    """
    for optimizer in optimizers:
        for values in optimizer.state.values():
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                    values[name] = value.clone()
    gc.collect()


def shared_out(model: Any) -> bool:
    """Whether each rank holds a share of the weights only (FSDP)."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def random_state() -> dict[str, Any]:
    """The random state of this process: python's, numpy's, torch's, its GPU's."""
    version, numbers, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [str(name), keys.tolist(), int(place), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Go on with the random numbers from where `random_state` was taken."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def random_state_kept() -> Iterator[None]:
    """What is drawn within moves no number that is drawn after."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def save_random(folder: Path, rank: int) -> None:
    """Write this rank's random state into a checkpoint."""
    torch.save(random_state(), folder / RANDOM.format(rank))


def load_random(folder: Path, rank: int) -> None:
    """Go on with the random state of this rank in a checkpoint.

    A rank that joins a run has none there, nor have checkpoints of earlier versions: these go on
    from the run's seed, as at a start.
    """
    path = folder / RANDOM.format(rank)
    if path.exists():
        set_random_state(torch.load(path, weights_only=True, map_location="cpu"))
