"""Kimi-K2.5's architecture at toy size: latent attention, experts, vision tower, 65M parameters.

`make.py` writes a checkpoint directory under the published names; `shape.py` says how large,
`weights.py` what is in it, `int4.py` packs the experts as the published checkpoint has them,
`reference.py` runs it through transformers. Nothing here imports torch until something is made.

    python -m kimi_eagle.toy [DEST] [--experts int4]

It answers every question with words that only chance put together, and that is enough: what is
tried on it is that tensors are found, heads and experts are cut into ranks, states leave at the
layers that were asked for, and that a draft can learn the text of *this* model.
"""

from kimi_eagle.toy.make import EXPERTS, default_path, ensure

__all__ = ["EXPERTS", "default_path", "ensure"]
