"""What speculators needs to train without an accelerator, and without noise on stdout.

Each patch is named with library, version, place and reason; `tests/training/test_patches.py`
shows the unpatched failure of each and so fails on the day when one is no longer needed. Only
module attributes are replaced, and only where no public parameter or overridden method of
`trainer.ShardTrainer` can do the same (device and autocast type are set there).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import speculators.train.checkpointer
import speculators.train.trainer
import torch
import torch.distributed as dist
from speculators.train import distributed


@dataclass(frozen=True)
class Patch:
    """One replaced attribute: `owner.name = replacement`."""

    library: str
    place: str
    reason: str
    owner: Any
    name: str
    replacement: Callable[..., Any]


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _cpu(*_args: Any, **_kwargs: Any) -> str:
    return "cpu"


def _plain_loop(iterable: Iterable[Any], **_kwargs: Any) -> Iterable[Any]:
    return iterable


def _over_gloo(sp_size: int = 1) -> None:
    """`maybe_setup_distributed` for ranks without accelerators; sp_size as there."""
    distributed._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    distributed._is_distributed = "LOCAL_RANK" in os.environ
    if not distributed._is_distributed:
        return
    dist.init_process_group("gloo")
    distributed._rank, distributed._world_size = dist.get_rank(), dist.get_world_size()
    distributed._init_sp_process_groups(distributed._rank, distributed._world_size, sp_size)


QUIET_PATCHES = (
    Patch(
        library="speculators 0.9.0",
        place="train/trainer.py, train_epoch and val_epoch",
        reason="a rich progress bar is drawn on stdout whether or not it is a terminal; "
        "progress goes through on_progress here",
        owner=speculators.train.trainer,
        name="tqdm",
        replacement=_plain_loop,
    ),
)

CPU_PATCHES = (
    Patch(
        library="speculators 0.9.0 with torch 2.13.0",
        place="train/trainer.py, _StepTimer.mark and now",
        reason="every logged step calls torch.accelerator.synchronize, which raises "
        "'Cannot access accelerator device when none is available'",
        owner=torch.accelerator,
        name="synchronize",
        replacement=_nothing,
    ),
    Patch(
        library="speculators 0.9.0",
        place="train/checkpointer.py, SingleGPUCheckpointer.load_*",
        reason="get_current_device answers 'cuda:0' where there is no accelerator, "
        "so that resuming fails",
        owner=speculators.train.checkpointer,
        name="get_current_device",
        replacement=_cpu,
    ),
    Patch(
        library="speculators 0.9.0",
        place="train/distributed.py, maybe_setup_distributed",
        reason="it sets the index of an accelerator and takes the backend that belongs to it, "
        "so that ranks of torchrun on CPUs end with 'No accelerator found' or before",
        owner=distributed,
        name="maybe_setup_distributed",
        replacement=_over_gloo,
    ),
)

_originals: dict[Patch, Any] = {}


def apply(device: str) -> None:
    """Put the patches for training on `device` ("cpu" or "cuda") in place.

    A second call changes nothing.
    """
    for patch in QUIET_PATCHES + (CPU_PATCHES if device == "cpu" else ()):
        if patch not in _originals:
            _originals[patch] = getattr(patch.owner, patch.name)
            setattr(patch.owner, patch.name, patch.replacement)


def remove() -> None:
    """Take all patches away again (for tests)."""
    for patch, original in _originals.items():
        setattr(patch.owner, patch.name, original)
    _originals.clear()
