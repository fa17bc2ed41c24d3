"""`train`: one training run of the draft, put together from speculators' parts.

Reads shards, vocabulary mapping and the verifier's embedding and head; writes in `workdir`: the
arrow view (`view/`), `checkpoints/`, `tensorboard/` and `curves.jsonl`. Composed from public
parts instead of `speculators.train.cli.main`, because that one parses a command line, installs
signal handlers whose checkpoint is never resumed from, and has no way to stop between steps.

CPU: one process, dense attention, losses written out. GPU: flex attention, fused losses, DDP over
the ranks of torchrun (LOCAL_RANK); that path follows speculators' own and was not run here.
"""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loguru import logger as loguru_logger
from transformers.utils import logging as transformers_logging

from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.recipe import Recipe
from kimi_eagle.training import attention, backend, checkpoints, curves, patches
from kimi_eagle.training.draft_config import speculator_config
from kimi_eagle.training.trainer import ShardTrainer

# isort: split
# After `backend`, which registers itself before speculators reads the registry.
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.cli import set_seed
from speculators.train.dataloader import create_train_val_loaders
from speculators.train.distributed import (
    get_rank,
    get_world_size,
    maybe_destroy_distributed,
    maybe_setup_distributed,
)
from speculators.train.trainer import TrainerConfig

logger = logging.getLogger(__name__)

GPU_LOG_EVERY = 10
"""Steps between logged ones on a GPU: a logged step waits for the device (on CPU: every step)."""


@dataclass(frozen=True)
class TrainResult:
    """What a run gave. checkpoint: folder of the best one, None if stopped before the first.

    steps and tokens: optimizer steps of the whole run so far and the tokens in them, earlier
    attempts included. seconds: of this attempt.
    """

    checkpoint: Path | None
    curves: Path
    steps: int
    total_steps: int
    tokens: int
    seconds: float
    interrupted: bool


@dataclass(frozen=True)
class Schedule:
    """Batches of a whole run: tokens[i] is the number of tokens in step i of all ranks."""

    tokens: np.ndarray
    steps: int


def train(
    recipe: Recipe,
    verifier: Any,
    shards: Sequence[Path],
    order: Sequence[str],
    d2t: Path,
    t2d: Path,
    workdir: Path,
    *,
    should_stop: Callable[[], bool],
    on_progress: Callable[[dict[str, Any]], None],
) -> TrainResult:
    """Train the draft of `recipe`, or go on with what `workdir` holds.

    verifier: an open Verifier. shards: safetensors files. order: sample ids in training order;
    the last `validation_share` of them validate. d2t, t2d: .npy, int64 [D] offsets and bool [V].
    should_stop is asked after each step; on_progress gets step, steps, epoch, tokens, total_tokens,
    tokens_per_s, loss, accuracy. Raises RunError when the loss is not finite; UsageError where the
    recipe cannot be.
    """
    section = recipe.train
    device = _device(section.device)
    patches.apply(device)
    attention.register()
    _quiet()
    started = time.monotonic()
    workdir.mkdir(parents=True, exist_ok=True)
    if device == "cuda":
        maybe_setup_distributed()
    else:
        _cpu_threads()
    try:
        set_seed(recipe.seed)
        if get_rank() == 0:
            checkpoints.tidy(workdir / "checkpoints", scheduler=section.scheduler != "none")
            backend.write_view(shards, order, workdir / "view")
        if get_world_size() > 1:
            torch.distributed.barrier()
        model = build_model(recipe, verifier, d2t, t2d, device=device)
        loaders = _loaders(recipe, verifier, model, shards, workdir / "view")
        schedule = plan_steps(loaders[0], section.epochs, section.seq_len, section.max_steps)
        return _run(recipe, device, model, loaders, schedule, workdir, started,
                    should_stop, on_progress)  # fmt: skip
    finally:
        curves.stop()
        maybe_destroy_distributed()


def build_model(
    recipe: Recipe, verifier: Any, d2t: Path, t2d: Path, *, device: str
) -> Eagle3DraftModel:
    """A fresh draft with the verifier's embedding, head and final norm (frozen), float32."""
    config = speculator_config(
        recipe.train.draft,
        verifier.path,
        verifier.config,
        layers=recipe.extract.layers,
        draft_vocab_size=recipe.vocab.draft_vocab_size,
        ttt_steps=recipe.train.ttt_steps,
        attention=_attention(recipe, device),
    )
    model = Eagle3DraftModel(config=config)
    model.load_vocab_mappings(torch.from_numpy(np.load(t2d)), torch.from_numpy(np.load(d2t)))
    model.load_verifier_weights()
    # A frozen copy of the verifier's: 3/4 of a SmolLM2 checkpoint, and on disk already.
    model._keys_to_ignore_on_save = [*model._keys_to_ignore_on_save, "embed_tokens.weight"]
    if device == "cpu":
        # bfloat16 argmax is not vectorised on CPUs: 9 of them a step took 70 ms of 570.
        for head in (model.lm_head, model.verifier_lm_head):
            head.register_forward_hook(lambda _module, _args, logits: logits.float())
    return model


def plan_steps(loader: Any, epochs: int, seq_len: int, max_steps: int | None) -> Schedule:
    """How many steps the run has and the tokens of each, from the loader's own packing.

    The packing differs from epoch to epoch, so that epochs x length of the first is not it.
    """
    sampler = loader.batch_sampler
    lengths = np.asarray(loader.dataset.approx_lengths)
    tokens: list[int] = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        # One position a sample is lost to the shift of states against tokens (shift_batch).
        tokens += [min(int(np.sum(lengths[batch] - 1)), seq_len) for batch in sampler]
        if max_steps is not None and len(tokens) >= max_steps:
            tokens = tokens[:max_steps]
            break
    sampler.set_epoch(0)
    return Schedule(np.asarray(tokens) * get_world_size(), len(tokens))


def trainer_config(recipe: Recipe, device: str, steps: int, checkpoint_dir: Path) -> TrainerConfig:
    """speculators' settings of the run; what is not set here keeps speculators' default."""
    section = recipe.train
    try:
        losses = resolve_loss_config(section.loss, "fused" if device == "cuda" else "eager")
    except ValueError as e:
        raise UsageError(str(e), where="train.loss") from None
    call = {
        "ttt_steps": section.ttt_steps,
        "ttt_step_loss_decay": section.ttt_step_loss_decay,
        "loss_config": losses,
    }
    return TrainerConfig(
        lr=section.lr,
        num_epochs=section.epochs,
        save_path=str(checkpoint_dir),
        resume_from_checkpoint=True,
        train_call_kwargs=call,
        val_call_kwargs=call,
        optimizer=section.optimizer,
        weight_decay=section.weight_decay,
        muon_lr=section.lr if section.muon_lr is None else section.muon_lr,
        scheduler_type=section.scheduler,
        scheduler_warmup_ratio=section.warmup_ratio,
        scheduler_total_steps=steps,
        checkpoint_freq=1 / section.checkpoints_per_epoch,
        hidden_states_dtype=getattr(torch, section.dtype),
        log_freq=GPU_LOG_EVERY if device == "cuda" else 1,
        max_steps=section.max_steps,
    )


def _run(
    recipe: Recipe,
    device: str,
    model: Eagle3DraftModel,
    loaders: tuple[Any, Any],
    schedule: Schedule,
    workdir: Path,
    started: float,
    should_stop: Callable[[], bool],
    on_progress: Callable[[dict[str, Any]], None],
) -> TrainResult:
    total = int(schedule.tokens.sum())
    seen = np.concatenate([[0], np.cumsum(schedule.tokens)])
    log: curves.CurvesHandler | None = None

    def after_step(step: int) -> bool:
        last = log.last if log else None
        if last and not math.isfinite(last["loss"]):
            raise RunError(
                f"the loss is {last['loss']} at step {last['step']}",
                expected="a finite number",
                fix="a lower train.lr, or float32",
            )
        if last and get_rank() == 0:
            on_progress(
                {
                    "step": step,
                    "steps": schedule.steps,
                    "tokens": int(seen[min(step, schedule.steps)]),
                    "total_tokens": total,
                    **{k: last[k] for k in ("epoch", "tokens_per_s", "loss", "accuracy")},
                }
            )
        return should_stop()

    trainer = ShardTrainer(
        model,
        trainer_config(recipe, device, schedule.steps, workdir / "checkpoints"),
        *loaders,
        device=device,
        after_step=after_step,
    )
    curve_path = workdir / "curves.jsonl"
    if get_rank() == 0:
        curves.rewind(curve_path, trainer.global_step)
        log = curves.start(curve_path, workdir / "tensorboard")
    interrupted = trainer.run()
    steps = trainer.global_step
    return TrainResult(
        checkpoint=checkpoints.best(workdir / "checkpoints"),
        curves=curve_path,
        steps=steps,
        total_steps=schedule.steps,
        tokens=int(seen[min(steps, schedule.steps)]),
        seconds=time.monotonic() - started,
        interrupted=interrupted,
    )


def _loaders(
    recipe: Recipe, verifier: Any, model: Eagle3DraftModel, shards: Sequence[Path], view: Path
) -> tuple[Any, Any]:
    """speculators' own loaders over the view, with our transfer."""
    section = recipe.train
    with _environment_kept():
        return create_train_val_loaders(
            data_path=str(view),
            total_seq_len=section.seq_len,
            hidden_states_dtype=getattr(torch, section.dtype),
            transfer=backend.ShardsTransfer(view, shards),
            vllm_endpoint="",
            on_missing="raise",
            verifier_name_or_path=str(verifier.path),
            request_timeout=None,
            max_retries=0,
            generation_validation_retries=0,
            max_consecutive_generation_failures=1,
            hidden_size=model.hidden_size,
            num_target_layers=len(model.target_layer_ids),
            num_workers=section.data_workers,
            prefetch_factor=4,
            preprocess=shift_batch,
            train_data_ratio=1 - section.validation_share,
            seed=recipe.seed,
        )


def _device(wanted: str) -> str:
    device = wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no GPU that torch can use", where="train.device", expected="cpu or auto")
    if device == "cpu" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("several ranks on the CPU", where="train.device", expected="one process")
    return device


def _attention(recipe: Recipe, device: str) -> str:
    chosen = recipe.train.attention
    if chosen == "auto":
        return "simple_flex_attention" if device == "cuda" else attention.NAME
    if device == "cpu" and chosen == "simple_flex_attention":
        raise UsageError(
            "flex attention has no backward pass on the CPU",
            where="train.attention",
            expected="auto, sdpa or eager",
        )
    return chosen


def _cpu_threads() -> None:
    """All cores of this process, unless OMP_NUM_THREADS says otherwise.

    torch counts physical cores and so takes one of two hardware threads.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(wanted) if wanted.isdecimal() else len(os.sched_getaffinity(0)))


def _quiet() -> None:
    """Keep what the libraries say in passing away from stdout and stderr."""
    loguru_logger.disable("speculators")
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not")
    warnings.filterwarnings("ignore", message="Found .* samples longer than batch_max_length")


@contextmanager
def _environment_kept() -> Any:
    """speculators sets OMP_NUM_THREADS=1 for its data workers and leaves it set."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
