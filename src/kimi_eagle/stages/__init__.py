"""The six stages. Each module is one page and reads as the story of the data:

    plan(ctx)          the units and their keys; raises Waiting while an upstream stage is not done
    work(ctx, worker)  open the inputs, do the units, commit them
    publish(ctx)       (train, benchmark) put the result where people look for it

`context.py` holds the gates and what stages share.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from kimi_eagle.recipe import STAGES

UPSTREAM: dict[str, tuple[str, ...]] = {
    "regenerate": (),
    "prepare": ("regenerate",),
    "extract": ("prepare",),
    "vocab": ("prepare",),
    "train": ("extract", "vocab"),
    "benchmark": ("train",),
}
"""Which stages' records the gate of each stage reads."""


def upstream_of(name: str) -> list[str]:
    """Every stage that a stage stands on, nearest first."""
    found = list(UPSTREAM[name])
    for stage in found:
        found += [u for u in UPSTREAM[stage] if u not in found]
    return found


def module(name: str) -> ModuleType:
    """The module of a stage, imported only when it is needed."""
    if name not in STAGES:
        raise KeyError(name)
    return importlib.import_module(f"kimi_eagle.stages.{name}")
