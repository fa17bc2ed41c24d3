"""`train`: one training run of the draft, put together from speculators' parts.

Reads shards, vocabulary mapping and the verifier's embedding and head; writes in `workdir`:
`checkpoints/`, `tensorboard/`, `curves.jsonl` and, where a sample is damaged, `damaged.jsonl`.
Training starts from the shards' indexes; a sample is read when it is its turn. Composed from public
parts instead of `speculators.train.cli.main`, because that one parses a command line, installs
signal handlers whose checkpoint is never resumed from, and has no way to stop between steps.

CPU: dense attention, losses written out, gloo between ranks. GPU: flex attention, fused losses,
NCCL; that path follows speculators' own and was not run here. Several ranks are those of torchrun
(LOCAL_RANK), with DDP or FSDP as `train.parallel` says.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loguru import logger as loguru_logger
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train import distributed
from speculators.train.cli import set_seed
from speculators.train.distributed import (
    get_dp_rank,
    get_dp_size,
    get_rank,
    get_world_size,
    maybe_destroy_distributed,
)
from speculators.train.trainer import TrainerConfig
from transformers.utils import logging as transformers_logging

from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.recipe import Recipe
from kimi_eagle.shards.sampling import Sampling
from kimi_eagle.shards.store import ShardSet
from kimi_eagle.training import attention, checkpoints, curves, damage, patches, start, watchdog
from kimi_eagle.training.dataset import ShardBatchSampler, ShardDataset, ShardLoader
from kimi_eagle.training.draft_config import speculator_config
from kimi_eagle.training.estimate import Estimator
from kimi_eagle.training.trainer import ShardTrainer

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
    """Batches of a whole run. tokens: int64 [steps], of each step and all ranks together."""

    tokens: np.ndarray
    steps: int


def train(
    recipe: Recipe,
    verifier: Any,
    store: ShardSet,
    d2t: Path,
    t2d: Path,
    workdir: Path,
    *,
    should_stop: Callable[[], bool],
    on_progress: Callable[[dict[str, Any]], None],
) -> TrainResult:
    """Train the draft of `recipe`, or go on with what `workdir` holds.

    verifier: an open Verifier. store: the samples in training order; the last `validation_share`
    of them validate. d2t, t2d: .npy, int64 [D] offsets and bool [V].
    should_stop is asked after each step; on_progress gets step, steps, epoch, tokens, total_tokens,
    tokens_per_s, loss, accuracy and, after a validation, estimated_acceptance. Raises RunError when
    a loss or gradient is not finite or, with train.on_damage stop, a sample is damaged; UsageError
    where the recipe cannot be.
    """
    section = recipe.train
    device = _device(section.device)
    patches.apply(device)
    attention.register()
    _quiet()
    started = time.monotonic()
    workdir.mkdir(parents=True, exist_ok=True)
    if device == "cpu":
        _cpu_threads()
    distributed.maybe_setup_distributed()
    watchdog.outlast(section.hang_seconds)
    try:
        set_seed(recipe.seed)
        if get_rank() == 0:
            checkpoints.tidy(workdir / "checkpoints", scheduler=section.scheduler != "none")
        if get_world_size() > 1:
            torch.distributed.barrier()
        model = build_model(recipe, verifier, d2t, t2d, device=device)
        loaders = _loaders(recipe, model, store, workdir, device)
        schedule = plan_steps(loaders[0], section.epochs, section.max_steps)
        estimator = Estimator(recipe, verifier, model.d2t, device)
        own_watch = watchdog.OwnWatch(section.hang_seconds) if get_world_size() == 1 else None
        with watchdog.Pulse(workdir / watchdog.FOLDER, get_rank(), own_watch) as pulse:
            result = _run(recipe, device, model, loaders, schedule, workdir, started,
                          estimator, pulse, should_stop, on_progress)  # fmt: skip
        # Not where a rank fails: NCCL's end waits for the others, and they wait for this rank.
        maybe_destroy_distributed()
        return result
    finally:
        curves.stop()


def build_model(
    recipe: Recipe, verifier: Any, d2t: Path, t2d: Path, *, device: str
) -> Eagle3DraftModel:
    """The draft that `train.from` names, or a fresh one; float32. The verifier's embedding, head
    and final norm are frozen in it. d2t, t2d: .npy, int64 [D] offsets and bool [V]."""
    t2d_tensor, d2t_tensor = (torch.from_numpy(np.load(path)) for path in (t2d, d2t))
    if recipe.train.from_ is not None:
        model = start.load(
            recipe, verifier, t2d_tensor, d2t_tensor, attention=_attention(recipe, device)
        )
    else:
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
        model.load_vocab_mappings(t2d_tensor, d2t_tensor)
        model.load_verifier_weights()
    if recipe.train.from_ is None or not start.has_own_embedding(model, verifier):
        # A frozen copy of the verifier's: 3/4 of a SmolLM2 checkpoint, and on disk already.
        model._keys_to_ignore_on_save = [*model._keys_to_ignore_on_save, "embed_tokens.weight"]
    if device == "cpu":
        # bfloat16 argmax is not vectorised on CPUs: 9 of them a step took 70 ms of 570.
        for head in (model.lm_head, model.verifier_lm_head):
            head.register_forward_hook(lambda _module, _args, logits: logits.float())
    return model


def plan_steps(loader: ShardLoader, epochs: int, max_steps: int | None) -> Schedule:
    """How many steps the run has and the tokens of each, from the packing itself.

    The packing differs from epoch to epoch, so that epochs x length of the first is not it.
    """
    sampling = loader.batch_sampler.sampling
    # One position a sample is lost to the shift of states against tokens (shift_batch).
    kept = np.minimum(loader.dataset.approx_lengths - 1, sampling.seq_len)
    tokens = np.zeros(0, np.int64)
    for epoch in range(epochs):
        if max_steps is not None and len(tokens) >= max_steps:
            break
        tokens = np.concatenate([tokens, sampling.step_sums(epoch, kept)])
    tokens = tokens[:max_steps]
    return Schedule(tokens, len(tokens))


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
        fsdp_shard=section.parallel == "fsdp",
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
    estimator: Estimator,
    pulse: watchdog.Pulse,
    should_stop: Callable[[], bool],
    on_progress: Callable[[dict[str, Any]], None],
) -> TrainResult:
    total = int(schedule.tokens.sum())
    seen = np.concatenate([[0], np.cumsum(schedule.tokens)])
    log: curves.CurvesHandler | None = None
    estimated: dict[str, float] = {}

    def steps_in_all() -> int:
        return trainer.global_step + schedule.steps - trainer.position

    def tokens() -> int:
        # Other ranks may have done more steps than these ones' plan has (max_steps counts all).
        return int(seen[min(trainer.position, schedule.steps)])

    def after_step(step: int) -> bool:
        last = log.last if log else None
        if last and get_rank() == 0:
            on_progress(
                {
                    "step": step,
                    "steps": steps_in_all(),
                    "tokens": tokens(),
                    "total_tokens": total,
                    **{k: last[k] for k in ("epoch", "tokens_per_s", "loss", "accuracy")},
                    **estimated,
                }
            )
        return should_stop()

    def on_validated(epoch: int, metrics: dict[str, Any]) -> None:
        found = metrics["estimated_acceptance"] = estimator(trainer.model, loaders[1])
        estimated["estimated_acceptance"] = found["length"]
        if get_rank() == 0:
            curves.log_estimate(found, epoch, trainer.global_step)

    trainer = ShardTrainer(
        model,
        trainer_config(recipe, device, schedule.steps, workdir / "checkpoints"),
        *loaders,
        device=device,
        after_step=after_step,
        on_validated=on_validated,
        doing=pulse.goes_on,
        worked=pulse.worked,
        keep=recipe.train.keep_checkpoints,
    )
    curve_path = workdir / "curves.jsonl"
    if get_rank() == 0:
        left = trainer.checkpointer.prev_path
        log = curves.start(curve_path, workdir / "tensorboard", trainer.global_step, left)
    interrupted = trainer.run()
    return TrainResult(
        checkpoint=checkpoints.best(workdir / "checkpoints"),
        curves=curve_path,
        steps=trainer.global_step,
        total_steps=steps_in_all(),
        tokens=tokens(),
        seconds=time.monotonic() - started,
        interrupted=interrupted,
    )


def _loaders(
    recipe: Recipe, model: Eagle3DraftModel, store: ShardSet, workdir: Path, device: str
) -> tuple[ShardLoader, ShardLoader]:
    """Loaders of the training and of the validation samples."""
    section, ranks = recipe.train, get_dp_size()
    accumulate = _accumulate(section.accumulate, ranks, workdir / "checkpoints")
    split = int(len(store) * (1 - section.validation_share))
    if split < ranks * accumulate or len(store) - split < ranks:
        raise RunError(
            f"{split} samples to train on and {len(store) - split} to validate with",
            expected=f"at least {ranks * accumulate} and {ranks} (one for each batch of a step)",
        )

    log = damage.DamageLog(
        workdir / damage.NAME,
        skip=section.on_damage == "skip",
        allowed=max(1, int(len(store) * section.max_damaged_share)),
    )

    def loader(samples: range, seed: int, accumulate: int) -> ShardLoader:
        data = ShardDataset(
            store,
            samples,
            section.seq_len,
            getattr(torch, section.dtype),
            log,
        )
        sampling = Sampling(
            data.approx_lengths,
            section.seq_len,
            ranks=ranks * accumulate,
            seed=seed,
            shard_of=data.shard_of,
            window=section.shuffle_shards,
        )
        return ShardLoader(
            data,
            ShardBatchSampler(sampling, get_dp_rank(), accumulate),
            hidden_size=model.hidden_size,
            target_layers=len(model.target_layer_ids),
            workers=section.data_workers,
            pin_memory=device == "cuda",
        )

    # Validation in one order for any seed, as speculators has it.
    validation = loader(range(split, len(store)), 0, 1)
    return loader(range(split), recipe.seed, accumulate), validation


def _accumulate(asked: int, ranks: int, root: Path) -> int:
    """Batches of a rank in a step: as asked for, unless a run that other ranks began can go on with
    the same steps."""
    lanes = checkpoints.state(root).get("lanes")
    if not isinstance(lanes, int) or lanes % ranks or lanes == ranks * asked:
        return asked
    logger.warning("%d ranks go on with steps of %d batches, as they were begun", ranks, lanes)
    return lanes // ranks


def _device(wanted: str) -> str:
    device = wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no GPU that torch can use", where="train.device", expected="cpu or auto")
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
