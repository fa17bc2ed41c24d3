"""speculators' Trainer with whole checkpoints, a stop between steps, any ranks and a CPU.

Overrides methods of the public class only; optimizers, schedule and validation are speculators' own
(0.9.0, train/trainer.py), the step is in `steps.py`. Differences in behaviour: `max_steps` ends
the run, not each epoch; a stop saves a checkpoint from which the same run goes on (the original's
`interrupted/` is never taken up again); every epoch keeps its validation metrics.

Other ranks may go on with a run. Where ranks x accumulate is as before, its steps are the same.
Else a step takes other samples: the position within the epoch counts samples, no sample of the
epoch is read twice and less than a step's are left out; steps are counted on, and the learning rate
goes on from where it was, to end with the run.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from kimi_eagle import files
from kimi_eagle.errors import RunError
from kimi_eagle.shards.sampling import Sampling
from kimi_eagle.training import checkpoints, states
from kimi_eagle.training.steps import StepTrainer


class _StopTraining(Exception):
    """Leaves `train_epoch` from its step callback."""


class ShardTrainer(StepTrainer):
    """Trainer whose `run` answers whether it was interrupted.

    The loaders are ShardLoaders. device: "cpu" or "cuda". after_step: called after each optimizer
    step with the number of steps done; True on any rank asks for a stop. on_validated: called on
    all ranks with an epoch and its metrics, to add to them. doing: told what this rank does next,
    with the steps done; worked: see StepTrainer. keep: checkpoints kept besides the best. Further
    arguments: speculators' own.
    """

    def __init__(
        self,
        *args: Any,
        device: str,
        after_step: Callable[[int], bool],
        on_validated: Callable[[int, dict[str, Any]], None] | None = None,
        doing: Callable[[str, int], None] = lambda _doing, _step: None,
        worked: Callable[[float], None] = lambda _seconds: None,
        keep: int = 1,
        **kwargs: Any,
    ):
        self._device, self._keep = device, keep
        self._doing, self.worked = doing, worked
        self._callback = after_step
        self._on_validated = on_validated
        self._local_step = 0
        super().__init__(*args, **kwargs)

    def doing(self, what: str) -> None:
        """Tell what this rank does next."""
        self._doing(what, self.global_step)

    def setup_trainer(self) -> None:
        """As the original, on the device asked for and with our checkpoints.

        The original moves batches to the integer rank 0 and takes 'cuda' for autocast where
        torch sees no accelerator.
        """
        if self._device == "cpu":
            self.local_rank = torch.device("cpu")
            self.device_type = "cpu"
        self.checkpointer = states.WholeCheckpointer(self.config.save_path)
        super().setup_trainer()
        saved = self._load_training_state()
        lanes = saved.get("lanes")
        self._moved = lanes is not None and lanes != self._sampling.ranks
        if self._resume_local_step and "samples" in saved:
            self._resume_local_step = self._sampling.step_at(self.current_epoch, saved["samples"])
        self._local_step = self._resume_local_step

    def setup_optimizer(self) -> None:
        """As the original; where the steps are others than before, the learning rate takes the
        place in the schedule that the samples read so far have in the run."""
        super().setup_optimizer()
        if not self._moved:
            return
        for scheduler in self.schedulers:
            scheduler.last_epoch = self.position
            rates = [f(self.position) for f in scheduler.lr_lambdas]
            rates = [base * r for base, r in zip(scheduler.base_lrs, rates, strict=True)]
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            scheduler._last_lr = rates

    @property
    def position(self) -> int:
        """Steps of the run as planned for these ranks that lie behind: the steps done, unless
        other ranks did some of them."""
        if self.config.max_steps is not None:
            return self.global_step
        return sum(map(self._sampling.steps, range(self.current_epoch))) + self._local_step

    def run(self) -> bool:
        """Train to the last epoch or `max_steps`; True when a stop was asked for before."""
        root = self.checkpointer.path
        if self.checkpointer.prev_path is not None:
            states.load_random(self.checkpointer.prev_path, self.rank)
        done = self.checkpointer.previous_epoch
        if done >= 0 and checkpoints.ended(root, done) and not checkpoints.validated(root, done):
            self._validate(done)
        for epoch in range(self.current_epoch, self.config.num_epochs):
            if self._reached_max_steps():
                break
            self.current_epoch, self._local_step = epoch, self._resume_local_step
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
        self.check_finite(int(epoch))
        self.doing("checkpoint")
        root = self.checkpointer.path
        staged = f"{checkpoints.SAVING}{epoch}"
        if self.rank == 0:
            shutil.rmtree(root / staged, ignore_errors=True)
        self.checkpointer.save_checkpoint(self.model, self.optimizers, staged, torch.float32)
        if self.schedulers:
            self.checkpointer.save_scheduler_state_dict(self.schedulers, staged)
        states.save_random(root / staged, self.rank)
        self._barrier()
        if self.rank == 0:
            state = {"epoch": epoch, "local_step": local_step, "global_step": self.global_step}
            state["samples"] = self._sampling.first_sample(epoch, local_step)
            state["lanes"] = self._sampling.ranks
            (root / staged / checkpoints.STATE).write_text(json.dumps(state))
            checkpoints.commit(root, int(epoch))
            checkpoints.prune(root, self._keep)
        self._barrier()

    @property
    def _sampling(self) -> Sampling:
        return self.train_loader.batch_sampler.sampling

    def _after_step(self) -> None:
        self._local_step += 1
        self.doing("after the step")
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
        self.val_loader.on_batch = lambda: self.doing("validation")
        with states.random_state_kept():
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
            checkpoints.prune(self.checkpointer.path, self._keep)
        self._barrier()

    def _barrier(self) -> None:
        if self.is_distributed:
            dist.barrier()
