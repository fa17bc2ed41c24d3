"""What `verify` says of a run or of a folder of shards: rows, faults, how far it is."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

THREADS = 4
"""Files read at once, where there are as many cores: each digests some 10 GB/s."""

OnBytes = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all), one call at a time."""


@dataclass
class Row:
    """One stage. Units are ok, damaged, open, freed (states deleted by `clean --hidden`) or failed
    (given up by their workers); files and bytes are those that the records of the others name."""

    stage: str
    state: str
    units: int = 0
    files: int = 0
    bytes: int = 0
    ok: int = 0
    damaged: int = 0
    open: int = 0
    freed: int = 0
    failed: int = 0
    unread: int = 0
    """Units of which something could not be looked at (no right to, an ill machine), and nothing
    else is wrong."""
    strays: int = 0
    """Names under the stage's files that no current record knows."""
    reason: str = ""


@dataclass
class Damage:
    """One fault. unit is empty for RUN/draft; sample_id None where it lies in no one sample."""

    stage: str
    unit: str
    key: str
    attempt: int
    file: str
    sample_id: str | None
    what: str


@dataclass
class Report:
    """What `verify` found. marked and whole_again: `STAGE UNIT`; the latter were marked before, and
    every byte of them is right now. not_marked: why damage could not be written down."""

    run: str
    deep: bool
    rows: list[Row] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    unread: list[Damage] = field(default_factory=list)
    """What could not be looked at, in the same form; never marked."""
    marked: list[str] = field(default_factory=list)
    whole_again: list[str] = field(default_factory=list)
    not_marked: str = ""

    @property
    def ok(self) -> bool:
        return not self.damage and not self.unread

    @property
    def strays(self) -> int:
        return sum(row.strays for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """The same for machines: run, deep, ok, stages, damage, strays, marked, ..."""
        data = asdict(self) | {"ok": self.ok, "strays": self.strays}
        data["stages"] = data.pop("rows")
        return data


class Count:
    """Bytes read by all threads."""

    def __init__(self, total: int, tell: OnBytes | None):
        self._total, self._tell, self._done = total, tell, 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        if self._tell is not None:
            with self._lock:
                self._done += count
                self._tell(min(self._done, self._total), self._total)

    def end(self) -> None:
        if self._tell is not None:
            self._tell(self._total, self._total)


def threads_here() -> int:
    """Files read at once where nobody says how many."""
    return min(THREADS, len(os.sched_getaffinity(0)))
