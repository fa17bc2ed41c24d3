"""How vLLM is set up: the part of a recipe under `[engine]` and `[STAGE.engine]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kimi_eagle.typed_toml import Section


class EngineSection(Section):
    """vLLM settings of a stage; `[engine]` holds the defaults, `[STAGE.engine]` overrides keys."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where torch sees a GPU, else cpu."""
    dtype: Literal["bfloat16", "float32", "auto"] = "bfloat16"
    """Computation type; equality of greedy outputs is claimed in float32 only."""
    max_model_len: int = Field(default=4096, ge=16)
    """Tokens of prompt plus answer that the engine accepts."""
    max_num_seqs: int = Field(default=16, ge=1)
    """Sequences in one step."""
    max_num_batched_tokens: int = Field(default=2048, ge=16)
    """Tokens in one step."""
    tp: int = Field(default=1, ge=1)
    """Tensor parallel size (GPUs that share one layer)."""
    pp: int = Field(default=1, ge=1)
    """Pipeline parallel size (groups of layers on different GPUs or nodes)."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory that vLLM takes."""
    cpu_kv_cache_gib: int = Field(default=2, ge=1)
    """KV cache on CPU, GiB (vLLM's VLLM_CPU_KVCACHE_SPACE)."""
    enforce_eager: bool = True
    """No compilation: saves about 100 s of start; set false for long GPU runs."""


class StageEngineSection(Section):
    """Overrides of `[engine]` for one stage; unset keys keep the default."""

    device: Literal["auto", "cpu", "cuda"] | None = None
    dtype: Literal["bfloat16", "float32", "auto"] | None = None
    max_model_len: int | None = Field(default=None, ge=16)
    max_num_seqs: int | None = Field(default=None, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=16)
    tp: int | None = Field(default=None, ge=1)
    pp: int | None = Field(default=None, ge=1)
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    cpu_kv_cache_gib: int | None = Field(default=None, ge=1)
    enforce_eager: bool | None = None
