"""Hidden states for the benchmarks of the store: real ones, and shapes filled by chance.

`smollm2` and `toy_kimi` run the models through transformers on this checkout's own English text;
the toy (src/kimi_eagle/toy) is Kimi-K2.5's architecture with weights by chance, as the real one
does not fit here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

SMOLLM2 = (2, 15, 27, 30)
TOY = (2, 4, 5, 8)


def tokens_of_text(count: int) -> list[int]:
    """`count` token ids of the README and the other pages of this checkout, repeated if need be."""
    from transformers import AutoTokenizer

    from kimi_eagle.demo_model import ensure

    root = Path(__file__).resolve().parents[2]
    pages = sorted(root.glob("*.md")) + sorted(root.glob("*/*.md")) + [root / "LICENSE"]
    text = "\n\n".join(p.read_text() for p in pages)
    ids = AutoTokenizer.from_pretrained(ensure())(text, verbose=False)["input_ids"]
    return (ids * (count // len(ids) + 1))[:count]


def smollm2(tokens: int, length: int = 512) -> list[np.ndarray]:
    """uint16 [length, 4, 576] a sample."""
    import torch
    from transformers import AutoModelForCausalLM

    from kimi_eagle.demo_model import ensure

    model = AutoModelForCausalLM.from_pretrained(ensure(), dtype=torch.bfloat16)
    return list(_states(model, model.model.norm, SMOLLM2, tokens, length))


def toy_kimi(tokens: int, length: int = 512) -> list[np.ndarray]:
    """uint16 [length, 4, 256] a sample."""
    import torch

    from kimi_eagle import toy
    from kimi_eagle.toy import reference

    model = reference.load(toy.ensure()).to(torch.bfloat16)
    return list(_states(model, model.model.language_model.norm, TOY, tokens, length))


def _states(model, norm, layers: tuple[int, ...], tokens: int, length: int) -> Iterator[np.ndarray]:
    """States entering the layers; the last id is what enters the final norm."""
    import torch

    last: list[torch.Tensor] = []
    norm.register_forward_pre_hook(lambda _module, given: last.append(given[0]))
    ids = tokens_of_text(tokens)
    with torch.no_grad():
        for start in range(0, tokens - length + 1, length):
            part = torch.tensor([ids[start : start + length]])
            out = model(input_ids=part, output_hidden_states=True, use_cache=False)
            chosen = [out.hidden_states[k][0] for k in layers[:-1]] + [last.pop()[0]]
            stacked = torch.stack(chosen, dim=1).contiguous()
            yield stacked.view(torch.int16).numpy().view(np.uint16)


def by_chance(
    count: int, lengths: tuple[int, int], layers: int, hidden: int
) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """(sample id, states, token ids, mask); states are cut out of one block of normal values."""
    rng = np.random.default_rng(0)
    values = (rng.normal(size=(2 * lengths[1], layers, hidden)) * 30).astype(np.float32)
    block = (values.view(np.uint32) >> 16).astype(np.uint16)
    for i in range(count):
        n = int(rng.integers(*lengths))
        start = int(rng.integers(0, len(block) - n))
        ids = rng.integers(0, 49152, n).astype(np.int32)
        yield f"{i:032x}", block[start : start + n], ids, rng.random(n) < 0.5
