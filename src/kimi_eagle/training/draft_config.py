"""The draft model's config, as speculators trains it and vLLM loads it.

Takes the shape (shape.py) and says the rest: which states feed the draft, its vocabulary, its
norms, and where the verifier lies. The norms' defaults in the recipe are those of speculators'
command line for eagle3 (0.9.0, train/config/schema.py); its config class says False to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

from kimi_eagle.errors import UsageError
from kimi_eagle.recipe import DraftSection
from kimi_eagle.training.shape import decoder_shape
from kimi_eagle.training.shape import rope_parameters as rope_parameters


def speculator_config(
    draft: DraftSection,
    verifier_path: str | Path,
    config: Mapping[str, Any],
    *,
    layers: Sequence[int],
    draft_vocab_size: int,
    ttt_steps: int,
    attention: str,
) -> Eagle3SpeculatorConfig:
    """Config of the whole draft model.

    config: the verifier's config.json as a dict (a nested `text_config` is found).
    layers: `[extract] layers`; all but the last feed `fc`, the last is the loss's target.
    attention: transformers' name of the attention of training; it is never written to disk.
    The verifier's path is stored absolute, so that `vllm serve DRAFT` alone finds it.
    Raises UsageError where the shape cannot be.
    """
    path = Path(verifier_path).resolve()
    decoder = decoder_config(draft, config)
    if draft_vocab_size > decoder.vocab_size:
        raise UsageError(
            f"draft vocabulary of {draft_vocab_size} tokens",
            where="vocab.draft_vocab_size",
            expected=f"at most the verifier's {decoder.vocab_size}",
        )
    decoder._attn_implementation = attention
    return Eagle3SpeculatorConfig(
        transformer_layer_config=decoder,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=draft.norm_before_residual,
        norm_before_fc=draft.norm_before_fc,
        fc_norm=draft.fc_norm,
        norm_output=draft.norm_output,
        eagle_aux_hidden_state_layer_ids=[int(k) for k in layers[:-1]],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=str(path), architectures=list(config.get("architectures") or [])
            ),
        ),
    )


def decoder_config(draft: DraftSection, config: Mapping[str, Any]) -> LlamaConfig:
    """The draft's decoder; unset values of `draft` are the verifier's. Raises UsageError."""
    return LlamaConfig(**decoder_shape(draft, config))
