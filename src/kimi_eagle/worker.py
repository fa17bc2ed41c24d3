"""A worker: one process that works through units of a stage until none is left for it.

It keeps a heartbeat file, claims units, turns faults into attempts, and commits results as files
plus one record. What a fault means is decided here, once, for all stages: a stop or a broken
machine drops the unit, anything else counts as a failed try of that unit.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from kimi_eagle import files, liveness
from kimi_eagle.errors import KimiEagleError, RunError
from kimi_eagle.ledger import Ledger, Unit
from kimi_eagle.provenance import provenance
from kimi_eagle.rundir import StageDir

MAX_FAILURES = 3
"""Failed tries of a unit before it gets a failed record (DESIGN promise 5)."""

BEATS_A_LOOK = 5
"""Heartbeats between two calls of `on_look`, which may list the records of the whole stage."""

TEST_HOLD = "KIMI_EAGLE_TEST_HOLD"
"""Test switch: a worker's first unit (never the stage's very first) waits, once a part of it is
done, until this many workers hold claims, or, for a path, until that file exists. For faults in the
middle of a unit."""


class Stopped(BaseException):
    """The worker was asked to leave (stop file, SIGTERM, SIGINT). Not an Exception: nothing that
    guards a unit against faults may swallow it."""


class Worker:
    """Context manager around a stage's work; see `attempts` for the loop."""

    def __init__(
        self,
        stage_dir: StageDir,
        *,
        recipe_digest: str = "",
        on_look: Callable[[Worker], None] | None = None,
    ):
        """on_look: called from the heartbeat thread now and then, and after each commit."""
        self.dir = stage_dir.make()
        self.ledger = Ledger(stage_dir, recipe_digest)
        who = liveness.identity()
        # host.sh, which outlives this process, drops the claims of its own job by this prefix.
        self.job = os.environ.get("KIMI_EAGLE_JOB")
        prefix = f"j{self.job}-" if self.job else ""
        self.id = f"{prefix}{who['host']}-{who['pid']}-{secrets.token_hex(3)}"
        own_stop = os.environ.get("KIMI_EAGLE_STOP")
        self._stops = [stage_dir.stop, *([Path(own_stop)] if own_stop else [])]
        self._on_look = on_look
        self._state: dict[str, Any] = {
            **who,
            "id": self.id,
            "job": self.job,
            "recipe": recipe_digest,
            "beat": 0,
            "beat_seconds": liveness.BEAT_SECONDS,
            "started": time.time(),
            "phase": "start",
            "phases": {},
            "unit": None,
            "fraction": 0.0,
            "tokens": 0,
        }
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._signal: int | None = None
        self._hold = ""
        self.tokens = 0
        """Tokens worked on so far, all units together."""
        self.committed = 0
        """Units that this worker committed."""

    # -- life ----------------------------------------------------------------------------------

    def __enter__(self) -> Worker:
        self._write()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, _tb: object) -> None:
        self._over.set()
        error = value.line() if isinstance(value, KimiEagleError) else None
        if value is not None and error is None:
            error = "stopped" if isinstance(value, Stopped) else f"{kind.__name__}: {value}"
        with contextlib.suppress(OSError):
            self._write(ended=time.time(), error=error, unit=None, phase="ended", **_used())

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # A signal can come twice (to the process, and to all of its step): once is enough, and the
        # second must not cut short what the first began.
        if self._signal is None:
            self._signal = number
            raise Stopped(signal.Signals(number).name)

    def _beat(self) -> None:
        while not self._over.wait(liveness.BEAT_SECONDS):
            # A full disk must not kill the thread: the unit's own write will tell.
            with contextlib.suppress(OSError):
                self._write(beat=self._state["beat"] + 1, **_used())
                if self._state["beat"] % BEATS_A_LOOK == 1:
                    self.look()

    def look(self) -> None:
        """Tell the one who wants to know (see `on_look`)."""
        if self._on_look is not None:
            self._on_look(self)

    def _write(self, **changes: Any) -> None:
        with self._lock:
            self._state.update(changes)
            text = files.to_json(self._state) + "\n"
            files.write_atomic(self.dir.workers / f"{self.id}.json", text, sync=False)

    # -- what is going on ------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase (`load`, `work`, ...); the times end in the worker's file and the report."""
        start = time.monotonic()
        self._write(phase=name)
        try:
            yield
        finally:
            phases = dict(self._state["phases"])
            phases[name] = round(phases.get(name, 0.0) + time.monotonic() - start, 3)
            with contextlib.suppress(OSError):
                self._write(phases=phases)

    def progress(self, fraction: float, tokens: int) -> None:
        """How much of the current unit is done (0..1), and tokens worked on by this worker."""
        self._state["fraction"], self._state["tokens"] = fraction, tokens
        while self._hold and not self._test_released(self._hold):
            time.sleep(0.1)
        self._hold = ""

    def note(self, **values: Any) -> None:
        """Show something more in the worker's file, such as loss and step."""
        self._state.setdefault("notes", {}).update(values)

    def stopping(self) -> bool:
        """Asked to leave after the current unit (or, in train, after the current step)?"""
        return self._signal is not None or any(p.exists() for p in self._stops)

    # -- units -----------------------------------------------------------------------------------

    def attempts(self, units: list[Unit], *, max_failures: int = MAX_FAILURES) -> Iterator[Attempt]:
        """Claim open units one by one; use each attempt as a context manager and commit in it.

        Ends when every unit has a record, or the rest is held by live workers, or a stop is asked.
        max_failures=1: a fault goes to the caller at once and leaves no failed record (stages of
        one unit, where there are no others to go on with).
        """
        watch, first = liveness.Watch(), True
        while not self.stopping():
            unit = self._claim_one(units)
            if unit is not None and self._killer(unit, max_failures):
                continue
            if unit is not None:
                if first and len(self.ledger.open_units(units)) < len(units):
                    self._hold, first = os.environ.get(TEST_HOLD, ""), False
                yield Attempt(self, unit, max_failures)
            elif not self._free_stale(units, watch):
                return
        if self.ledger.open_units(units):
            raise Stopped("stop file")

    def _claim_one(self, units: Iterable[Unit]) -> Unit | None:
        for unit in self.ledger.open_units(units):
            if self.ledger.claim(unit, self.id):
                if self.ledger.record(unit) is None:
                    return unit
                self.ledger.release(unit.name, self.id)
        return None

    def _killer(self, unit: Unit, max_failures: int) -> bool:
        """Give up a unit in which worker after worker died without a word (out of memory, crash).

        host.sh, which saw them die unasked, left a mark each time; preempted ones leave none.
        """
        deaths = self.ledger.deaths(unit)
        if max_failures == 1 or len(deaths) < max_failures:
            return False
        attempt = Attempt(self, unit, max_failures)
        attempt.give_up([f"its worker died ({reason})" for reason in deaths])
        return True

    def _test_released(self, wanted: str) -> bool:
        if not wanted.isdigit():
            return Path(wanted).exists()
        # Once so many were there all go on: those that looked later would find fewer again.
        met = self.dir.path / ".test-hold-met"
        if len(list(self.dir.claims.glob("[!.]*"))) >= int(wanted):
            met.touch()
        return met.exists()

    def _free_stale(self, units: Iterable[Unit], watch: liveness.Watch) -> bool:
        """Break claims of the dead; True when it is worth looking again."""
        unknown = False
        for unit in self.ledger.open_units(units):
            holder = self.ledger.claimed_by(unit.name)
            if holder is None:
                return True
            alive = watch.alive(holder, files.read_json(self.dir.workers / f"{holder}.json"))
            if alive is False:
                self.ledger.release(unit.name, holder)
                return True
            unknown |= alive is None
        if unknown:
            time.sleep(liveness.BEAT_SECONDS)
        return unknown


class Attempt:
    """One try of one unit: names for its files, and the commit that makes it done."""

    def __init__(self, worker: Worker, unit: Unit, max_failures: int):
        self.worker, self.unit, self._max_failures = worker, unit, max_failures
        self._ledger = worker.ledger
        self._paths: list[Path] = []
        self._committed = False

    def __enter__(self) -> Attempt:
        self.started = time.time()
        note = {"worker": self.worker.id, "started": self.started}
        self.number = self._ledger.start_attempt(self.unit, note)
        self.worker._write(unit=self.unit.name, fraction=0.0)
        return self

    def path(self, suffix: str) -> Path:
        """Where to write a file of this unit: `files/UNIT.aN.SUFFIX`, a name used once only."""
        path = self.worker.dir.files / f"{self.unit.name}.a{self.number}.{suffix}"
        self._paths.append(path)
        return path

    def commit(
        self,
        paths: Iterable[Path],
        *,
        counts: dict[str, Any] | None = None,
        info: dict[str, Any] | None = None,
        digests: Mapping[Path, tuple[str, str | None]] | None = None,
    ) -> bool:
        """Make these files the unit's result. False: another worker was first, ours are deleted.

        counts: numbers shown and added up (samples, tokens, ...). info: what later stages need.
        digests: those that are known already, with what they are of where that is not the whole
        file (a shard's header: the index proves the rest); the others are computed here.
        """
        entries = []
        for path in paths:
            files.fsync_file(path)
            files.fsync_dir(path.parent)
            value, of = (digests or {}).get(path) or (files.file_digest(path), None)
            entry = {"bytes": path.stat().st_size, "xxh3": value}
            entry["name"] = str(path.relative_to(self.worker.dir.files))
            entries.append(entry | ({"of": of} if of else {}))
        won = self._ledger.create_record(self.unit, self._record("done", entries, counts, info))
        self._committed = True
        self.worker.committed += 1
        if not won:
            self._delete_files()
        return won

    def _record(
        self, state: str, entries: list, counts: dict | None, info: dict | None
    ) -> dict[str, Any]:
        return {
            "format": "record/1",
            "stage": self.worker.dir.path.name,
            "unit": self.unit.name,
            "key": self.unit.key,
            "parts": self.unit.parts,
            "state": state,
            "files": entries,
            "counts": counts or {},
            "info": info or {},
            "attempt": self.number,
            "started": self.started,
            "ended": time.time(),
            "worker": self.worker.id,
            "provenance": provenance(),
        }

    def __exit__(
        self, kind: type | None, value: BaseException | None, _tb: TracebackType | None
    ) -> bool:
        try:
            if value is None and not self._committed:
                raise RunError(f"stage bug: unit {self.unit.name} left without a commit")
            if value is None:
                return False
            if not self._committed:
                self._delete_files()
            return self._judge(value)
        finally:
            with contextlib.suppress(OSError):
                self._ledger.release(self.unit.name, self.worker.id)
            self.worker._state.update(unit=None, fraction=0.0)
            with contextlib.suppress(OSError):
                self.worker.look()

    def _judge(self, fault: BaseException) -> bool:
        """True when the fault is the unit's own and others may go on."""
        if not isinstance(fault, Exception) or _machine_fault(fault):
            return False
        reason = fault.line() if isinstance(fault, KimiEagleError) else _short(fault)
        with contextlib.suppress(OSError):
            self._ledger.fail_attempt(self.unit, self.number, reason)
        if self._max_failures == 1 or getattr(fault, "exit_code", 1) == 2:
            return False
        traceback.print_exception(fault, file=sys.stderr)
        failures = self._ledger.failures(self.unit)
        if len(failures) >= self._max_failures:
            record = self._record("failed", [], None, {"reasons": failures})
            self._ledger.create_record(self.unit, record)
        return True

    def give_up(self, reasons: list[str]) -> None:
        """Record the unit as failed without trying it again."""
        self.started, self.number = time.time(), 0
        record = self._record("failed", [], None, {"reasons": reasons})
        self._ledger.create_record(self.unit, record)
        self._ledger.release(self.unit.name, self.worker.id)

    def _delete_files(self) -> None:
        for path in self._paths:
            with contextlib.suppress(OSError):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)


def _machine_fault(fault: BaseException | None) -> bool:
    """Full disk, lost mount, no right: trying the unit again would burn its tries for nothing."""
    while fault is not None:
        if isinstance(fault, MemoryError):
            return True
        if isinstance(fault, OSError) and fault.errno in files.ENVIRONMENT_FAULTS:
            return True
        fault = fault.__cause__
    return False


def _used() -> dict[str, float]:
    """peak_gib: most memory that one process of this stage held (ru_maxrss is KiB); not a sum, as
    a child's figure starts with what its parent held when it was forked. cpu_seconds: of this
    process and of its ended children."""
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "peak_gib": round(max(u.ru_maxrss for u in used) / 2**20, 2),
        "cpu_seconds": round(sum(u.ru_utime + u.ru_stime for u in used), 1),
    }


def _short(fault: BaseException) -> str:
    return " ".join(f"{type(fault).__name__}: {fault}".split())[:500]
