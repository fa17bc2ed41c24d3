"""Settings that vLLM would refuse after the load, and versions that lack what is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cases_layers import states, with_states
from place import Case, Place


def engine(section: str | None = None, **values: Any) -> Callable[[Place], None]:
    """Keys of [engine], or of [SECTION.engine]."""

    def change(place: Place) -> None:
        table = place.recipe if section is None else place.recipe.setdefault(section, {})
        table.setdefault("engine", {}).update(values)

    return change


def too_long(place: Place) -> None:
    """With a draft for so many positions, which has a rule of its own."""
    place.recipe["engine"]["max_model_len"] = 5000
    place.recipe["train"]["draft"]["max_position_embeddings"] = 8192


def two_gpus_of_one(place: Place) -> None:
    place.recipe["slurm"] = {"gpus": 1}
    place.recipe["engine"]["tp"] = 2


def int4_in_groups(place: Place, size: int) -> None:
    """INT4 experts of width 32 in groups of so many values."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    ignore = ["re:.*"]  # what the stand-in's own weights are
    quantised = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ignore}
    place.change_text(quantization_config=quantised)


def group_across_ranks(place: Place) -> None:
    """One group cannot lie on two ranks."""
    int4_in_groups(place, 32)
    place.recipe["engine"]["tp"] = 2


def vllm_of(model_code: str) -> Callable[[Place], None]:
    """A vLLM whose class for the language model reads like this."""

    def change(place: Place) -> None:
        models = place.path / "vllm/model_executor/models"
        models.mkdir(parents=True)
        line = '    "DeepseekV3ForCausalLM": ("deepseek_v2", "DeepseekV3ForCausalLM"),\n'
        (models / "registry.py").write_text(f"_MODELS = {{\n{line}}}\n")
        (models / "deepseek_v2.py").write_text(model_code)
        place.given["vllm_source"] = place.path / "vllm"

    return change


BEFORE_46973 = """
        for idx, layer in enumerate(self.layers):
            if idx in self.aux_hidden_state_layers:
                aux_hidden_states.append(hidden_states + residual)
            hidden_states, residual = layer(positions, hidden_states, residual)
"""


def versions(**changed: str) -> Callable[[Place], None]:
    """The versions that are installed, but for these."""

    def change(place: Place) -> None:
        place.given["versions"] = place.facts().versions | changed

    return change


CASES = [
    Case("engine-tp-divides", engine(tp=3), "tp 3 does not divide attention heads (4)"),
    Case("engine-tp-divides", group_across_ranks, "the experts' 1 groups of 32; expected one of 1"),
    Case(
        "engine-tp-divides",
        lambda place: int4_in_groups(place, 64),
        "the experts' width (32) into groups of 64; expected a checkpoint that some tp divides",
        lambda place: int4_in_groups(place, 32),
    ),
    Case("engine-on-a-node", two_gpus_of_one, "tp 2 x pp 1 = 2 GPUs", engine(tp=2)),
    Case("engine-pipeline", engine("extract", pp=2), "pp 2", engine("regenerate", pp=2)),
    Case("engine-context", too_long, "max_model_len 5000"),
    Case("engine-batch", engine(max_num_batched_tokens=16, max_num_seqs=32), "tokens 16 with"),
    Case("engine-last-state", vllm_of(BEFORE_46973), "hands out no state after the last layer"),
    Case("engine-yarn", versions(vllm="0.29.0"), "vLLM 0.29.0"),
    Case(
        "engine-prefix-caching",
        states(engine={"enable_prefix_caching": True}),
        "prefix caching was on",
        lambda place: with_states(place, engine={"enable_prefix_caching": False}),
    ),
]
