"""What vLLM is told: parallel sizes, lengths, and what its version must be able to do.

The settings themselves are made in capture/settings.py, which leaves nothing to choose where only
one thing is right (prefix caching off, one token a request).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kimi_eagle.contracts import vllm_source
from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import NotConcerned, Note, Problem, rule
from kimi_eagle.recipe import EngineSection

STAGES = ("regenerate", "extract", "benchmark")
"""Those that load an engine."""
READS_STATES = ("extract", "benchmark")
"""Those whose engine hands out states: extraction, and EAGLE-3 itself."""
PADDED = 64
"""vLLM pads a vocabulary to a multiple of it (layers/vocab_parallel_embedding.py)."""
YARN_MSCALE = "0.30"
"""First vLLM whose generic YaRN reads mscale and mscale_all_dim."""
LOOKED_AT = 16
"""Shards whose own metadata is read: opening each of 10,000 takes seconds."""


def engines(facts: Facts, stages: tuple[str, ...] = STAGES) -> dict[EngineSection, str]:
    """Different engines of the recipe -> the section that says so, for messages."""
    recipe, found = facts.recipe, {}
    for stage in stages:
        if stage == "regenerate" and not recipe.regenerate.enabled:
            continue
        found.setdefault(recipe.engine_for(stage), []).append(stage)
    whole = len(found) == 1
    return {e: "[engine]" if whole else f"[{'], ['.join(s)}]" for e, s in found.items()}


@rule(
    "engine-tp-divides",
    what="tp divides what vLLM splits: heads, the experts' width with its groups, the vocabulary.",
    why="vLLM 0.31.0 refuses in ModelConfig.verify_with_parallel_config (heads), in `divide` of "
    "distributed/utils.py (widths, vocabulary) or in compressed_tensors_moe_wna16 (INT4 groups "
    "across ranks): the last two only when a layer is built, in each of the ranks.",
    how="The verifier's configuration, and the draft's vocabulary, which has the verifier's tp; "
    "its heads are draft-shape-parallel's.",
    fix="set tp to a size that divides them all",
    stages=STAGES,
    after=("verifier-config",),
)
def tp_divides(facts: Facts) -> Iterator[Problem]:
    for engine, where in engines(facts).items():
        if faults := undivided(facts, engine.tp):
            good = [str(t) for t in (1, 2, 4, 8, 16, 32, 64) if not undivided(facts, t)]
            none = "a checkpoint that some tp divides: for this one there is none up to 64"
            yield Problem(
                f"tp {engine.tp} does not divide {' and '.join(faults)}",
                where=f"{facts.recipe.name}: {where}",
                expected=f"one of {', '.join(good)}" if good else none,
                fix="" if good else "use a checkpoint whose sizes and groups vLLM can split",
            )


def undivided(facts: Facts, tp: int) -> list[str]:
    """What a tensor parallel size does not divide, in words."""
    text = facts.verifier.text_config
    sizes = {
        "attention heads": text.get("num_attention_heads"),
        "the MLP's width": text.get("intermediate_size"),
        "the experts' width": text.get("moe_intermediate_size"),
        "the padded vocabulary": -(-facts.verifier.vocab_size // PADDED) * PADDED,
        "the draft's padded vocabulary": -(-facts.recipe.vocab.draft_vocab_size // PADDED) * PADDED,
    }
    faults = [f"{what} ({n})" for what, n in sizes.items() if isinstance(n, int) and n % tp]
    kv_heads = text.get("num_key_value_heads")
    if (
        isinstance(kv_heads, int)
        and not text.get("kv_lora_rank")
        and kv_heads % tp
        and tp % kv_heads
    ):
        faults.append(f"key-value heads ({kv_heads})")
    width, group = text.get("moe_intermediate_size"), _group_size(text, facts.verifier.config)
    if width and group and width % tp == 0 and (width // tp) % group:
        groups = f"width ({width}) into groups of {group}"
        if width % group == 0:
            groups = f"{width // group} groups of {group}"
        faults.append(f"the experts' {groups}")
    return faults


def _group_size(*configs: Mapping[str, Any]) -> int | None:
    """Values that share a scale in a compressed-tensors checkpoint; None where there is no such."""
    for config in configs:
        for group in (
            (config.get("quantization_config") or {}).get("config_groups") or {}
        ).values():
            size = ((group or {}).get("weights") or {}).get("group_size")
            if isinstance(size, int) and size > 0:
                return size
    return None


@rule(
    "engine-on-a-node",
    what="An engine's GPUs, tp x pp, are there on one node.",
    why="Each worker of regenerate, extract and benchmark is one process on one node; vLLM 0.31.0 "
    "refuses a world larger than the GPUs it sees (config/parallel.py) when the job has started.",
    how="tp x pp of each stage's engine against [slurm] gpus.",
    fix="lower tp or pp, or set [slurm] gpus to what a node has",
    stages=STAGES,
)
def on_a_node(facts: Facts) -> Iterator[Problem]:
    gpus = facts.recipe.slurm.gpus
    for engine, where in engines(facts).items():
        if engine.device != "cpu" and engine.tp * engine.pp > gpus:
            yield Problem(
                f"tp {engine.tp} x pp {engine.pp} = {engine.tp * engine.pp} GPUs",
                where=f"{facts.recipe.name}: {where}",
                expected=f"at most the {gpus} of a node ([slurm] gpus); an engine over several"
                " nodes cannot be started yet",
            )


@rule(
    "engine-pipeline",
    what="An engine that hands out states has no pipeline stages, for latent attention.",
    why="vLLM 0.31.0 relays states between pipeline stages for classes that say "
    "supports_aux_hidden_states_over_pp (llama, qwen2, Kimi-K3); deepseek_v2.py, which runs "
    "Kimi-K2.5, does not: 'does not support extract_hidden_states with pipeline parallelism' "
    "(v1/worker/gpu/spec_decode/eagle/eagle3_utils.py), after the weights are loaded.",
    how="pp of extract and benchmark, where the verifier's configuration has kv_lora_rank.",
    fix="set pp = 1 and a larger tp",
    stages=READS_STATES,
    after=("verifier-config",),
)
def pipeline(facts: Facts) -> Iterator[Problem | Note]:
    for engine, where in engines(facts, READS_STATES).items():
        if engine.pp == 1:
            continue
        if facts.verifier.text_config.get("kv_lora_rank"):
            yield Problem(f"pp {engine.pp}", where=f"{facts.recipe.name}: {where}", expected="pp 1")
        else:
            yield Note(f"pp {engine.pp}: only some of vLLM's model classes relay states")


@rule(
    "engine-context",
    what="max_model_len is within the positions the verifier was made for.",
    why="vLLM 0.31.0 refuses more (config/model.py, 'User-specified max_model_len is greater than "
    "the derived max_model_len'), once the job has its GPUs; beyond them states mean nothing.",
    how="max_model_len against max_position_embeddings, stretched where rope says so.",
    fix="lower max_model_len",
    stages=STAGES,
    after=("verifier-config",),
)
def context(facts: Facts) -> Iterator[Problem]:
    most = _positions(facts)
    for engine, where in engines(facts).items():
        if engine.max_model_len > most:
            yield Problem(
                f"max_model_len {engine.max_model_len}",
                where=f"{facts.recipe.name}: {where}",
                expected=f"at most {most}",
            )


def _positions(facts: Facts) -> int:
    """At most what vLLM derives: rope of other kinds than these multiplies the positions."""
    text, length = facts.verifier.text_config, facts.verifier.context_length
    rope = rope_of(text)
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor") or 1
    if kind == "yarn":
        return max(length, int((rope.get("original_max_position_embeddings") or 0) * factor))
    return length if kind in (None, "default", "llama3", "longrope", "mrope") else int(
        length * max(1, factor)
    )  # fmt: skip


def rope_of(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary parameters in either layout (rope_parameters of transformers 5, rope_scaling)."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return rope.get("full_attention") or rope if isinstance(rope, Mapping) else {}


@rule(
    "engine-batch",
    what="A step has room for a token of each sequence: max_num_batched_tokens >= max_num_seqs.",
    why="vLLM 0.31.0 refuses less (config/scheduler.py), once the job has its GPUs.",
    how="The two of each stage's engine; benchmark's sequences are its largest batch size.",
    fix="raise max_num_batched_tokens or lower max_num_seqs",
    stages=STAGES,
)
def batch(facts: Facts) -> Iterator[Problem]:
    for stage in STAGES:
        engine, sequences = facts.recipe.engine_for(stage), "max_num_seqs"
        count = engine.max_num_seqs
        if stage == "benchmark":
            sequences, count = "batch_sizes", max(facts.recipe.benchmark.batch_sizes)
        if engine.max_num_batched_tokens < count:
            yield Problem(
                f"max_num_batched_tokens {engine.max_num_batched_tokens} with {sequences} {count}",
                where=f"{facts.recipe.name}: [{stage}.engine]",
                expected=f"at least {count}",
            )


@rule(
    "engine-last-state",
    what="The installed vLLM hands out the state after the last layer for this kind of model.",
    why="Until vLLM's pull request 46973 (June 2026) deepseek_v2.py took states only where they "
    "enter a layer: id 61 of Kimi-K2.5 was dropped without a word and the consumer's buffer did "
    "not fit ('got 3'), after the whole load.",
    how="The text of the class that vLLM's registry names for the language model's architecture.",
    fix="use the pinned vLLM",
    needs=("installed",),
    stages=("extract",),
    after=("verifier-config",),
)
def last_state(facts: Facts) -> Iterator[Problem | Note]:
    name = vllm_source.architecture(facts.verifier)
    text = vllm_source.model_text(facts.vllm_source, name) if name else None
    gives = vllm_source.gives_last_state(text) if text else None
    if gives is None:
        yield Note(f"cannot tell from vLLM's files for {name}: extract's first unit will")
    elif not gives:
        yield Problem(
            f"vLLM {facts.versions['vllm']} hands out no state after the last layer of {name}",
            where=facts.vllm_source / vllm_source.REGISTRY,
            expected=f"id {facts.verifier.num_layers}, the target of the loss",
        )


@rule(
    "engine-yarn",
    what=f"vLLM is {YARN_MSCALE} or newer where the draft has YaRN with mscale.",
    why="Older ones ignore mscale and mscale_all_dim of a llama draft (issue 48621: 1.27 instead "
    "of 1.0 at factor 16; 1.42 at Kimi's 64): each attention score is scaled by its square, and "
    "acceptance falls with nothing said. In 0.31.0 they are read by "
    "layers/rotary_embedding/yarn_scaling_rope.py.",
    how="The installed version, where [train.draft] rope or the verifier's says mscale.",
    fix="use the pinned vLLM",
    needs=("installed",),
    stages=("benchmark",),
    after=("verifier-config",),
)
def yarn(facts: Facts) -> Iterator[Problem]:
    from packaging.version import Version

    own = facts.recipe.train.draft.rope
    rope = rope_of(facts.verifier.text_config) if own is None else own
    if not (rope.get("mscale") and rope.get("mscale_all_dim")):
        raise NotConcerned("no YaRN with mscale")
    found = facts.versions["vllm"]
    if Version(found) < Version(YARN_MSCALE):
        yield Problem(f"vLLM {found}", where="installed libraries", expected=f">= {YARN_MSCALE}")


@rule(
    "engine-prefix-caching",
    what="States were extracted with prefix caching off.",
    why="vLLM's prefix cache serves the first blocks of a prompt that it has seen before without "
    "computing them: the states of those tokens then come from another request's cache, or from "
    "none (v1/spec_decode/extract_hidden_states.py, 0.31.0, caches what was computed).",
    how=f"Ours is off in capture/settings.py; the metadata of {LOOKED_AT} shards, evenly "
    "spread (a shard that was converted may come from elsewhere).",
    fix="extract those shards again with kimi-eagle",
    needs=("states",),
    stages=("train",),
    after=("layers-states-whole",),
)
def prefix_caching(facts: Facts) -> Iterator[Problem]:
    shards = facts.states.shards
    for shard in shards[:: -(-len(shards) // LOOKED_AT)]:
        if json.loads(shard.meta.get("engine", "{}")).get("enable_prefix_caching"):
            yield Problem("prefix caching was on", where=shard.path, expected="off")
