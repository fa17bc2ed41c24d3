"""A draft trained earlier as the start of training (`[train] from`).

Reads the directory through speculators' own `Eagle3DraftModel.from_pretrained` (0.9.0, model.py);
writes nothing. Kept are its weights, its shape, its norms and its vocabulary; ours are the place of
the verifier, the attention of training and the number of drafted tokens. Whether it fits the
verifier and the recipe is judged before by the rules `training-from-*` (contracts/training.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

from kimi_eagle.errors import RunError
from kimi_eagle.recipe import Recipe
from kimi_eagle.training.draftfiles import DraftFiles


def load(
    recipe: Recipe, verifier: Any, t2d: torch.Tensor, d2t: torch.Tensor, *, attention: str
) -> Eagle3DraftModel:
    """The draft of `train.from` in float32, with the frozen parts of this verifier.

    t2d bool [V], d2t int64 [D]: of the vocab stage, which took them from this very draft. RunError
    where speculators cannot load it or it has another vocabulary.
    """
    path = recipe.train.from_
    config = Eagle3SpeculatorConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = attention
    config.speculators_config.verifier.name_or_path = str(verifier.path.resolve())
    config.speculators_config.proposal_methods[0].speculative_tokens = recipe.train.ttt_steps
    own = DraftFiles(path).array("d2t")
    if own is not None and not np.array_equal(own, d2t.numpy()):
        raise RunError(
            "the run's vocabulary mapping is not that of the draft", where=path, expected="its d2t"
        )
    try:
        return Eagle3DraftModel.from_pretrained(
            path, config=config, local_files_only=True, dtype=torch.float32, t2d=t2d, d2t=d2t
        )
    except (OSError, RuntimeError, ValueError) as e:
        raise RunError(f"draft cannot be loaded: {e}", where=path) from None


def has_own_embedding(model: Eagle3DraftModel, verifier: Any) -> bool:
    """Whether its embedding is another one than the verifier's (rounded to bfloat16)."""
    own, theirs = model.embed_tokens.weight, verifier.embedding()
    return not torch.equal(own.bfloat16(), theirs.bfloat16())
