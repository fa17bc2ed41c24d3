"""Samples whose bytes are not those that were written, as training met them.

One line a sample in `damaged.jsonl` of the working folder, appended by whichever process met it:
a rank, or one of its data workers. The train stage reads the file, marks the units that the
samples belong to (so that `retry` makes these again) and lists the skipped ones. No torch here.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_eagle.errors import RunError

logger = logging.getLogger(__name__)

NAME = "damaged.jsonl"


@dataclass(frozen=True)
class Damage:
    """shard: name of the safetensors file. sample: its id. what: what is wrong.

    skipped: left out of training, which went on; else training stopped.
    """

    shard: str
    sample: str
    what: str
    skipped: bool

    def error(self, fix: str) -> RunError:
        """The error that stops training."""
        return RunError(
            f"damaged hidden states: {self.what}",
            where=f"{self.shard}, sample {self.sample}",
            fix=fix,
        )


@dataclass(frozen=True)
class DamageLog:
    """What is done with a damaged sample. path: the file. skip: leave it out, else stop. allowed:
    so many may be left out."""

    path: Path
    skip: bool
    allowed: int = 1

    def meet(self, shard: Path, sample: str, what: str) -> Damage:
        """Name a sample, once in the life of the file; RunError unless it is to be skipped, and may
        be."""
        met = Damage(shard.name, sample, what, self.skip)
        # Ranks and workers share no sample within an epoch: none can come between these two.
        if met not in read(self.path):
            append(self.path, met)
            logger.warning("%s, sample %s is damaged: %s", met.shard, sample, what)
        if not self.skip:
            raise met.error("kimi-eagle retry RUN makes its unit again")
        left_out = len({d.sample for d in read(self.path) if d.skipped})
        if left_out > self.allowed:
            raise RunError(
                f"{left_out} samples are damaged, the last one {sample}: {what}",
                where=shard.name,
                expected=f"at most {self.allowed} (train.max_damaged_share)",
                fix="kimi-eagle retry RUN makes their units again",
            )
        return met


def append(path: Path, met: Damage) -> None:
    """Add a line; lines of several processes do not mix (O_APPEND, one write)."""
    line = json.dumps(vars(met)) + "\n"
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def read(path: Path) -> list[Damage]:
    """All whole lines in order; [] where there is no file."""
    found: list[Damage] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return found
    for line in lines:
        try:
            data: dict[str, Any] = json.loads(line)
            found.append(Damage(**data))
        except (ValueError, TypeError):
            continue  # a process was killed within its line
    return found
