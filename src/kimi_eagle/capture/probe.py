"""Does the last extracted state lead to the tokens that the verifier chose?

Reads the verifier's final norm and lm_head (no model is run) and states; writes nothing. RMSNorm,
lm_head and argmax turn a state into the verifier's next token. On text that the verifier wrote
greedily about 98% agree in bf16 (ties and near-ties make up the rest); a wrong layer, a state
taken after the norm or shifted by one token gives next to nothing (12.5% without the norm).
The rule holds for verifiers whose final norm is RMSNorm with a plain weight, as Llama and Kimi.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CHUNK = 256
"""Positions per matrix product: bounds the logits to CHUNK x vocabulary floats."""


class Probe:
    """Holds norm and lm_head between calls and adds up what was seen.

    verifier: `.final_norm()` -> (weight [H], eps) and `.lm_head()` -> [V, H] tensors. device: where
    they are kept and states are expected.
    """

    def __init__(self, verifier: Any, device: str = "cpu"):
        import torch

        weight, self._eps = verifier.final_norm()
        self._weight = torch.as_tensor(weight).to(device).float()
        self._head = torch.as_tensor(verifier.lm_head()).to(device)
        self.agreed, self.seen = 0, 0

    @property
    def agreement(self) -> float:
        """Share of positions seen that agree; 1.0 before any."""
        return self.agreed / self.seen if self.seen else 1.0

    def add(
        self,
        states_last: Any,
        token_ids: Sequence[int],
        loss_mask: Sequence[bool],
        next_token: int,
        limit: int | None = None,
    ) -> tuple[int, int]:
        """Check one sample; -> (positions that agree, positions checked).

        states_last: bfloat16 [T, H], the last extracted layer. Checked are the positions whose
        next token is an answer token by the mask (the verifier's own, when it wrote them
        greedily) and the sample's last position against next_token, the engine's own choice.
        limit: at most so many positions, evenly spread, the last one always among them.
        """
        import torch

        mask = torch.as_tensor(loss_mask, dtype=torch.bool)
        follow = torch.as_tensor(token_ids, dtype=torch.int64)
        follow = torch.cat([follow[1:], torch.tensor([next_token])])
        where = torch.cat([mask[1:], torch.tensor([True])]).nonzero().flatten()
        if limit is not None and len(where) > limit:
            where = where[torch.linspace(len(where) - 1, 0, limit).round().long()]
        agreed = int((self.predict(states_last[where]) == follow[where]).sum())
        self.agreed += agreed
        self.seen += len(where)
        return agreed, len(where)

    def predict(self, states_last: Any) -> Any:
        """Next tokens int64 [T] that norm + lm_head name for states [T, H]."""
        import torch

        found = []
        for part in states_last.split(CHUNK):
            x = part.float()
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps) * self._weight
            found.append((x.to(self._head.dtype) @ self._head.T).float().argmax(-1))
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def probe(verifier: Any, states_last: Any, next_ids: Any) -> float:
    """Share of states [T, H] whose norm + lm_head argmax is next_ids [T]; 1.0 for T = 0."""
    import torch

    found = Probe(verifier).predict(states_last)
    wanted = torch.as_tensor(next_ids, dtype=torch.int64)
    return float((found == wanted).float().mean()) if len(found) else 1.0
