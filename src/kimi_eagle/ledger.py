"""The book of a stage: which units exist, which are done, who works on what.

Contract (DESIGN promises 1, 5, 6): a unit is done when its record exists under the unit's current
key. Records are created by link(2), so the first one wins, and are never replaced. Claims only
save work: two workers on one unit cost time, never correctness. The alternative, a database, was
left out because shared file systems are all that every cluster has.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kimi_eagle import files
from kimi_eagle.errors import RunError
from kimi_eagle.record import Record, why_none
from kimi_eagle.rundir import StageDir

KEY_DIGITS = 16


@dataclass(frozen=True)
class Unit:
    """The smallest piece of a stage that is done or not.

    name: stable within the stage, such as `00003`. parts: everything that makes the unit's bytes
    what they are; its digest is the key. tokens: size for progress. samples: what is lost with it.
    payload: what the stage needs to do it, not part of the key.
    """

    name: str
    parts: dict[str, Any]
    tokens: int = 0
    samples: int = 1
    payload: Any = field(default=None, compare=False, repr=False)

    @cached_property
    def key(self) -> str:
        return files.digest(self.parts)[:KEY_DIGITS]


@dataclass
class Tally:
    """The records of a stage at one moment, by `UNIT.KEY`."""

    inodes: dict[str, int] = field(default_factory=dict)
    """Every record, done or failed."""
    failed: set[str] = field(default_factory=set)
    rejected: dict[str, int] = field(default_factory=dict)
    """Rejected samples of the records that have any."""
    damaged: set[str] = field(default_factory=set)
    """Records whose files are marked as damaged."""


def _entries(folder: Path) -> dict[str, int]:
    """Name and inode of everything in a folder, from one listing without a stat."""
    try:
        with os.scandir(folder) as entries:
            return {e.name: e.inode() for e in entries}
    except FileNotFoundError:
        return {}


class Ledger:
    """Reads and writes the records, claims and attempts of one stage."""

    def __init__(self, stage_dir: StageDir, recipe: str = ""):
        """recipe: digest of the recipe that plans are made by, for `write_plan`."""
        self.dir, self.recipe = stage_dir, recipe

    # -- records -------------------------------------------------------------------------------

    def record_path(self, unit: Unit) -> Path:
        return self.dir.records / f"{unit.name}.{unit.key}.json"

    def record(self, unit: Unit) -> Record | None:
        """The record of the unit under its current key; RunError where the file is none."""
        path = self.record_path(unit)
        try:
            data = files.read_json(path)
        except OSError as e:
            if e.errno not in (errno.EISDIR, errno.ELOOP):
                raise
            data = None
        if data is None and not os.path.lexists(path):
            return None
        if why := why_none(data, f"{unit.name}.{unit.key}"):
            again = f"kimi-eagle retry {self.dir.path.parent}"
            raise RunError(why, where=path, fix=f"{again} makes its unit again")
        return Record(self.dir, data)

    def recorded_names(self) -> set[str]:
        """`UNIT.KEY` of every record, from one directory listing (10,000 units: some 10 ms)."""
        try:
            return {p.stem for p in self.dir.records.iterdir() if p.suffix == ".json"}
        except FileNotFoundError:
            return set()

    def tally(self) -> Tally:
        """What all records say together, without opening them (10,000 units: some 10 ms).

        A record that says failed has a mark beside it; those few are read, for a mark may be of a
        try that lost. One with rejected samples is a hard link of its mark in `rejected/`, whose
        name ends with the count. A mark of a try that lost, or of a record that was set aside, has
        another inode: then the record itself is read.
        """
        found, marked = Tally(), set()
        for name, inode in _entries(self.dir.records).items():
            if name.endswith(".json") and not name.startswith(files.TEMPORARY):
                found.inodes[name[:-5]] = inode
            elif name.endswith(".failed"):
                marked.add(name[:-7])
        for unit in marked & found.inodes.keys():
            data = files.read_json(self.dir.records / f"{unit}.json")
            if not isinstance(data, dict) or data.get("state") == "failed":
                found.failed.add(unit)
        doubtful = set()
        for name, inode in _entries(self.dir.rejected).items():
            unit, _, count = name.rpartition(".")
            if unit in found.inodes and count.isdigit():
                if found.inodes[unit] == inode:
                    found.rejected[unit] = int(count)
                else:
                    doubtful.add(unit)
        for unit in doubtful - found.rejected.keys():
            data = files.read_json(self.dir.records / f"{unit}.json")
            counts = data.get("counts", {}) if why_none(data, unit) is None else {}
            found.rejected[unit] = counts.get("rejected", 0)
        for unit in found.inodes.keys() & set(self.marks()):
            data = files.read_json(self.dir.records / f"{unit}.json")
            if why_none(data, unit) is None and self.damage(Record(self.dir, data)):
                found.damaged.add(unit)
        return found

    def open_units(self, units: Iterable[Unit]) -> list[Unit]:
        """Units without a record of their current key, in order."""
        names = self.recorded_names()
        return [u for u in units if f"{u.name}.{u.key}" not in names]

    def records(self, units: Iterable[Unit]) -> list[Record]:
        """The records of these units that exist, in the order of the units."""
        return [r for u in units if (r := self.record(u)) is not None]

    def records_of(self, name: str) -> list[Record]:
        """Every record of a unit name, any key, newest first."""
        found = []
        for path in self.dir.records.glob(f"{name}.*.json"):
            data = files.read_json(path)
            if why_none(data, path.stem) is None:
                found.append(Record(self.dir, data))
        return sorted(found, key=lambda r: r.data.get("ended", 0), reverse=True)

    def newest(self) -> list[Record]:
        """The newest record of every unit, whatever its key, in the order of their names."""
        found: dict[str, Record] = {}
        for name in self.recorded_names():
            data = files.read_json(self.dir.records / f"{name}.json")
            if why_none(data, name) is not None:
                continue
            record = Record(self.dir, data)
            other = found.get(record.unit)
            if other is None or other.data.get("ended", 0) < data.get("ended", 0):
                found[record.unit] = record
        return [found[name] for name in sorted(found)]

    def create_record(self, unit: Unit, data: dict[str, Any]) -> bool:
        """First record wins; False when the unit had one already.

        Failed ones and those with rejected samples get a mark first, so that status need not read
        every record; see `tally`.
        """
        path, text = self.record_path(unit), files.to_json(data) + "\n"
        if data["state"] == "failed":
            files.write_atomic(path.with_suffix(".failed"), "")
        if rejected := data.get("counts", {}).get("rejected", 0):
            mark = self.dir.rejected / f"{path.stem}.{rejected}"
            mark.parent.mkdir(exist_ok=True)
            if files.create_exclusive(mark, text):
                won = files.link_exclusive(mark, path)
                if not won:
                    mark.unlink(missing_ok=True)
                return won
        return files.create_exclusive(path, text)

    def broken(self, units: Iterable[Unit]) -> list[Unit]:
        """Units whose record is there but is none: cut short, not JSON, or of another unit."""
        found = []
        for unit in units:
            try:
                self.record(unit)
            except RunError:
                found.append(unit)
        return found

    def set_aside(self, record: Record | Unit, reason: str) -> Path:
        """Rename a record so that its unit counts as not done; the reason goes into the name.

        A unit stands for its record under the current key, whatever is in it.
        """
        name = record.name if isinstance(record, Unit) else record.unit
        path = self.dir.records / f"{name}.{record.key}.json"
        target = path.with_name(f"{path.stem}.aside-{reason}-{int(time.time() * 1000)}")
        path.with_suffix(".failed").unlink(missing_ok=True)
        (self.dir.attempts / f"{name}.died").unlink(missing_ok=True)
        path.rename(target)
        files.fsync_dir(path.parent)
        return target

    def reason_aside(self, unit: Unit) -> str | None:
        """Why the unit's last record under this key was set aside, if one was."""
        found = self.dir.records.glob(f"{unit.name}.{unit.key}.aside-*")
        last = max((p.name for p in found), key=lambda n: n.rpartition("-")[2], default=None)
        return last and last.partition(".aside-")[2].rpartition("-")[0]

    # -- damage --------------------------------------------------------------------------------

    def mark_damaged(self, record: Record, reasons: list[str], samples: list[str]) -> None:
        """Say that the files of a record are not what was recorded; `retry` opens such a unit.

        reasons: lines for people. samples: ids of the damaged ones, where they are known. What an
        earlier mark of the same attempt says is kept. OSError where the run cannot be written.
        """
        mark = self.damage(record) or {"reasons": [], "samples": []}
        data = {
            "attempt": record.data.get("attempt", 0),
            "reasons": list(dict.fromkeys([*mark["reasons"], *reasons])),
            "samples": list(dict.fromkeys([*mark["samples"], *samples])),
        }
        self.dir.damaged.mkdir(exist_ok=True)
        files.write_atomic(self._mark(record), files.to_json(data) + "\n")

    def damage(self, record: Record) -> dict[str, Any] | None:
        """{attempt, reasons, samples} as marked, or None; marks of other attempts count nothing."""
        mark = files.read_json(self._mark(record))
        if not isinstance(mark, dict) or mark.get("attempt") != record.data.get("attempt", 0):
            return None
        return {"reasons": [], "samples": []} | mark

    def damaged(self, records: Iterable[Record]) -> list[tuple[Record, dict[str, Any]]]:
        """Those of these records whose files are marked as damaged, with the marks.

        One listing where there is no mark.
        """
        marked = _entries(self.dir.damaged)
        named = [r for r in records if f"{r.unit}.{r.key}.json" in marked] if marked else []
        return [(r, mark) for r in named if (mark := self.damage(r)) is not None]

    def unmark(self, name: str) -> None:
        """Remove the mark of `UNIT.KEY`, if there is one."""
        (self.dir.damaged / f"{name}.json").unlink(missing_ok=True)

    def marks(self) -> list[str]:
        """`UNIT.KEY` of every mark, also of earlier attempts and keys."""
        names = sorted(_entries(self.dir.damaged))
        return [n[:-5] for n in names if n.endswith(".json") and not n.startswith(files.TEMPORARY)]

    def _mark(self, record: Record) -> Path:
        return self.dir.damaged / f"{record.unit}.{record.key}.json"

    def freed(self) -> set[str]:
        """`UNIT.KEY.aN` of the attempts whose files were deleted on purpose."""
        data = files.read_json(self.dir.freed)
        names = data.get("units") if isinstance(data, dict) else None
        return set(names) if isinstance(names, list) else set()

    # -- claims --------------------------------------------------------------------------------

    def claim(self, unit: Unit, worker_id: str) -> bool:
        """Take a unit; False when somebody has it."""
        return files.create_exclusive(self.dir.claims / unit.name, f"{worker_id} {unit.key}\n")

    def claimed_by(self, unit_name: str) -> str | None:
        """The worker that holds the claim on a unit."""
        try:
            return (self.dir.claims / unit_name).read_text().partition(" ")[0].strip()
        except FileNotFoundError:
            return None

    def release(self, unit_name: str, worker_id: str) -> None:
        """Give a claim back if it is still this worker's."""
        if self.claimed_by(unit_name) == worker_id:
            (self.dir.claims / unit_name).unlink(missing_ok=True)

    # -- attempts ------------------------------------------------------------------------------

    def start_attempt(self, unit: Unit, note: dict[str, Any]) -> int:
        """Number of this try of the unit (1, 2, ...), recorded before any byte is written.

        Numbers run on over keys, so that two tries never write files of the same name.
        """
        number = 1 + max((a["attempt"] for a in self.attempts(unit.name)), default=0)
        while not files.create_exclusive(
            self.dir.attempts / f"{unit.name}.{number}.json",
            files.to_json({"attempt": number, "key": unit.key, **note}) + "\n",
        ):
            number += 1
        return number

    def fail_attempt(self, unit: Unit, number: int, reason: str) -> None:
        """Note why a try failed."""
        path = self.dir.attempts / f"{unit.name}.{number}.json"
        data = files.read_json(path) or {"attempt": number, "key": unit.key}
        files.write_atomic(path, files.to_json({**data, "failed": reason}) + "\n")

    def attempts(self, unit_name: str) -> list[dict[str, Any]]:
        """Every try of a unit, oldest first."""
        found = [files.read_json(p) for p in self.dir.attempts.glob(f"{unit_name}.*.json")]
        return sorted((a for a in found if a), key=lambda a: a["attempt"])

    def failures(self, unit: Unit) -> list[str]:
        """Reasons of the failed tries under the unit's current key."""
        tries = self.attempts(unit.name)
        return [a["failed"] for a in tries if a.get("failed") and a.get("key") == unit.key]

    def deaths(self, unit: Unit) -> list[str]:
        """Each time a supervisor saw a worker die, unasked, while it held this unit."""
        try:
            lines = (self.dir.attempts / f"{unit.name}.died").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [x.partition(" ")[2] for x in lines if x.partition(" ")[0] == unit.key]

    # -- plan ----------------------------------------------------------------------------------

    def write_plan(self, units: list[Unit]) -> None:
        """Tell status and progress bars what the units are; every worker writes the same text."""
        shown = ("name", "key", "tokens", "samples")
        found = [{k: getattr(u, k) for k in shown} for u in units]
        plan = {"recipe": self.recipe, "units": found}
        files.write_atomic(self.dir.plan, files.to_json(plan) + "\n")

    def planned(self) -> list[dict[str, Any]] | None:
        """[{name, key, tokens, samples}] as the last worker wrote it, or None before any."""
        plan = self.plan()
        return plan["units"] if plan else None

    def plan(self) -> dict[str, Any] | None:
        """The same with the digest of the recipe that it was made by."""
        plan = files.read_json(self.dir.plan)
        whole = isinstance(plan, dict) and isinstance(plan.get("units"), list)
        return plan if whole else None
