"""The epoch of training: batches, gradients, one optimizer step, one line of metrics.

speculators' `Trainer.train_epoch` (0.9.0, train/trainer.py) in the same order and with its parts;
a test compares losses and accuracies with those of speculators' own command bit by bit. Written
out here because that method is one piece and gives no place for what follows. The price: a change
of speculators' step must be made here too, and that test says so.

- several batches of a rank make one step (`accumulate`): gradients are averaged over batches and
  ranks, so that N ranks with one batch and one rank with N make the same step (to rounding)
- the gradient's norm is kept and logged, and a step whose loss or norm is not finite ends the run
  with the samples of that step. Both are looked at in the device's own time: no step waits for it
- tokens per second are those of all ranks, theirs are rank 0's
- a watchdog hears what the rank is doing
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from speculators.train.recovery import BatchRecoveryCoordinator
from speculators.train.trainer import Trainer, _all_reduce_metrics, _StepTimer
from speculators.train.utils import normalize_counted_metrics
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from kimi_eagle.errors import RunError
from kimi_eagle.training.dataset import ShardBatchSampler

metric_logger = logging.getLogger("speculators.metrics")

MAX_NORM = 1.0
"""Gradients are clipped to this norm, as in speculators."""

NAMED_SAMPLES = 8
"""Samples named in an error; the others are counted."""


class StepTrainer(Trainer):
    """Trainer with an epoch of its own. Loaders are ShardLoaders."""

    worked: Callable[[float], None]
    """Told the seconds of a logged step that this rank worked by itself, before it met others."""

    def doing(self, what: str) -> None:
        """Hears before each part of a step what this rank is about to do (watchdog.ORDER)."""

    _not_finite: torch.Tensor | None = None

    @property
    def _batches(self) -> ShardBatchSampler:
        return self.train_loader.batch_sampler

    def train_epoch(self, epoch: int, *, step_callback: Callable[[], None] | None = None) -> None:
        """Train the rest of an epoch, from `_resume_local_step` on where it is the resumed one.

        RunError where a loss or a gradient's norm is not finite, at the next logged step at the
        latest.
        """
        self.model.train()
        start, self._resume_local_step = self._resume_local_step, 0
        self._batches.set_epoch(epoch, first_step=start)
        steps = self._batches.sampling.steps(epoch)
        every = self._steps_between_checkpoints(steps)
        recovery = BatchRecoveryCoordinator("training")
        self._not_finite = _nothing_found(self.local_rank)
        timer, before = _StepTimer(), time.perf_counter()
        batches = iter(self.train_loader)
        for local_step in range(start + 1, steps + 1):
            timer.reset(self.global_step % self.config.log_freq == 0)
            timer.mark_value("start", before)
            self.doing("waiting for data")
            taken = list(islice(batches, self._batches.accumulate))
            timer.mark("queue")
            for batch in taken:
                recovery.consume(batch)
            timer.mark("pre_h2d")
            taken = [self._on_device(batch) for batch in taken]
            timer.mark("fetch")
            loss, metrics = self._gradients(taken, timer)
            timer.mark("pre_clip")
            self.doing("gradient norm")
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            timer.mark("bwd")
            self.doing("optimizer")
            self._optimizers_step()
            rates = {type(o).__name__: o.param_groups[0]["lr"] for o in self.optimizers}
            self._schedulers_step()
            timer.mark("opt")
            before = timer.now() or time.perf_counter()
            self._look(local_step, loss, norm)
            if timer.enabled:
                self.check_finite(epoch)
                self._log(epoch, taken, metrics, norm, rates, timer)
            self.global_step += 1
            if step_callback is not None:
                step_callback()
            if self.config.max_steps is not None and self.global_step >= self.config.max_steps:
                break
            if every and local_step % every == 0 and steps - local_step >= every / 4:
                self.maybe_save_checkpoint(epoch, local_step=local_step)

    def check_finite(self, epoch: int) -> None:
        """RunError for the first step of this epoch whose loss or gradient was not finite.

        Called at logged steps, and before a checkpoint, so that none is ever written of such
        weights.
        """
        if self._not_finite is None or self._not_finite[0].isnan():
            return
        step, local_step, loss, norm = self._not_finite.tolist()
        own = not math.isfinite(loss)
        what = f"the loss is {loss}" if own else f"the gradient's norm is {norm}"
        names = self._samples(epoch, int(local_step) - 1, own)
        more = f" and {len(names) - NAMED_SAMPLES} more" if len(names) > NAMED_SAMPLES else ""
        raise RunError(
            f"{what} at step {int(step)}",
            where=f"epoch {epoch}, samples {', '.join(names[:NAMED_SAMPLES])}{more}",
            expected="a finite number",
            fix="a lower train.lr, or float32; the last checkpoint is from before",
        )

    def _samples(self, epoch: int, step: int, own: bool) -> list[str]:
        """Ids of the samples of a step (from 0): this rank's or all."""
        sampling, data = self._batches.sampling, self.train_loader.dataset
        lanes = self._batches.lanes if own else range(sampling.ranks)
        numbers = [n for lane in lanes for n in sampling.batches(epoch, lane)[step]]
        return [data.store.ids[data.samples[n]] for n in numbers]

    def _gradients(
        self, batches: list[dict[str, Any]], timer: _StepTimer
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Gradients of the mean loss of the batches (and of the ranks) into the parameters.

        Returns the sum of this rank's losses and of their metrics.
        """
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        total, sums = torch.zeros((), device=self.local_rank), {}
        for number, batch in enumerate(batches, 1):
            with self._kept_apart(number < len(batches)):
                self.doing("forward")
                with torch.autocast(self.device_type, dtype=self.config.hidden_states_dtype):
                    _, loss, metrics = self.model(**batch, **(self.config.train_call_kwargs or {}))
                timer.mark("fwd")
                self.doing("backward")
                (loss / len(batches) if len(batches) > 1 else loss).backward()
            total = total + loss.detach()
            metrics["error_records_sum"] = total.new_full((), batch["error_records"])
            metrics["error_records_total"] = total.new_full((), self.rank == 0)
            sums = {k: v.detach().float() + sums.get(k, 0) for k, v in metrics.items()}
        return total, sums

    @contextlib.contextmanager
    def _kept_apart(self, more: bool) -> Iterator[None]:
        """Ranks of DDP exchange gradients at the last batch of a step alone. (FSDP adds up what it
        exchanged: a rank has no room for all gradients.)"""
        if more and isinstance(self.model, DistributedDataParallel):
            with self.model.no_sync():
                yield
        else:
            yield

    def _on_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {
            k: v.to(self.local_rank, non_blocking=True) if isinstance(v, torch.Tensor) else v
            for k, v in batch.items()
        }

    def _look(self, local_step: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Note the first step that is not finite, without waiting for the device."""
        found = torch.stack([loss.double(), norm.double()])
        # new_full, not new_tensor: a list copied to a GPU waits for what is going on there.
        where = [found.new_full((1,), number) for number in (self.global_step + 1, local_step)]
        first = ~torch.isfinite(found).all() & self._not_finite[0].isnan()
        self._not_finite = torch.where(first, torch.cat([*where, found]), self._not_finite)

    def _log(
        self,
        epoch: int,
        batches: list[dict[str, Any]],
        metrics: dict[str, torch.Tensor],
        norm: torch.Tensor,
        rates: dict[str, float],
        timer: _StepTimer,
    ) -> None:
        """Hand the step to the metric logger, in speculators' form and with `grad_norm`."""
        tokens = sum((b["document_ids"] != -1).sum() for b in batches)
        metrics = {**metrics, "tokens": tokens.float()}
        world = 1
        if self.is_distributed:
            metrics = _all_reduce_metrics(metrics)
            world = torch.distributed.get_world_size()
        values = {k: v.item() for k, v in metrics.items()}
        profile = timer.profile(int(values.pop("tokens")))
        self.worked((profile["fetch_ms"] + profile["fwd_ms"]) / 1000)
        metric_logger.info(
            {
                "train": normalize_counted_metrics(values, world * len(batches)),
                "profile": profile,
                "grad_norm": norm.item(),
                "epoch": epoch,
                "lr": rates if len(rates) > 1 else next(iter(rates.values())),
                "global_step": self.global_step,
            },
            extra={"step": self.global_step},
        )

    def _steps_between_checkpoints(self, steps: int) -> int | None:
        share = self.config.checkpoint_freq
        return max(1, round(steps * share)) if share < 1 else None


def _nothing_found(device: Any) -> torch.Tensor:
    """float64 [4]: step, step of the epoch, loss, norm of the first step that is not finite."""
    return torch.full((4,), math.nan, dtype=torch.float64, device=device)
