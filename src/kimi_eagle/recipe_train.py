"""The part of a recipe that is about training: `[train]` and the draft's shape, `[train.draft]`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from kimi_eagle.typed_toml import Section

NOT_IN_KEY = frozenset(
    {"on_damage", "max_damaged_share", "ranks", "keep_checkpoints", "hang_seconds"}
)
"""Fields of `[train]` that say how it is made or what happens when something is wrong."""


class DraftSection(Section):
    """Shape of the draft model: one llama-like decoder; unset values follow the verifier."""

    layers: int = Field(default=1, ge=1)
    hidden_act: str | None = None
    num_attention_heads: int | None = Field(default=None, ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2)
    intermediate_size: int | None = Field(default=None, ge=1)
    max_position_embeddings: int | None = Field(default=None, ge=1)
    rope: dict[str, str | int | float | bool] | None = None
    """Rotary parameters as transformers names them (rope_type, rope_theta, factor, mscale, ...);
    `type`, as the older layout of a config.json says, is read as rope_type."""
    norm_before_residual: bool = True
    """Whether the normed state is the residual of the first layer, or the state itself."""
    norm_before_fc: bool = True
    """One norm over the states together before fc, which makes one of them. The states may be
    large (25,000 in SmolLM2)."""
    fc_norm: bool = False
    """One norm for each of the states instead; set norm_before_fc = false."""
    norm_output: bool = True
    """Whether the next draft step is fed the state after the last norm, or the one before it.

    vLLM takes all of these. SGLang takes no norm_before_fc and no norm_before_residual; fc_norm and
    norm_output since its pull request 24663. So for both servers: norm_before_residual = false,
    norm_before_fc = false, fc_norm = true, and for an older SGLang fc_norm and norm_output = false.
    """

    @model_validator(mode="after")
    def _one_norm(self) -> DraftSection:
        """As Eagle3SpeculatorConfig has it (speculators 0.9.0, _check_norm_flags)."""
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("fc_norm: expected norm_before_fc = false beside it")
        return self

    @field_validator("rope")
    @classmethod
    def _rope_type(cls, rope: dict[str, Any] | None) -> dict[str, Any] | None:
        """As transformers 5.17.0 does it (modeling_rope_utils.py, standardize_rope_params)."""
        if rope is None or "type" not in rope:
            return rope
        kind = rope.get("rope_type", rope["type"])
        return {k: v for k, v in rope.items() if k != "type"} | {"rope_type": kind}


class TrainSection(Section):
    """speculators' Eagle3 Trainer over the shards."""

    from_: str | None = Field(default=None, alias="from")
    """Directory of a draft to go on from (speculators' eagle3 format: RUN/draft, or a checkpoint).
    Its shape and its own d2t are kept; optimizer and schedule start anew."""
    epochs: int = Field(default=3, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    """Stop after this many optimizer steps, all epochs together."""
    seq_len: int = Field(default=2048, ge=16)
    """Tokens packed into one batch of a rank."""
    accumulate: int = Field(default=1, ge=1)
    """Batches of a rank whose gradients make one optimizer step: 2 ranks with 4 make the same steps
    as 8 ranks with 1. Other ranks that go on with a run keep its steps where their number divides
    the batches of one, whatever is said here."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Several ranks: each holds the whole draft and its optimizer (ddp), or a share (fsdp)."""
    ranks: int = Field(default=1, ge=1)
    """Processes that train, where training is on CPUs; on GPUs one for each of the job. In no key:
    others may go on with a run. Where they cannot keep its steps (see accumulate), the samples that
    are left of the epoch come in other steps, less than one step's are left out, and the learning
    rate goes on from where it was."""
    ttt_steps: int = Field(default=3, ge=1)
    """Test-time-training depth: draft steps unrolled in the loss."""
    ttt_step_loss_decay: float = Field(default=1.0, gt=0)
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(default=1e-4, gt=0)
    """Peak rate of AdamW (of Muon's AdamW part)."""
    muon_lr: float | None = Field(default=None, gt=0)
    """Peak rate of Muon's matrices; unset: the same as lr."""
    weight_decay: float = Field(default=0.01, ge=0)
    scheduler: Literal["linear", "cosine", "none"] = "cosine"
    warmup_ratio: float = Field(default=0.015, ge=0, le=1)
    loss: str = "kl_div"
    """Loss as speculators names it (`--loss-fn`)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Computation type; master weights are float32."""
    attention: Literal["auto", "simple_flex_attention", "sdpa", "eager"] = "auto"
    """auto: flex on GPUs, sdpa on CPU (flex has no CPU backward)."""
    validation_share: float = Field(default=0.1, gt=0, lt=1)
    """Share of the samples (the last of the seeded order) kept for validation."""
    checkpoints_per_epoch: int = Field(default=1, ge=1)
    """1: at each epoch's end. More: resume loses less. (A stop takes one of its own.)"""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints kept: the last ones, one an epoch, and always the best. Each has the draft and
    its optimizer in float32: 25 GB for Kimi-K2.5. In no key."""
    hang_seconds: float = Field(default=540.0, gt=0)
    """Training without a sign of progress for so long ends with an error that names the rank, so
    that the job is tried again. The default lies below the 600 s after which NCCL gives up without
    naming one, and where this is longer NCCL waits longer, too. A checkpoint must be written within
    it, and read: 25 GB in 540 s are 46 MB/s. In no key."""
    data_workers: int = Field(default=0, ge=0)
    """Processes that read shards, for each rank; 0 reads in the training process."""
    shuffle_shards: int = Field(default=0, ge=0)
    """0: one shuffle over all samples. N: shards in random order, samples mixed within N of them at
    a time, so that a disk reads in few places."""
    on_damage: Literal["stop", "skip"] = "stop"
    """A sample whose bytes are not those that were written: stop there, or leave it out and say so.
    In no key."""
    max_damaged_share: float = Field(default=0.01, ge=0, le=1)
    """Share of the samples that `skip` leaves out before training stops all the same; one is always
    left out. In no key."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    export_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights in draft/."""
    draft: DraftSection = DraftSection()
