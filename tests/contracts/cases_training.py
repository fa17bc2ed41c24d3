"""Settings of training that cannot be, and drafts that training cannot start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from drafts import (
    D2T,
    TOKENS,
    D,
    Draft,
    latent,
    other_format,
    rename,
    set_config,
    set_layer,
    set_rope,
    starting,
)
from drafts import mapping as mapping_of
from place import VOCAB, Case, Place

from kimi_eagle import vocab


def train(**values: Any) -> Callable[[Place], None]:
    """Keys of [train]."""
    return lambda place: place.recipe["train"].update(values)


def changed_library(**defaults: Any) -> Callable[[Place], None]:
    """speculators with other fields in its TrainerConfig."""

    def apply(place: Place) -> None:
        from speculators.train.trainer import TrainerConfig

        values = TrainerConfig._field_defaults | defaults
        names = [*TrainerConfig._fields, *(n for n in defaults if n not in TrainerConfig._fields)]
        other = NamedTuple("TrainerConfig", [(n, Any) for n in names])
        other._field_defaults = values
        before = place.facts(heavy=True).look_up
        place.given["look_up"] = lambda name: (
            other if name == "speculators.train.trainer:TrainerConfig" else before(name)
        )

    return apply


def nowhere(place: Place) -> None:
    train(**{"from": "earlier"})(place)


def torn(place: Place) -> None:
    starting()(place)
    file = place.path / "earlier" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def its_own(place: Place) -> None:
    """The run's own draft as its start."""
    from kimi_eagle.rundir import RunDir

    starting()(place)
    run = RunDir(place.path / "run")
    run.path.mkdir()
    (place.path / "earlier").rename(run.draft)
    train(**{"from": str(run.draft)})(place)
    place.given["run"] = run


def and_other_mapping(place: Place) -> None:
    """[vocab] mapping beside train.from, a different one."""
    starting()(place)
    other = np.array([*range(10, 131), *range(256, 263)])
    _mapping_folder(place, other)


def and_same_mapping(place: Place) -> None:
    starting()(place)
    _mapping_folder(place, TOKENS)


def _mapping_folder(place: Place, tokens: np.ndarray) -> None:
    (place.path / "words").mkdir()
    found = mapping_of(tokens - np.arange(D), np.isin(np.arange(VOCAB), tokens))
    vocab.save(found, lambda name: place.path / "words" / name)
    place.recipe["vocab"]["mapping"] = "words"


def shaped(**values: Any) -> Callable[[Place], None]:
    """A good start, and keys of [train.draft] that say otherwise."""

    def apply(place: Place) -> None:
        starting()(place)
        place.recipe["train"]["draft"].update(values)

    return apply


def without_d2t(draft: Draft) -> None:
    del draft.tensors["d2t"], draft.tensors["t2d"]


def verifier_as_start(place: Place) -> None:
    train(**{"from": str(place.model)})(place)


def without_q(draft: Draft) -> None:
    del draft.tensors["layers.0.self_attn.q_proj.weight"]


def short_d2t(draft: Draft) -> None:
    draft.set_d2t(D2T[:100])


def d2t_of_floats(draft: Draft) -> None:
    draft.tensors["d2t"] = "F32", [D], D2T.astype("<f4").tobytes()


def on_two_gpus(place: Place) -> None:
    """Three heads, which are all right on one."""

    def change(draft: Draft) -> None:
        set_layer(num_attention_heads=3, num_key_value_heads=3)(draft)
        for part in "qkv":
            draft.tensors[f"layers.0.self_attn.{part}_proj.weight"] = "BF16", [48, 128], None
        draft.tensors["layers.0.self_attn.o_proj.weight"] = "BF16", [64, 48], None

    starting(change)(place)
    place.recipe["train"]["draft"] = {}
    place.recipe["benchmark"]["engine"] = {"tp": 2}


def trained_otherwise(place: Place) -> None:
    """A draft with the long table that a recipe gave it on purpose."""
    rope = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0}
    rope["original_max_position_embeddings"] = 64
    starting(set_layer(rope_parameters=rope))(place)
    place.recipe["train"]["draft"]["rope"] = dict(rope)


GOOD = starting()

CASES = [
    Case("training-loss", train(loss="kl_divergence"), "unknown loss 'kl_divergence'"),
    Case(
        "training-loss",
        train(loss='{"ce": 0.1, "tvd": 0.9}'),
        "unknown loss 'tvd'",
        train(loss='{"ce": 0.1, "tv": 0.9}'),
    ),
    Case("training-loss", train(loss="{}"), "no object of weights"),
    Case("training-loss", train(loss='{"ce": "much"}'), "weight of loss 'ce'"),
    Case(
        "training-loss",
        train(loss='{"ce": NaN}'),
        "weight of loss 'ce' is nan; expected a finite number",
    ),
    Case("training-loss", train(loss='{"tv": 1, "ce": 0}'), "weight of loss 'ce' is 0"),
    Case("training-loss", train(loss='{"tv": -1}'), "weight of loss 'tv' is -1"),
    Case(
        "training-attention",
        train(device="cpu", attention="simple_flex_attention"),
        "flex attention on a CPU",
        train(device="cpu", attention="sdpa"),
    ),
    Case(
        "training-unread",
        train(muon_lr=2e-3),
        "muon_lr with optimizer adamw",
        train(muon_lr=2e-3, optimizer="muon"),
    ),
    Case(
        "training-defaults",
        changed_library(gradient_clipping=1.0),
        "TrainerConfig has gradient_clipping",
        heavy=True,
    ),
    Case(
        "training-defaults",
        changed_library(muon_momentum=0.9),
        "muon_momentum is 0.9 where nothing is said; expected 0.95",
        heavy=True,
    ),
    Case("training-seq-len", train(seq_len=64), "samples of up to 128 tokens in steps of 64"),
    Case("training-from-complete", nowhere, "no such directory", GOOD),
    Case("training-from-complete", torn, "by its header", GOOD),
    Case("training-from-complete", its_own, "that this very run makes", GOOD),
    Case(
        "training-from-kind",
        starting(latent),
        "latent-attention kind (Eagle3DeepseekV2ForCausalLM): it can be benchmarked, not trained",
        GOOD,
    ),
    Case("training-from-kind", starting(other_format), "kind LlamaForCausalLMEagle3", GOOD),
    Case(
        "training-from-kind",
        starting(set_config(speculators_model_type="dflash")),
        "kind dflash",
        GOOD,
    ),
    Case("training-from-verifier", starting(set_layer(hidden_size=128)), "hidden_size 128", GOOD),
    Case("training-from-verifier", starting(set_layer(vocab_size=500)), "vocab_size 500", GOOD),
    Case(
        "training-from-shape",
        shaped(intermediate_size=96),
        "train.draft.intermediate_size is 96, the draft has 128",
        shaped(intermediate_size=128),
    ),
    Case("training-from-shape", shaped(head_dim=32), "train.draft.head_dim is 32", GOOD),
    Case(
        "training-from-shape",
        shaped(norm_before_fc=False),
        "train.draft.norm_before_fc is False, the draft has True",
        shaped(norm_before_fc=True, fc_norm=False, norm_output=True),
    ),
    Case(
        "training-from-layers",
        starting(set_config(eagle_aux_hidden_state_layer_ids=[0, 1, 2])),
        "the draft reads layers [0, 1, 2]",
        GOOD,
    ),
    Case("training-from-mapping", and_other_mapping, "another one", and_same_mapping),
    Case("training-from-mapping", starting(without_d2t), "no d2t in the weights", GOOD),
    Case(
        "mapping-offsets",
        starting(lambda draft: draft.set_d2t(TOKENS)),
        "absolute token ids",
        starting(lambda draft: draft.set_d2t(D2T)),
    ),
    Case("training-from-complete", starting(set_layer(head_dim="16")), "head_dim '16'", GOOD),
    Case("training-from-kind", verifier_as_start, "no draft but a model of kind KimiK25", GOOD),
    Case("training-from-shape", shaped(layers=2), "layers is 2, the draft has 1", shaped(layers=1)),
    Case("training-from-tensors", starting(without_q), "no layers.0.self_attn.q_proj", GOOD),
    Case(
        "training-from-tensors", starting(rename("fc.weight", "fc2.weight")), "no fc.weight", GOOD
    ),
    Case("training-from-tensor-shapes", starting(set_layer(head_dim=8)), "has shape", GOOD),
    Case(
        "training-from-shape",
        shaped(rope={"rope_type": "default"}),
        "train.draft.rope: rope_theta is 10000.0, the draft has 50000.0",
        GOOD,
    ),
    Case("training-from-d2t-present", starting(d2t_of_floats), "d2t is F32", GOOD),
    Case("training-from-tensor-shapes", starting(short_d2t), "d2t has shape [100]", GOOD),
    Case("training-from-dtype", starting(lambda d: d.all_of_type("F16")), "is F16", GOOD),
    Case("training-from-activation", starting(set_layer(hidden_act="gelu")), "'gelu'", GOOD),
    Case("training-from-parallel", on_two_gpus, "num_attention_heads 3", GOOD),
    Case(
        "training-from-rope-layouts",
        starting(set_layer(rope_scaling={"type": "linear", "factor": 2.0})),
        "older layout",
        GOOD,
    ),
    Case("training-from-rope-theta", starting(set_rope(rope_theta=777.0)), "theta 777.0", GOOD),
    Case("training-from-yarn", starting(set_rope(mscale=None)), "mscale None", trained_otherwise),
    Case(
        "training-from-positions",
        starting(set_layer(max_position_embeddings=128)),
        "max_position_embeddings 128; expected at least 256",
        GOOD,
    ),
]
