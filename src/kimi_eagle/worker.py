"""A worker: one process that works through units of a stage until none is left for it.

It keeps a heartbeat file, claims units, turns faults into attempts, and commits results as files
plus one record. What a fault means is decided here, once, for all stages: a stop or a broken
machine drops the unit, anything else counts as a failed try of that unit.
"""

from __future__ import annotations

import contextlib
import resource
import secrets
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
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


class Stopped(BaseException):
    """The worker was asked to leave (stop file, SIGTERM, SIGINT). Not an Exception: nothing that
    guards a unit against faults may swallow it."""


class Worker:
    """Context manager around a stage's work; see `attempts` for the loop."""

    def __init__(self, stage_dir: StageDir, *, recipe_digest: str = ""):
        self.dir = stage_dir.make()
        self.ledger = Ledger(stage_dir)
        who = liveness.identity()
        self.id = f"{who['host']}-{who['pid']}-{secrets.token_hex(3)}"
        self._state: dict[str, Any] = {
            **who,
            "id": self.id,
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
        self.tokens = 0
        """Tokens worked on so far, all units together."""

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
            peak = _peak_gib()
            self._write(ended=time.time(), error=error, unit=None, phase="ended", peak_gib=peak)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number
        raise Stopped(signal.Signals(number).name)

    def _beat(self) -> None:
        while not self._over.wait(liveness.BEAT_SECONDS):
            # A full disk must not kill the thread: the unit's own write will tell.
            with contextlib.suppress(OSError):
                self._write(beat=self._state["beat"] + 1)

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

    def note(self, **values: Any) -> None:
        """Show something more in the worker's file, such as loss and step."""
        self._state.setdefault("notes", {}).update(values)

    def stopping(self) -> bool:
        """Asked to leave after the current unit (or, in train, after the current step)?"""
        return self._signal is not None or self.dir.stop.exists()

    # -- units -----------------------------------------------------------------------------------

    def attempts(self, units: list[Unit], *, max_failures: int = MAX_FAILURES) -> Iterator[Attempt]:
        """Claim open units one by one; use each attempt as a context manager and commit in it.

        Ends when every unit has a record, or the rest is held by live workers, or a stop is asked.
        max_failures=1: a fault goes to the caller at once and leaves no failed record (stages of
        one unit, where there are no others to go on with).
        """
        watch = liveness.Watch()
        while not self.stopping():
            unit = self._claim_one(units)
            if unit is not None:
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
    ) -> bool:
        """Make these files the unit's result. False: another worker was first, ours are deleted.

        counts: numbers shown and added up (samples, tokens, ...). info: what later stages need.
        """
        entries = []
        for path in paths:
            files.fsync_file(path)
            files.fsync_dir(path.parent)
            name = str(path.relative_to(self.worker.dir.files))
            size = path.stat().st_size
            entries.append({"name": name, "bytes": size, "xxh3": files.file_digest(path)})
        won = self._ledger.create_record(self.unit, self._record("done", entries, counts, info))
        self._committed = True
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


def _peak_gib() -> float:
    """Most memory that one process of this stage held, GiB (ru_maxrss is KiB).

    Not a sum: a child's figure starts with what its parent held when it was forked.
    """
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return round(max(resource.getrusage(w).ru_maxrss for w in who) / 2**20, 2)


def _short(fault: BaseException) -> str:
    return " ".join(f"{type(fault).__name__}: {fault}".split())[:500]
