"""Training: what speculators is told, what the samples need, and the draft to start from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kimi_eagle.contracts.draft_shape import YARN
from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import Note, Problem, rule
from kimi_eagle.training import draftkind
from kimi_eagle.training.shape import rope_parameters, text_config

LOSSES = ("ce", "jsd", "kl_div", "lk_hybrid", "nla", "rkl", "tv")
"""speculators 0.9.0, losses/utils.py; the same names for its fused and its eager losses."""
LEFT: dict[str, Any] = {
    "muon_momentum": 0.95,
    "muon_weight_decay": 0.1,
    "muon_ns_steps": 5,
    "muon_adjust_lr_fn": "match_rms_adamw",
    "scheduler_warmup_steps": None,
    "scheduler_num_cosine_cycles": 0.5,
    "save_best": False,
    "gradient_checkpointing": False,
}
"""Settings of speculators 0.9.0's TrainerConfig (train/trainer.py) that are left at its values."""
SET = frozenset(
    "lr num_epochs save_path resume_from_checkpoint train_call_kwargs val_call_kwargs optimizer"
    " weight_decay muon_lr scheduler_type scheduler_warmup_ratio scheduler_total_steps"
    " checkpoint_freq hidden_states_dtype log_freq fsdp_shard max_steps".split()
)
"""Those that training/loop.trainer_config sets from the recipe."""


@rule(
    "training-loss",
    what="The loss is one that speculators knows, or weights of such.",
    why="speculators 0.9.0 (losses/utils.py, resolve_loss_config) refuses another name when "
    "training starts, after the whole extraction. A weight of 0, below it or NaN it takes: that "
    "part trains nothing, away from the target, or all weights to NaN.",
    how="train.loss against its names; a JSON object maps names to weights above 0.",
    fix='set [train] loss, for example "kl_div" or \'{"ce": 0.1, "tv": 0.9}\'',
    stages=("train",),
)
def loss(facts: Facts) -> Iterator[Problem]:
    if fault := _loss_fault(facts.recipe.train.loss):
        weight = fault.startswith("weight of")
        expected = "a finite number above 0" if weight else f"of {', '.join(LOSSES)}"
        yield Problem(fault, where="train.loss", expected=expected)


def _loss_fault(spec: str) -> str | None:
    if spec in LOSSES:
        return None
    try:
        weights = json.loads(spec)
    except ValueError:
        return f"unknown loss {spec!r}"
    if not isinstance(weights, dict) or not weights:
        return f"loss {spec!r} is no object of weights"
    for name, weight in weights.items():
        if name not in LOSSES:
            return f"unknown loss {name!r}"
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            return f"weight of loss {name!r} is no number"
        if not (math.isfinite(weight) and weight > 0):
            return f"weight of loss {name!r} is {weight}"
    return None


@rule(
    "training-attention",
    what="The attention of training exists on its device.",
    why="flex attention has no backward pass on a CPU (torch 2.13.0): the first step fails.",
    how="train.attention against train.device.",
    fix='set [train] attention = "auto"',
    stages=("train",),
)
def attention(facts: Facts) -> Iterator[Problem]:
    section = facts.recipe.train
    if (section.device, section.attention) == ("cpu", "simple_flex_attention"):
        yield Problem("flex attention on a CPU", where="train.attention", expected="auto or sdpa")


@rule(
    "training-unread",
    what="No optimizer setting is given that the chosen optimizer never reads.",
    why="speculators 0.9.0 (train/optimizers.py) takes muon_lr with Muon alone: with AdamW the "
    "rate that was meant is lr, and nothing says so.",
    how="train.muon_lr against train.optimizer.",
    fix='set [train] lr, or optimizer = "muon"',
    stages=("train",),
)
def unread(facts: Facts) -> Iterator[Problem]:
    section = facts.recipe.train
    if section.muon_lr is not None and section.optimizer != "muon":
        yield Problem(
            f"muon_lr with optimizer {section.optimizer}",
            where="train.muon_lr",
            expected="muon, or no muon_lr",
        )


@rule(
    "training-defaults",
    what="Every setting of speculators' trainer is set from the recipe or left on purpose.",
    why="Its defaults are not those of the published drafts: 20 epochs, Muon at 1e-3 (command "
    "line) or 0.02 (TrainerConfig), a sliding window of 2,048, the head size of an MLA config. A "
    "version with another setting or another default would train something else, without a word.",
    how="Fields and defaults of TrainerConfig against what training/loop.py sets and what is left; "
    "the shape of the draft is never made by speculators.",
    fix="install speculators 0.9.0, or use the pinned image",
    needs=("speculators",),
    stages=("train",),
)
def defaults(facts: Facts) -> Iterator[Problem]:
    found = facts.look_up("speculators.train.trainer:TrainerConfig")
    if found is None:
        yield Problem("speculators has no TrainerConfig", where="speculators.train.trainer")
        return
    values = getattr(found, "_field_defaults", {})
    for name in found._fields:
        if name in SET:
            continue
        if name not in LEFT:
            yield Problem(
                f"TrainerConfig has {name}, which the recipe knows nothing of", where="speculators"
            )
        elif values.get(name) != LEFT[name]:
            yield Problem(
                f"{name} is {values.get(name)} where nothing is said",
                where="speculators, TrainerConfig",
                expected=str(LEFT[name]),
            )


@rule(
    "training-seq-len",
    what="The longest sample fits into one step.",
    why="speculators 0.9.0 (train/data.py) cuts a sample at the length of a step: the states of "
    "the rest were extracted (57,344 bytes a token for Kimi-K2.5) and never read, and what "
    "is cut is the end of the answer.",
    how="train.seq_len against prepare.max_length.",
    fix="set [train] seq_len to at least prepare.max_length, or lower that",
    stages=("extract", "train"),
)
def seq_len(facts: Facts) -> Iterator[Problem]:
    longest, step = facts.recipe.prepare.max_length, facts.recipe.train.seq_len
    if step < longest:
        yield Problem(
            f"samples of up to {longest:,} tokens in steps of {step:,}",
            where="train.seq_len",
            expected=f"at least {longest:,}",
        )


# -- the draft to start from -----------------------------------------------------------------------


def _start_rule(id: str, *, after: tuple[str, ...] = (), **words: Any):  # noqa: A002
    """A rule on the directory of `train.from`."""
    return rule(id, stages=("vocab", "train"), after=after, **words)


WHOLE = ("training-from-complete", "training-from-kind")
DEEP = ("verifier-directory", "verifier-config", *WHOLE)


@_start_rule(
    "training-from-complete",
    what="The draft in train.from is a local directory with config and whole weights.",
    why="A checkpoint that was being written when its job died has files of the wrong size; "
    "speculators 0.9.0 takes a folder without weights for a config to start anew from, with one "
    "line in the log, and a name that is no folder for a model of the hub.",
    how="config.json, whose numbers must be numbers, and every safetensors header against its "
    "file's size.",
    fix="name a run's draft/ or a whole checkpoint (checkpoints/checkpoint_best)",
)
def from_complete(facts: Facts) -> Iterator[Problem]:
    start = facts.start
    if not start.path.is_dir():
        yield Problem("no such directory", where=str(start.path), expected="a draft")
    elif facts.run is not None and start.path.resolve() == facts.run.draft.resolve():
        yield Problem(
            "train.from is the draft that this very run makes",
            where=str(start.path),
            expected="another run's, or a copy",
            fix="copy it elsewhere: each training would undo itself",
        )
    else:
        start.config, start.tensors  # noqa: B018  raise where they cannot be read


@_start_rule(
    "training-from-kind",
    what="The draft in train.from is an EAGLE-3 draft of llama kind in speculators' format.",
    why="Of a draft with latent attention (Eagle3DeepseekV2ForCausalLM) vLLM serves what it likes, "
    "but speculators 0.9.0 has no such layer (models/eagle3/model_definitions.py: llama, qwen3): "
    "it may be benchmarked, not trained here. Others' formats name their tensors differently.",
    how="speculators_model_type, architectures and the decoder's model_type in config.json.",
    fix="start from a draft of speculators (`speculators convert` makes one of an EAGLE-3 "
    "checkpoint in its first format), or leave [train] from out",
    after=("training-from-complete",),
)
def from_kind(facts: Facts) -> Iterator[Problem]:
    start = facts.start
    if start.kind == "latent":
        name = ", ".join(start.names) or start.layer_type
        yield Problem(
            f"a draft of latent-attention kind ({name}): it can be benchmarked, not trained",
            where=str(start.path),
            expected="a llama decoder",
        )
    elif start.kind != "eagle3" or not start.known_decoder:
        yield Problem(
            f"{draftkind.in_words(start.config)}, with a {start.layer_type} decoder",
            where=str(start.path),
            expected="speculators' eagle3 with a llama decoder",
        )


@_start_rule(
    "training-from-verifier",
    what="The draft in train.from was made for this verifier.",
    why="Its input layer reads the verifier's states and its output rows name its tokens; "
    "of another model both are noise, whatever their sizes.",
    how="Hidden size and vocabulary against config.json; the verifier that it names is told.",
    fix="take a draft of this verifier, or leave [train] from out",
    after=DEEP,
)
def from_verifier(facts: Facts) -> Iterator[Problem | Note]:
    own, text = facts.start.shape(), text_config(facts.verifier.config)
    for key in ("hidden_size", "vocab_size"):
        if own.get(key) != text.get(key):
            yield Problem(
                f"a draft for another verifier: {key} {own.get(key)}",
                where=str(facts.start.path),
                expected=f"{text.get(key)}",
            )
            return
    named = facts.start.named_verifier
    if named and Path(named).name != facts.verifier.path.name:
        yield Note(f"it names the verifier {named}")


SHAPE = ("hidden_act", "num_attention_heads", "num_key_value_heads", "head_dim")
NORMS = {
    "norm_before_residual": True,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
"""Switches of the norms, and what vLLM 0.31.0 takes where a speculators config is silent
(transformers_utils/configs/speculators/algos.py)."""
SHAPE_ALL = (*SHAPE, "intermediate_size", "max_position_embeddings")


@_start_rule(
    "training-from-shape",
    what="What [train.draft] says is true of the draft in train.from.",
    why="Its shape is kept as it is: a key that says otherwise would be read by nobody.",
    how="Each key that is set against the draft's config; layers, and the vocabulary's size.",
    fix="leave [train.draft] out with train.from (a rope there repeats that draft's own); set "
    "vocab.draft_vocab_size to the draft's",
    after=DEEP,
)
def from_shape(facts: Facts) -> Iterator[Problem]:
    start, told = facts.start, facts.recipe.train.draft
    own = start.shape()
    pairs = {f"train.draft.{k}": (getattr(told, k), own.get(k)) for k in SHAPE_ALL}
    if "layers" in told.model_fields_set:
        pairs["train.draft.layers"] = told.layers, own.get("num_hidden_layers")
    for key, default in NORMS.items():
        if key in told.model_fields_set:
            pairs[f"train.draft.{key}"] = getattr(told, key), start.config.get(key, default)
    pairs["vocab.draft_vocab_size"] = facts.recipe.vocab.draft_vocab_size, start.draft_vocab_size
    if told.rope is not None:
        ropes = rope_parameters({"rope_parameters": told.rope}), rope_parameters(start.layer)
        for key in ("rope_theta", *YARN):
            wanted, has = (rope.get(key, YARN.get(key)) for rope in ropes)
            pairs[f"train.draft.rope: {key}"] = wanted or "none", has or "none"
    for key, (wanted, has) in pairs.items():
        if wanted is not None and wanted != has:
            yield Problem(
                f"{key} is {wanted}, the draft has {has}",
                where=str(start.path),
                expected=str(has),
            )
            return


@_start_rule(
    "training-from-layers",
    what="The draft in train.from reads the states that the recipe extracts.",
    why="Its input layer was trained on the states of its own layers. Others have the same shape "
    "and train without a word, from worse than nothing.",
    how="eagle_aux_hidden_state_layer_ids of the draft against extract.layers without the last.",
    fix="set [extract] layers to the draft's ids and the number of layers",
    after=DEEP,
)
def from_layers(facts: Facts) -> Iterator[Problem]:
    own, wanted = facts.start.aux_layers, list(facts.recipe.extract.layers[:-1])
    if own != wanted:
        yield Problem(
            f"the draft reads layers {own}", where=str(facts.start.path), expected=str(wanted)
        )


@_start_rule(
    "training-from-mapping",
    what="The draft in train.from keeps its own d2t, and the run's mapping is that one.",
    why="Row i of its output matrix was trained for token i + d2t[i]. With another mapping of the "
    "same size every row means another token; it loads, and the loss starts where it started once.",
    how="d2t and t2d in its weights; against [vocab] mapping where the recipe names one.",
    fix="leave [vocab] mapping out: the vocab stage takes the draft's own",
    after=(*DEEP, "training-from-verifier", "training-from-shape", "mapping-offsets"),
)
def from_mapping(facts: Facts) -> Iterator[Problem]:
    start, whole = facts.start, facts.verifier.vocab_size
    own = start.mapping(whole)
    if facts.recipe.vocab.mapping and facts.mapping.digest != own.digest:
        yield Problem(
            "[vocab] mapping is another one than the draft's",
            where=facts.recipe.vocab.mapping,
            expected="the draft's own d2t",
        )
