"""speculators' Trainer with whole checkpoints, a stop between steps and a CPU.

Overrides methods of the public class only; the epoch loop, the step, the optimizers and the
schedule are speculators' own (0.9.0, train/trainer.py). Differences in behaviour: `max_steps`
ends the run, not each epoch; a stop saves a checkpoint from which the same run goes on (the
original's `interrupted/` is never taken up again); every epoch keeps its validation metrics. A
position within an epoch counts samples, too: with another number of ranks a step takes others, and
going on there reads no sample of the epoch twice and leaves out less than a step's (the schedule
goes on by steps done).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from speculators.train.trainer import Trainer

from kimi_eagle import files
from kimi_eagle.errors import RunError
from kimi_eagle.shards.sampling import Sampling
from kimi_eagle.training import checkpoints


class _StopTraining(Exception):
    """Leaves `train_epoch` from its step callback."""


class ShardTrainer(Trainer):
    """Trainer whose `run` answers whether it was interrupted.

    The loaders are ShardLoaders. device: "cpu" or "cuda". after_step: called after each optimizer
    step with the number of steps done; True asks for a stop. on_validated: called on all ranks with
    an epoch and its metrics, to add to them. Further arguments: speculators' own.
    """

    def __init__(
        self,
        *args: Any,
        device: str,
        after_step: Callable[[int], bool],
        on_validated: Callable[[int, dict[str, Any]], None] | None = None,
        **kwargs: Any,
    ):
        self._device = device
        self._callback = after_step
        self._on_validated = on_validated
        self._local_step = 0
        super().__init__(*args, **kwargs)

    def setup_trainer(self) -> None:
        """As the original, on the device asked for.

        The original moves batches to the integer rank 0 and takes 'cuda' for autocast where
        torch sees no accelerator.
        """
        if self._device == "cpu":
            self.local_rank = torch.device("cpu")
            self.device_type = "cpu"
        super().setup_trainer()
        samples = self._load_training_state().get("samples")
        if self._resume_local_step and samples is not None:
            self._resume_local_step = self._sampling.step_at(self.current_epoch, samples)

    def run(self) -> bool:
        """Train to the last epoch or `max_steps`; True when a stop was asked for before."""
        root = self.checkpointer.path
        done = self.checkpointer.previous_epoch
        if done >= 0 and checkpoints.ended(root, done) and not checkpoints.validated(root, done):
            self._validate(done)
        for epoch in range(self.current_epoch, self.config.num_epochs):
            if self._reached_max_steps():
                break
            resumed = epoch == self.current_epoch
            self._local_step = self._resume_local_step if resumed else 0
            try:
                self.train_epoch(epoch, step_callback=self._after_step)
            except _StopTraining:
                self.maybe_save_checkpoint(epoch, local_step=self._local_step)
                return True
            self.maybe_save_checkpoint(epoch)
            self._validate(epoch)
        return False

    def maybe_save_checkpoint(self, epoch: int | str, local_step: int = 0) -> None:
        """Write checkpoint `epoch` in full precision, whole or not at all."""
        root = self.checkpointer.path
        staged = f"{checkpoints.SAVING}{epoch}"
        if self.rank == 0:
            shutil.rmtree(root / staged, ignore_errors=True)
        self.checkpointer.save_checkpoint(self.model, self.optimizers, staged, torch.float32)
        if self.schedulers:
            self.checkpointer.save_scheduler_state_dict(self.schedulers, staged)
        if self.rank == 0:
            state = {"epoch": epoch, "local_step": local_step, "global_step": self.global_step}
            state["samples"] = self._sampling.first_sample(epoch, local_step)
            (root / staged / checkpoints.STATE).write_text(json.dumps(state))
            checkpoints.commit(root, int(epoch))
        self._barrier()

    @property
    def _sampling(self) -> Sampling:
        return self.train_loader.batch_sampler.sampling

    def _after_step(self) -> None:
        self._local_step += 1
        stop = self._callback(self.global_step)
        if self.is_distributed:
            flag = torch.tensor(float(stop), device=self.local_rank)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            stop = bool(flag.item())
        # The last step of the run needs no stop: its checkpoint is due anyway.
        if stop and not self._reached_max_steps():
            raise _StopTraining

    def _reached_max_steps(self) -> bool:
        return self.config.max_steps is not None and self.global_step >= self.config.max_steps

    def _validate(self, epoch: int) -> None:
        self._barrier()
        metrics = self.val_epoch(epoch) or {}
        loss = metrics.get("loss_epoch")
        if loss is None or not math.isfinite(loss):
            raise RunError(f"validation loss of epoch {epoch} is {loss}", expected="a number")
        if self._on_validated:
            self._on_validated(epoch, metrics)
        if self.rank == 0:
            path = self.checkpointer.val_metrics_path(epoch)
            files.write_atomic(path, json.dumps(metrics))
            checkpoints.link_best(self.checkpointer.path)
        self._barrier()

    def _barrier(self) -> None:
        if self.is_distributed:
            dist.barrier()
