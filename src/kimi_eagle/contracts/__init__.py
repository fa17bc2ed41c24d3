"""The contracts between the parts: one file a boundary, each rule with its reason and its fix.

`kimi-eagle check` judges them all, a stage judges its own when it opens. RULES.md is made from
them (`python -m kimi_eagle.contracts`). No torch, transformers, vllm or pyarrow at import.
"""

from importlib import import_module

from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.judging import PROBLEM, Verdict, as_error, enforce, judge
from kimi_eagle.contracts.rule import RULES, Rule

BOUNDARIES = (
    "verifier",
    "verifier_tables",
    "tokenizer",
    "template",
    "layers",
    "engine",
    "machine",
    "libraries",
    "data",
    "mapping",
    "draft_shape",
    "training",
    "draft",
    "draft_values",
    "draft_weights",
    "start",
    "drift",
)
"""The files, in the order in which a run meets them."""

__all__ = [
    "BOUNDARIES", "PROBLEM", "RULES", "Facts", "Rule", "Verdict", "as_error", "enforce", "judge",
    "open_stage",
]  # fmt: skip


def rules() -> dict[str, Rule]:
    """Every rule by id, in the order of BOUNDARIES and within a file from top to bottom."""
    for boundary in BOUNDARIES:
        import_module(f"kimi_eagle.contracts.{boundary}")
    # Somebody may have imported a later file first.
    return dict(sorted(RULES.items(), key=lambda item: BOUNDARIES.index(item[1].boundary)))


def of_stage(stage: str) -> list[Rule]:
    """The rules that are judged when a stage opens."""
    return [r for r in rules().values() if stage in r.stages]


def open_stage(facts: Facts, stage: str) -> None:
    """RunError for the first rule that does not hold."""
    enforce(facts, of_stage(stage))
