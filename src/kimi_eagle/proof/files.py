"""Is a record whole, and are its files there with the bytes that it names?

Sizes cost a stat a file; digests read every byte (xxh3-128, 10 GB/s a core, the GIL released).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kimi_eagle import files
from kimi_eagle.ledger import Record, Unit
from kimi_eagle.record import of_the_machine, open_fault, size_fault, unreadable
from kimi_eagle.rundir import RunDir

BLOCK = 1 << 22
STATES = ["safetensors", "index.parquet"]
"""What a unit of extract consists of."""


@dataclass(frozen=True)
class Fault:
    """What is wrong. file: its name under the stage's files; empty for the record itself.
    sample_id: the sample it lies in, where that is known."""

    what: str
    file: str = ""
    sample_id: str | None = None

    def line(self) -> str:
        """`FILE: sample ID: what`, for people and for damage marks."""
        sample = f"sample {self.sample_id}" if self.sample_id else ""
        return ": ".join(x for x in (self.file or "record", sample, self.what) if x)

    @property
    def unread(self) -> bool:
        """Whether nobody could look: no right to, or the machine is ill. That is no damage."""
        return of_the_machine(self.what)


def record_faults(record: Record, unit: Unit, stage: str) -> Iterator[Fault]:
    """Does the record say what it must, and of this unit? A key is the digest of its parts, so an
    edited one shows; an edited digest shows with the bytes (`verify --deep`)."""
    data = record.data
    for name, expected in (
        ("format", "record/1"),
        ("stage", stage),
        ("unit", unit.name),
        ("key", unit.key),
    ):
        if data.get(name) != expected:
            yield Fault(f"{name} {data.get(name)!r}, expected {expected!r}")
    parts = data.get("parts")
    if parts != unit.parts and files.digest(parts) != files.digest(unit.parts):
        yield Fault("parts are not those of its key")
    if data.get("state") not in ("done", "failed"):
        yield Fault(f"state {data.get('state')!r}")
    if not isinstance(data.get("attempt"), int):
        yield Fault(f"attempt {data.get('attempt')!r}")
    if not all(isinstance(data.get(n), dict) for n in ("counts", "info")):
        yield Fault("counts or info is missing")
    if not _entries_whole(data.get("files")):
        yield Fault("its list of files is not whole")
        return
    start = f"{unit.name}.a{data.get('attempt')}."
    for entry in data["files"]:
        if not entry["name"].startswith(start) or ".." in entry["name"]:
            yield Fault("not a file of this attempt", entry["name"])
    kinds = [e["name"].removeprefix(start) for e in data["files"]]
    if data.get("state") == "done" and not kinds:
        yield Fault("names no file")
    elif data.get("state") == "done" and stage == "extract" and kinds != STATES:
        yield Fault(f"names {kinds}, expected {STATES}")


def _entries_whole(entries: object) -> bool:
    kinds = {"name": str, "bytes": int, "xxh3": str}
    return isinstance(entries, list) and all(
        isinstance(e, dict) and all(isinstance(e.get(k), t) for k, t in kinds.items())
        for e in entries
    )


def size_faults(record: Record) -> Iterator[Fault]:
    """Files that are missing or have another size than recorded."""
    folder = str(record.stage_dir.files)
    for entry in record.data["files"]:
        if fault := size_fault(f"{folder}/{entry['name']}", entry["bytes"]):
            yield Fault(fault, entry["name"])


def byte_faults(record: Record, on_bytes: Callable[[int], None]) -> Iterator[Fault]:
    """Whole files against their digests; entries that are `of` something else are left out."""
    for entry in record.data["files"]:
        if "of" not in entry:
            yield from digest_fault(record.stage_dir.files / entry["name"], entry, on_bytes)


def digest_fault(
    path: Path, entry: dict, on_bytes: Callable[[int], None] = lambda count: None
) -> Iterator[Fault]:
    """At most one fault: the file's bytes are not those of its entry in a record."""
    if fault := open_fault(path):
        yield Fault(fault, entry["name"])
        return
    state, opened = xxhash.xxh3_128(), False
    try:
        with open(path, "rb", buffering=0) as f:
            opened = True
            while block := f.read(BLOCK):
                state.update(block)
                on_bytes(len(block))
    except OSError as e:
        yield Fault(unreadable(e, path, opened=opened), entry["name"])
        return
    if state.hexdigest() != entry["xxh3"]:
        yield Fault("its bytes are not those recorded", entry["name"])


def draft_faults(run: RunDir, record: Record, *, deep: bool) -> Iterator[Fault]:
    """RUN/draft against the record of train; hard links to its files are these files."""
    for entry in record.data["files"]:
        if "/" not in entry["name"]:
            continue
        own, published = (
            record.stage_dir.files / entry["name"],
            run.draft / Path(entry["name"]).name,
        )
        shown = entry | {"name": f"draft/{published.name}"}
        try:
            if own.exists() and published.samefile(own):
                continue
        except OSError as e:
            yield Fault(unreadable(e, published), shown["name"])
            continue
        if fault := size_fault(published, entry["bytes"]):
            yield Fault(fault, shown["name"])
        elif deep:
            yield from digest_fault(published, shown)


def draft_is_of(run: RunDir, record: Record) -> bool:
    """Whether RUN/draft was put there from this record (see stages/train.py, publish)."""
    marker = f"{record.key}.a{record.data['attempt']}"
    return files.read_json(run.draft / "record.json") == marker


def strays(record_files: set[str], folder: Path, claimed: set[str], open_keys: set[str]) -> int:
    """Names under a stage's files that no current record knows and nobody is making now.

    record_files: first parts of the names that records hold. claimed: units at work.
    """
    count = 0
    for name in os.listdir(folder) if folder.is_dir() else ():
        if name in record_files or name.removeprefix("work-") in open_keys:
            continue
        if name.startswith(files.TEMPORARY):
            name = name.removeprefix(files.TEMPORARY).split("-", 2)[-1]
        count += name.split(".")[0] not in claimed
    return count
