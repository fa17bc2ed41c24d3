"""A folder of shards that belongs to no run: what `shards convert` made, or bare shards.

With a manifest (shards.json) every digest comes from there. Without one the indexes are believed:
they prove headers and samples, and themselves only as far as their own digest goes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kimi_eagle.errors import RunError
from kimi_eagle.proof.files import Fault
from kimi_eagle.proof.report import Count, Damage, OnBytes, Report, Row, threads_here
from kimi_eagle.proof.shards import WatchedShard
from kimi_eagle.record import open_fault
from kimi_eagle.shards.folder import MANIFEST, open_folder, read_manifest
from kimi_eagle.shards.layout import index_path

ROW = "shards"


def holds_shards(path: Path) -> bool:
    """Whether this is a folder of shards and no run."""
    if not path.is_dir() or (path / "run.json").exists():
        return False
    return (path / MANIFEST).exists() or any(path.glob("*.safetensors"))


def verify_folder(
    path: Path, *, deep: bool, threads: int | None = None, on_bytes: OnBytes | None = None
) -> Report:
    """Check the shards of a folder; marks nothing.

    UsageError where there are none. RunError for a manifest that is not the one written.
    """
    report, row = Report(str(path), deep), Row(ROW, "done")
    report.rows.append(row)
    manifest = read_manifest(path)
    if manifest is None:
        entries: list[dict[str, Any]] = [{"name": p.name} for p in open_folder(path)]
        row.reason = "no manifest: the indexes are believed"
    else:
        entries = manifest["shards"]
        if not manifest["complete"]:
            row.state = "open"
            row.reason = f"not finished, says {MANIFEST}: type the same shards convert again"
    names = {MANIFEST, *(n for e in entries for n in _names(e))}
    row.units, row.files = len(entries), 2 * len(entries)
    row.bytes = sum(_size(path / name) for e in entries for name in _names(e))
    row.strays = len({p.name for p in path.iterdir()} - names) if manifest else 0
    count = Count(row.bytes, on_bytes)
    first = None
    with ThreadPoolExecutor(threads or threads_here(), "verify") as pool:
        checked = pool.map(lambda e: _shard(path, e, deep, count.add), entries)
        for entry, (faults, shape) in zip(entries, checked, strict=True):
            first = first or shape
            if not faults and shape != first:
                faults = [Fault(f"layers, hidden size {shape}, of others {first}", entry["name"])]
            bad = any(not f.unread for f in faults)
            row.ok, row.damaged = row.ok + (not faults), row.damaged + bad
            row.unread += bool(faults) and not bad
            unit = entry["name"].removesuffix(".safetensors")
            for f in faults:
                told = report.unread if f.unread else report.damage
                told.append(Damage(ROW, unit, "", 0, f.file, f.sample_id, f.what))
    count.end()
    if row.damaged:
        row.state = "damaged"
    return report


def _names(entry: dict[str, Any]) -> tuple[str, str]:
    return entry["name"], index_path(Path(entry["name"])).name


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _shard(
    folder: Path, entry: dict[str, Any], deep: bool, on_bytes: Callable[[int], None]
) -> tuple[list[Fault], tuple[tuple[int, ...], int] | None]:
    """Faults of one shard, and (layers, hidden size)."""
    name, index = _names(entry)
    for own in (index, name):
        if fault := open_fault(folder / own):
            return [Fault(fault, own)], None
    try:
        shard = WatchedShard(folder / name, entry.get("index_xxh3"))
    except RunError as e:
        return [Fault(e.what, index)], None
    faults = []
    for what, found in (
        ("samples", len(shard)),
        ("tokens", shard.tokens),
        ("bytes", shard.index.bytes),
        ("header_xxh3", shard.index.meta["header_xxh3"]),
    ):
        if found != (expected := entry.get(what, found)):
            faults.append(Fault(f"{what} {found}, {MANIFEST} says {expected}", index))
    shard.watch(on_bytes)
    faults += [Fault(f.what, name, f.sample_id) for f in shard.faults(deep=deep)]
    shard.close()
    return faults, (shard.layers, shard.hidden_size)
