"""Arrays of the shards as torch tensors, without a copy."""

from __future__ import annotations

import warnings

import numpy as np
import torch

# Maps are read-only and torch has no read-only tensors; nothing here writes. Set once: a filter
# set for each call would not be safe in the threads that read.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def bfloat16_view(states: np.ndarray) -> torch.Tensor:
    """A uint16 array of bf16 bits as a torch tensor over the same memory."""
    return torch.from_numpy(states).view(torch.bfloat16)
