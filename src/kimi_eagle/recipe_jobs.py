"""The part of a recipe that is about jobs: how the stages become some, who is told, what they get.

Nothing here is in a key: it may change in the middle of a run.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from kimi_eagle.typed_toml import Section

STAGES = ("regenerate", "prepare", "extract", "vocab", "train", "benchmark")


class SlurmSection(Section):
    """How the run becomes Slurm jobs; where they run is the site file's matter. In no key."""

    groups: tuple[tuple[str, ...], ...] = (
        ("regenerate", "prepare"),
        ("extract", "vocab"),
        ("train", "benchmark"),
    )
    """Stages that share an allocation: the worker that finds the next stage's gate open goes on."""
    workers: int = Field(default=1, ge=1, le=10_000)
    """Jobs at work at once in groups with regenerate or extract, the canary among them."""
    gpus: int = Field(default=8, ge=1, le=64)
    """GPUs of each node of a job."""
    nodes: dict[str, int] = {}
    """Nodes of one job of a stage, 1 where unset. Only train can use more (torchrun)."""
    cpu_stages: tuple[str, ...] = ()
    """Stages whose jobs ask for no GPU; they form groups of their own."""
    max_gpu_hours: float | None = Field(default=None, gt=0)
    """The run stops when its jobs have held this many GPU hours."""
    engine_load_minutes: float = Field(default=0.0, ge=0)
    """Minutes that loading the verifier takes; a time limit under three loads is refused."""
    max_attempts: int = Field(default=20, ge=1)
    """Starts of one worker, requeues included, before its stage is held."""

    @model_validator(mode="after")
    def _whole(self) -> SlurmSection:
        named = [s for group in self.groups for s in group]
        if sorted(named) != sorted(STAGES):
            raise ValueError(f"slurm.groups: expected each of {', '.join(STAGES)} once")
        if [STAGES.index(s) for s in named] != list(range(len(STAGES))):
            raise ValueError(f"slurm.groups: expected the stages in order: {', '.join(STAGES)}")
        if unknown := sorted({*self.nodes, *self.cpu_stages} - set(STAGES)):
            raise ValueError(f"slurm: unknown stage {unknown[0]!r} in nodes or cpu_stages")
        for stage, count in self.nodes.items():
            if count < 1 or (count > 1 and (stage != "train" or ("train",) not in self.groups)):
                raise ValueError(
                    f"slurm.nodes: {stage} = {count}; expected 1, or more for train in a group of"
                    " its own"
                )
        for group in self.groups:
            if 0 < len(set(group) & set(self.cpu_stages)) < len(group):
                raise ValueError(
                    f"slurm.cpu_stages: the group {', '.join(group)} mixes stages with and without"
                    " GPUs"
                )
        return self


class NotifySection(Section):
    """Who is told when a run ends, fails or is held."""

    mail: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+@-]{0,200}$")
    """Address (or user) for Slurm's own mails: --mail-user."""
    command: tuple[str, ...] = ()
    """Program and arguments, run on the job's node; the event, the run and a sentence are added."""
    on: tuple[Literal["end", "failure", "hold"], ...] = ("end", "failure", "hold")


class ContainerSection(Section):
    """What jobs get when they run in an image; which image is the site file's matter. In no key."""

    secrets: tuple[str, ...] = ()
    """Names of variables of your shell that jobs need (`HF_TOKEN`); values are stored nowhere."""
    shm_gib: float = Field(default=0.0, ge=0)
    """Free space that a job wants in /dev/shm, GiB (NCCL and vLLM share tensors there)."""
