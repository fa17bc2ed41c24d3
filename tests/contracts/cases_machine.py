"""Machines that are too small, too slow or too old. No GPU is needed: the facts are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from place import Case, Place

from kimi_eagle.contracts.facts import Gpu

CUDA_13 = ("13.0", ["sm_80", "sm_90", "sm_100", "sm_120"])


def site(**keys: Any) -> Callable[[Place], None]:
    def change(place: Place) -> None:
        place.site = {"name": "place", **keys}

    return change


def machine(gib: float = 80.0, capability: tuple[int, int] = (9, 0), driver: str = "580.65.06"):
    """GPUs of one kind, seen by a torch built for CUDA 13."""

    def change(place: Place) -> None:
        place.recipe["engine"]["device"] = "cuda"
        place.given |= {"gpus": [Gpu(gib, capability)] * 8, "cuda": CUDA_13, "driver": driver}

    return change


CASES = [
    Case(
        "machine-memory",
        site(gpu_memory_gib=1.0),
        "a GPU at tp 1, pp 1",
        site(gpu_type="nvidia_h100_80gb_hbm3"),
    ),
    Case("machine-memory-here", machine(gib=1.0), "this machine: [engine]", machine()),
    Case(
        "machine-load-time",
        site(load_gib_per_second=1e-9),
        "at least 3 loads of",
        site(load_gib_per_second=2.0),
    ),
    Case("machine-driver", machine(driver="570.86.10"), "driver 570.86.10", machine(), heavy=True),
    Case(
        "machine-architecture",
        machine(capability=(7, 0)),
        "sm_70 has no bfloat16",
        machine(capability=(12, 0)),
        heavy=True,
    ),
    Case(
        "machine-architecture",
        machine(capability=(11, 0)),
        "no code for sm_110",
        machine(),
        heavy=True,
    ),
]
