"""How many tokens a step of a server will accept, told from validation samples without serving.

Reads validation batches, the draft's mapping and, where the answers were sampled, the verifier's
norm and lm_head; writes nothing. No server, no second pass of the verifier.

A greedy EAGLE-3 server (vLLM 0.31.0, v1/spec_decode/llm_base_proposer.py) drafts k tokens after
each token it has settled: the first from the verifier's states, each later one from the draft's own
state and token. It keeps drafted tokens up to the first that is not the verifier's, adds the
verifier's own, and drafts again after that one. Here the same walk is made over the stored text:
start at the answer's first token, count what is accepted, jump by accepted + 1. speculators'
unrolled forward (0.9.0, models/eagle3/core.py) gives all drafted tokens at once. It feeds the text
instead of the draft's own tokens, which is no difference here: a token counts only while all
before it were the text's.

What this is not: training's accuracies. They look at every position (a server rarely starts behind
a token that it accepted itself), and take the verifier's favourite among the draft's vocabulary for
right where the verifier would say a token outside it.

The verifier's token is the text's own where the run made the answers greedily, else the argmax of
norm and lm_head. There the stored text may leave the path that a greedy server takes; what would
follow is unknown, and such a start counts for the tokens before alone (Kaplan and Meier's product
of conditional rates, as for every start near the end of its answer). The same over the text's own
tokens is what a server shows that samples as the answers were sampled, given as `as_written`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from speculators.train.distributed import is_distributed

from kimi_eagle.capture.probe import Probe

if TYPE_CHECKING:
    from kimi_eagle.recipe import Recipe
    from kimi_eagle.training.dataset import ShardLoader

POSITIONS = 16_384
"""Tokens looked at in one estimate, all ranks together (at least one batch a rank, at most the
validation samples): some 6,000 starts, a standard error of about 0.01 of the length."""

NEEDED = ("hidden_states", "input_ids", "document_ids", "position_ids", "loss_mask")


@dataclass
class Tally:
    """Starts of the walk, and for each drafted position how often it was judged and accepted."""

    k: int
    starts: int = 0
    judged: np.ndarray = field(init=False)
    accepted: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.judged, self.accepted = np.zeros(self.k, np.int64), np.zeros(self.k, np.int64)

    def walk(self, drafted: np.ndarray, taken: np.ndarray, text: np.ndarray) -> None:
        """Add one answer.

        drafted: int [k, n]; drafted[j, i] is what the draft, started at token i of the answer, says
        of the token i + 1 + j. taken, text: int [n]; what the verifier takes after token i, and
        what the answer has there.
        """
        row, end = 0, len(text)
        while row < end:
            self.starts += 1
            kept = 0
            for j in range(min(self.k, end - row)):
                self.judged[j] += 1
                if drafted[j, row] != taken[row + j]:
                    break
                self.accepted[j] += 1
                if taken[row + j] != text[row + j]:
                    break
                kept += 1
            row += kept + 1

    def result(self) -> dict[str, Any]:
        """length: tokens a step of the verifier gives, 1 to k + 1. rates: share of starts that
        accept position 1, 2, ... k. conditional: of those that accepted all before."""
        conditional = self.accepted / np.maximum(1, self.judged)
        rates = np.cumprod(conditional)
        return {
            "k": self.k,
            "length": round(1 + float(rates.sum()), 4),
            "rates": [round(float(r), 4) for r in rates],
            "conditional": [round(float(c), 4) for c in conditional],
            "starts": self.starts,
        }


class Estimator:
    """Estimates the drafts of one run; all ranks call it together."""

    def __init__(self, recipe: Recipe, verifier: Any, d2t: torch.Tensor | None, device: str):
        """d2t: int64 [D] offsets, or None where the draft names every token. device: of the draft.

        k is the benchmark's (benchmark.k).
        """
        self._k, self._verifier, self._device = recipe.benchmark.k, verifier, device
        self._dtype = getattr(torch, recipe.train.dtype)
        self._d2t = None if d2t is None else d2t.detach().cpu().numpy()
        made = recipe.regenerate
        self._own_text = made.enabled and made.temperature == 0

    @torch.no_grad()
    def __call__(self, model: torch.nn.Module, loader: ShardLoader) -> dict[str, Any]:
        """`Tally.result` over the first validation batches, with `reference` ("text" or "head")
        and, for "head", `as_written`. The same batches each time. Random state is left as it is."""
        model.eval()
        probe = None if self._own_text else Probe(self._verifier, self._device)
        greedy, written = Tally(self._k), Tally(self._k)
        sampling = loader.batch_sampler.sampling
        most = max(1, -(-POSITIONS // (sampling.seq_len * sampling.ranks)))
        loader.batch_sampler.set_epoch(0)
        with torch.random.fork_rng(devices=[]):
            for batch in islice(loader, most):
                for drafted, states, text in self._answers(model, batch):
                    written.walk(drafted, text, text)
                    if probe:
                        greedy.walk(drafted, probe.predict(states).cpu().numpy(), text)
        self._sum(written, greedy)
        if probe is None:
            return {**written.result(), "reference": "text"}
        return {**greedy.result(), "reference": "head", "as_written": written.result()}

    def _answers(
        self, model: torch.nn.Module, batch: dict[str, Any]
    ) -> Iterator[tuple[np.ndarray, torch.Tensor, np.ndarray]]:
        """For each answer of a packed batch: drafted int64 [k, n]; last states [n, H], from which
        the verifier takes the token after each; the tokens after each, int64 [n].

        A batch comes shifted (speculators' shift_batch): row i has the states of token i, token
        i + 1 itself, and the last state of token i + 1.
        """
        inputs = {name: batch[name].to(self._device) for name in NEEDED if name in batch}
        low = self._dtype != torch.float32
        with torch.autocast(self._device, dtype=self._dtype, enabled=low):
            tokens = model(**inputs, ttt_steps=self._k)
        drafted = torch.cat(tokens).cpu().numpy()
        if self._d2t is not None:
            drafted = drafted + self._d2t[drafted]
        ids, document = batch["input_ids"][0].numpy(), batch["document_ids"][0].numpy()
        states = batch["verifier_last_hidden_states"][0]
        counted = (batch["loss_mask"][0].numpy() > 0) & (document >= 0)
        for start, end in runs(np.where(counted, document, -1)):
            last = end - 1  # what follows the answer's last token is not known
            yield drafted[:, start:last], states[start:last].to(self._device), ids[start + 1 : end]

    def _sum(self, *tallies: Tally) -> None:
        """Add up what the ranks counted."""
        if not is_distributed():
            return
        rows = [[t.starts, *t.judged, *t.accepted] for t in tallies]
        counts = torch.tensor(rows, dtype=torch.int64, device=self._device)
        dist.all_reduce(counts)
        for tally, row in zip(tallies, counts.cpu().numpy(), strict=True):
            tally.starts = int(row[0])
            tally.judged, tally.accepted = row[1 : 1 + self._k], row[1 + self._k :]


def runs(labels: np.ndarray) -> list[tuple[int, int]]:
    """[start, end) of each run of one label in labels (int [n]); those of -1 are left out."""
    edges = np.flatnonzero(np.diff(labels)) + 1
    bounds = [0, *edges.tolist(), len(labels)]
    return [(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b > a and labels[a] != -1]
