"""Who hangs, who lags: each rank says what it is doing, one reader judges.

Each rank writes `beats/rank-N.json` once a second (a thread does): where it is in its step, how
often it went on, and a tick that tells a thread that lives from a process that stands still. The
reader is the stage's process beside torchrun; where training is that process itself, a thread of
it. Files, because a rank that hangs answers no collective, and the store of torchrun hangs with
the node that holds it; torch's own watchdog (NCCL, 600 s) says that a collective timed out, not for
whom.

Time is that between looks, of which the reader counts a few seconds each at most: a job that was
suspended for an hour (Slurm's suspend, SIGSTOP for all) has not hung.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from kimi_eagle import files

logger = logging.getLogger(__name__)

FOLDER = "beats"
BEAT_SECONDS = 1.0
SILENT_LOOKS = 10
"""A rank whose tick stood still for so many looks, while others' went on, has stopped."""

START_SECONDS = 600.0
"""Time that a rank has at least until it says something: it imports torch and meets the others
(torchrun's own rendezvous waits as long)."""

BETWEEN = ("after the step", "checkpoint", "validation")
ORDER = ("starting", *BETWEEN, "waiting for data", "forward", "backward", "gradient norm",
         "optimizer")  # fmt: skip
"""What a rank does with one number of steps done, in order: the rank that others wait for is behind
in it. The step is counted before BETWEEN."""

LAGS = 1.5
"""A rank that needs this many times the others' median for its own work lags."""
LAG_SECONDS = 0.02
LAG_STEPS = 5
"""And at least so much longer, in so many measured steps: less is noise."""


@dataclass(frozen=True)
class Beat:
    """What a rank says. went_on: times it went on to something. own_seconds: mean of its own work
    a step (data and forward, before it meets the others), of `measured` steps."""

    rank: int
    host: str
    pid: int
    tick: int = 0
    went_on: int = 0
    step: int = 0
    doing: str = "starting"
    own_seconds: float = 0.0
    measured: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """How far it is: the one that others wait for is behind."""
        return self.step, ORDER.index(self.doing) if self.doing in ORDER else len(ORDER)

    def who(self) -> str:
        """For people."""
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


class Pulse:
    """What one rank says of itself; a context manager that writes it until it is left.

    folder: where to, `FOLDER` of the working folder; what lies there is at most a second old.
    on_beat: called with each (the reader of a run of one process).
    """

    def __init__(self, folder: Path, rank: int, on_beat: Callable[[Beat], None] | None = None):
        self._path = folder / f"rank-{rank}.json"
        self._beat = Beat(rank, socket.gethostname(), os.getpid())
        self._on_beat, self._over = on_beat, threading.Event()
        self._thread = threading.Thread(target=self._write, name="pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10 * BEAT_SECONDS)

    @property
    def beat(self) -> Beat:
        """The newest."""
        return self._beat

    def goes_on(self, doing: str, step: int) -> None:
        """This rank begins with something. step: optimizer steps done."""
        new = replace(self._beat, doing=doing, step=step, went_on=self._beat.went_on + 1)
        self._beat = new

    def worked(self, seconds: float) -> None:
        """The rank's own work of a step that was measured."""
        old, n = self._beat, min(self._beat.measured, 20)
        mean = (old.own_seconds * n + seconds) / (n + 1)
        self._beat = replace(old, own_seconds=mean, measured=old.measured + 1)

    def _write(self) -> None:
        tick = 0
        while True:
            tick += 1
            beat = replace(self._beat, tick=tick)
            with suppress(OSError):  # a full disk is told by who has to write
                files.write_atomic(self._path, files.to_json(asdict(beat)), sync=False)
            if self._on_beat:
                self._on_beat(beat)
            if self._over.wait(BEAT_SECONDS):
                return


@dataclass
class Watch:
    """Judges what the ranks say. seconds: without going on, until a rank hangs."""

    ranks: int
    seconds: float
    _seen: dict[int, Beat] = field(default_factory=dict)
    _still: dict[int, float] = field(default_factory=dict)
    _silent: dict[int, int] = field(default_factory=dict)
    _named: set[int] = field(default_factory=set)

    def look(self, beats: dict[int, Beat], passed: float) -> str | None:
        """A sentence when a rank has not gone on for `seconds`. passed: since the last look."""
        silent = []
        for rank in range(self.ranks):
            old, new = self._seen.get(rank), beats.get(rank)
            went_on = new is not None and (old is None or new.went_on != old.went_on)
            self._still[rank] = 0.0 if went_on else self._still.get(rank, 0.0) + passed
            ticked = new is not None and (old is None or new.tick != old.tick)
            self._silent[rank] = 0 if ticked else self._silent.get(rank, 0) + 1
            if new is not None:
                self._seen[rank] = new
                silent += [rank] if self._silent[rank] >= SILENT_LOOKS else []
        begun = [self._still[r] for r in self._seen]
        absent = [self._still[r] for r in range(self.ranks) if r not in self._seen]
        late = max(absent, default=0.0) >= max(self.seconds, START_SECONDS)
        if not late and max(begun, default=0.0) < self.seconds:
            return None
        return self._sentence(silent, late)

    def _sentence(self, silent: list[int], late: bool) -> str:
        missing = [r for r in range(self.ranks) if r not in self._seen]
        if late or not self._seen:
            names = ", ".join(map(str, missing))
            return f"training hangs: rank {names} of {self.ranks} did not begin"
        places = {r: b.place for r, b in self._seen.items()}
        behind = silent or [r for r, p in places.items() if p == min(places.values())]
        first = self._seen[behind[0]]
        others = [f"rank {r}" for r in behind[1:]]
        who = first.who() + (f", and so do {', '.join(others)}" if others else "")
        how = "gives no sign of life" if silent else "does not go on"
        waiting = sorted({b.doing for r, b in self._seen.items() if r not in behind})
        rest = f"; the other ranks are at: {', '.join(waiting)}" if waiting else ""
        at = f"after step {first.step}" if first.doing in BETWEEN else f"at step {first.step + 1}"
        return (
            f"training hangs: {who} {how} for {self._still[behind[0]]:.0f} s; it was {at}: "
            f"{first.doing}{rest}"
        )

    def lagging(self, beats: dict[int, Beat]) -> list[str]:
        """A sentence for each rank that makes the others wait, once."""
        if len(beats) < 2 or min(b.measured for b in beats.values()) < LAG_STEPS:
            return []
        words = []
        for rank, beat in beats.items():
            usual = median(b.own_seconds for r, b in beats.items() if r != rank)
            slow = beat.own_seconds > LAGS * usual and beat.own_seconds > usual + LAG_SECONDS
            if slow and rank not in self._named:
                self._named.add(rank)
                words.append(
                    f"{beat.who()} lags: {beat.own_seconds * 1000:.0f} ms of its own work a step, "
                    f"the others {usual * 1000:.0f} ms"
                )
        return words


def read(folder: Path) -> dict[int, Beat]:
    """What the ranks said last; ranks that said nothing, or nothing whole, are not in it.

    Nor are those whose file cannot be read now: on NFS it is replaced under the reader (ESTALE).
    """
    found: dict[int, Beat] = {}
    for path in folder.glob("rank-*.json"):
        with suppress(OSError, TypeError):
            data: Any = files.read_json(path)
            if isinstance(data, dict):
                beat = Beat(**data)
                found[beat.rank] = beat
    return found


def clear(folder: Path) -> None:
    """Forget what ranks of an earlier attempt said."""
    for path in folder.glob("rank-*.json"):
        path.unlink(missing_ok=True)


def outlast(seconds: float) -> None:
    """Let collectives wait longer than `seconds`, after which a rank that hangs is named here.

    NCCL ends the process after 600 s, a longer hang_seconds or not. speculators' set-up has no
    parameter for it (0.9.0); the function is torch's own (2.13.0), which torchtitan uses likewise.
    """
    import torch.distributed as dist

    if dist.is_initialized() and seconds + 60 > 600:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds + 60))


class OwnWatch:
    """The reader of a run of one process: it can only end that process, with a sentence.

    Called at each beat of the Pulse; `leave` is what ends the process.
    """

    def __init__(self, seconds: float, leave: Callable[[str], None] | None = None):
        self._watch, self._leave = Watch(1, seconds), leave or _leave

    def __call__(self, beat: Beat) -> None:
        """One look."""
        if word := self._watch.look({beat.rank: beat}, BEAT_SECONDS):
            self._leave(word)


def _leave(word: str) -> None:
    """The main thread stands still somewhere, so that nothing can be raised in it."""
    print(f"kimi-eagle: {word}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.stderr)
    os._exit(1)
