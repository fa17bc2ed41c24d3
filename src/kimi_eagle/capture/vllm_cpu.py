"""What vLLM's CPU build is helped with, most for Kimi-K2.5's kind; on GPUs nothing here applies.

All for vLLM 0.31.0 (tests/toy/test_vllm_cpu.py fails as soon as one is needed no longer):

- `served`: serving with a draft mixes two kinds of KV cache, the verifier's latent one (CPU_MLA,
  blocks of 16) and the draft's plain one (CPU_ATTN, multiples of 32), and vLLM finds no block size
  common to both. VLLM_MLA_DISABLE=1 makes the verifier keep plain keys and values. It computes the
  same in another order, so that bits differ: it is part of the engine settings, and so of the key.
- `repair`: vllm/triton_utils/dispatcher.py (`_rebind_kernels`) takes `vars(value).get("kernel")` of
  everything in every loaded module. Kimi's image processor loads numba, whose llvmlite functions
  (`_lib_fn_wrapper`) answer any name with one of their own, `__dict__` too: AttributeError when the
  worker starts in the same process.
- `expand`: with a draft and a temperature, vllm/utils/cpu_triton_utils.py (`_expand_kernel_impl`)
  writes temperature and top-p into a copy in int64 and leaves the caller's tensor as it was, memory
  that nobody set: the logits are divided by it, hardly a draft is accepted (1.02 where greedily
  1.45) and tokens are drawn from another distribution (vllm-project/vllm issue 55005, still open;
  pull request 55006). Greedy decoding does not come there. In this process alone: workers of a
  tensor-parallel engine are processes of their own, so sampling with a draft is refused there.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Mapping
from typing import Any


def served(told: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Engine settings (capture.settings) for serving a verifier with a draft beside it.

    config: the verifier's config.json. Settings of others than a latent-attention verifier on a
    CPU come back as they are.
    """
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    latent = told["device"] == "cpu" and text.get("kv_lora_rank")
    return {**told, "mla": False} if latent else told


def prepare(told: dict[str, Any]) -> None:
    """Make this process ready for these settings: after vLLM's environment, before its engine."""
    if told.get("mla") is False:
        os.environ["VLLM_MLA_DISABLE"] = "1"
    if told["device"] == "cpu":
        repair()


def repair() -> None:
    """Let the dispatcher look only into real dictionaries, and let sampling be what was asked."""
    from vllm.triton_utils import dispatcher

    def only_dicts(value: Any) -> dict[str, Any]:
        found = builtins.vars(value)
        return found if isinstance(found, (dict, type(type.__dict__))) else {}

    dispatcher.vars = only_dicts  # a module's global hides the builtin of that name

    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand


def expand(
    output: Any, values: Any, ends: Any, replace_from: int, replace_to: int, _most: int = 0
) -> None:
    """Fill `output` with each request's value, once for each of its tokens, in its own dtype.

    What expand_kernel of vllm/v1/sample/rejection_sampler.py does. values: [requests]; ends:
    [requests] cumulative counts of tokens; output: [tokens]. A value of replace_from becomes
    replace_to.
    """
    import torch

    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))
