"""How much of a GPU's memory the verifier takes in vLLM: weights, caches, one step's work.

Reads the headers of the weight files and the configuration; no tensor, no torch, no GPU. What is
split over tensor parallel ranks and what each of them holds whole follows vLLM 0.31.0
(model_executor/models/deepseek_v2.py: `fused_qkv_a_proj`, gate and norms are not split; v1/
kv_cache_interface.py: latent attention keeps one row a token on every rank). Lower bounds where
vLLM's own choice is not known here: allocator, NCCL and CUDA graphs come on top (OVERHEAD).
Not measured on a GPU by this project.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kimi_eagle.recipe import EngineSection
from kimi_eagle.verifier import Verifier

GIB = 1 << 30
OVERHEAD = 1 * GIB
"""CUDA context and NCCL's buffers: what no engine on a GPU does without."""
BYTES = 2
"""Of a bfloat16 value: states and caches are kept in it."""

_WHOLE = ("q_a_proj.", "kv_a_proj_with_mqa.", "norm.", ".gate.", "_norm", "layernorm")
"""Parts of names of tensors that each tensor parallel rank holds whole."""
_VISION = ("vision_tower.", "mm_projector.", "multi_modal_projector.", "visual.")
_OUTSIDE = -1
"""Stands for a layer's number where a tensor belongs to none."""


@dataclass(frozen=True)
class Weights:
    """Bytes of the checkpoint by layer. split, whole: layer -> bytes that tensor parallel ranks
    share, and that each holds; _OUTSIDE: embedding, head, vision."""

    split: Mapping[int, int]
    whole: Mapping[int, int]

    @property
    def total(self) -> int:
        return sum(self.split.values()) + sum(self.whole.values())

    def a_gpu(self, tp: int, pp: int = 1) -> int:
        """Bytes on the GPU that holds most, with layers dealt evenly to the pipeline's stages."""
        shares = {k: self.split.get(k, 0) / tp + self.whole.get(k, 0) for k in self._layers()}
        outside = self.split.get(_OUTSIDE, 0) / tp + self.whole.get(_OUTSIDE, 0)
        layers = [shares[k] for k in sorted(shares) if k != _OUTSIDE]
        if pp == 1:
            return int(sum(layers) + outside)
        most = -(-len(layers) // pp)
        stages = [sum(layers[i : i + most]) for i in range(0, len(layers), most)]
        # The ends hold embedding and head, about half of what is outside the layers each.
        return int(max([*stages[1:-1], stages[0] + outside / 2, stages[-1] + outside / 2]))

    def _layers(self) -> set[int]:
        return self.split.keys() | self.whole.keys()


def weights(verifier: Verifier) -> Weights:
    """The verifier's weights as the headers of its files have them (some 200,000 tensors: 0.3 s).

    Layers beyond num_hidden_layers (a prediction head of its own) are left out, as by vLLM.
    UsageError where a file or its header is broken.
    """
    split: Counter[int] = Counter()
    whole: Counter[int] = Counter()
    for header in verifier.headers.values():
        experts, layer = "\0", _OUTSIDE
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            if name.startswith(experts):  # nearly all, one layer's after another
                split[layer] += end - start
            elif (at := name.find(".experts.")) >= 0:
                experts, layer = name[: at + 9], _layer(name)
                split[layer] += end - start
            else:
                shared = any(part in name for part in _WHOLE)
                (whole if shared else split)[_layer(name)] += end - start
    for layer in [k for k in {*split, *whole} if k >= verifier.num_layers]:
        del split[layer], whole[layer]
    return Weights(split, whole)


def _layer(name: str) -> int:
    """Number of the layer that a tensor's name has, _OUTSIDE for none."""
    at = name.find(".layers.")
    if at < 0 or name.startswith(_VISION):
        return _OUTSIDE
    number = name[at + 8 : name.find(".", at + 8)]
    return int(number) if number.isdigit() else _OUTSIDE


def cache_bytes(verifier: Verifier, tp: int, pp: int = 1) -> int:
    """Bytes of KV cache a token takes on one GPU.

    Latent attention keeps kv_lora_rank + qk_rope_head_dim values a layer on every rank; other
    attention splits keys and values by head.
    """
    text, layers = verifier.text_config, -(-verifier.num_layers // pp)
    if rank := text.get("kv_lora_rank"):
        return layers * (rank + text.get("qk_rope_head_dim", 0)) * BYTES
    heads = text.get("num_attention_heads") or text.get("n_head") or 1
    size = text.get("head_dim") or verifier.hidden_size // heads
    kv_heads = text.get("num_key_value_heads") or heads
    return layers * 2 * -(-kv_heads // tp) * size * BYTES


def states_bytes(verifier: Verifier, n_states: int) -> int:
    """Bytes a token of the extracted states takes on each GPU while its request is in flight
    (vllm/model_executor/models/extract_hidden_states.py: a cache layer of its own, not split)."""
    return n_states * verifier.hidden_size * BYTES


def step_bytes(verifier: Verifier, engine: EngineSection, n_states: int = 0) -> int:
    """Bytes that one step of max_num_batched_tokens works in, at least.

    Streams of the residual; the experts' rows (layers/fused_moe/experts/marlin_moe.py: tokens x
    experts a token x (the larger of hidden and twice the width, and the width once more)); for
    extraction the states twice (stacked, and the proposer's buffer, v1/spec_decode/
    extract_hidden_states.py).
    """
    text, hidden = verifier.text_config, verifier.hidden_size
    width = text.get("moe_intermediate_size") or text.get("intermediate_size") or 4 * hidden
    width //= engine.tp
    rows = (text.get("num_experts_per_tok") or 1) * (max(hidden, 2 * width) + width)
    values = 4 * hidden + rows + 2 * n_states * hidden
    return engine.max_num_batched_tokens * values * BYTES


@dataclass(frozen=True)
class Need:
    """What one GPU must hold, bytes. token: cache of one token; sequence: of one of
    max_model_len, without which vLLM does not start."""

    weights: int
    step: int
    token: int
    sequence: int

    @property
    def least(self) -> int:
        return self.weights + self.step + self.sequence + OVERHEAD

    def sequences(self, memory: float) -> int:
        """How many sequences of max_model_len a GPU of so many usable bytes holds at once."""
        left = memory - self.weights - self.step - OVERHEAD
        return max(0, int(left // self.sequence))


def need(found: Weights, verifier: Verifier, engine: EngineSection, n_states: int = 0) -> Need:
    """Of an engine; found: `weights(verifier)`. n_states: extracted states a token, 0 where none
    are."""
    token = cache_bytes(verifier, engine.tp, engine.pp) + states_bytes(verifier, n_states)
    return Need(
        found.a_gpu(engine.tp, engine.pp),
        step_bytes(verifier, engine, n_states),
        token,
        token * engine.max_model_len,
    )
