"""An untrained draft model made by speculators, for tests that need one which vLLM loads.

Run as a program (it imports torch): `python drafts.py VERIFIER OUT TOKEN_ID...`.
"""

from __future__ import annotations

import sys
from pathlib import Path


def make_draft(verifier: Path, out: Path, token_ids: list[int]) -> None:
    """Save an untrained Eagle3DraftModel (speculators 0.9.0) for `verifier`, float32.

    The draft vocabulary is `token_ids`: with a few very common tokens even noise is accepted now
    and then, and only where d2t is read as offsets.
    """
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import AutoConfig

    torch.manual_seed(0)
    base = AutoConfig.from_pretrained(verifier)
    layers = base.num_hidden_layers
    config = type(base)(**(base.to_dict() | {"num_hidden_layers": 1, "tie_word_embeddings": False}))
    targets = torch.tensor(sorted(set(token_ids)))
    t2d = torch.zeros(base.vocab_size, dtype=torch.bool)
    t2d[targets] = True
    model = Eagle3DraftModel.from_training_args(
        config,
        t2d=t2d,
        d2t=targets - torch.arange(len(targets)),
        draft_vocab_size=len(targets),
        norm_before_residual=True,
        ttt_steps=3,
        verifier_name_or_path=str(verifier),
        target_layer_ids=[2, layers // 2, layers - 3],
        draft_attn_impl="sdpa",
    )
    model.float().save_pretrained(out)


if __name__ == "__main__":
    make_draft(Path(sys.argv[1]), Path(sys.argv[2]), [int(a) for a in sys.argv[3:]])
