"""A folder of shards that was made as a whole, and `shards.json`, which says what belongs to it.

The manifest (format store/1) lists every shard with sizes and digests, the part of the source that
it holds, and whether all is there. It is replaced atomically after each shard and holds no times
and no machine's name, so that an interrupted conversion ends with the same bytes as one that was
not. Its `digest` stands for all of it: with the digests of index and header in it, every byte of
the folder is proven by those few bytes (FORMAT.md).

A folder without a manifest is one of shards that somebody put there; all of them count.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from kimi_eagle import files
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.shards.layout import index_path

MANIFEST = "shards.json"
FORMAT = "store/1"


def open_folder(path: Path) -> list[Path]:
    """The shards of a folder, in order: `ShardSet(open_folder(path))`.

    UsageError where there is none. RunError where the manifest is damaged or not complete, or a
    shard that it names is missing or has another size; without a manifest, where an index is
    missing.
    """
    return [shard for shard, _ in listed(Path(path))]


def listed(path: Path, *, whole: bool = True) -> list[tuple[Path, str | None]]:
    """The same with the digest that each index must have, where a manifest says so.

    whole=False: what there is of a conversion that was not finished.
    """
    manifest = read_manifest(path)
    if manifest is None:
        return [(shard, None) for shard in _found(path)]
    if whole and not manifest["complete"]:
        raise RunError(
            f"the conversion that made this is not finished ({len(manifest['shards'])} shards)",
            where=path / MANIFEST,
            fix="type the same kimi-eagle shards convert again",
        )
    for entry in manifest["shards"]:
        for name, size in ((entry["name"], "bytes"), (entry["index"], "index_bytes")):
            if (found := _size(path / name)) != entry[size]:
                state = "is missing" if found is None else f"has {found} bytes"
                raise RunError(
                    f"{state}, {MANIFEST} says {entry[size]}",
                    where=path / name,
                    fix="type the kimi-eagle shards convert that made it again",
                )
    return [(path / e["name"], e["index_xxh3"]) for e in manifest["shards"]]


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a folder, None where it has none; RunError where it is damaged."""
    where = path / MANIFEST
    if not where.exists():
        return None
    data = files.read_json(where)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RunError("not a manifest of shards", where=where, expected=f"format {FORMAT}")
    if data.get("digest") != _digest(data):
        raise RunError("the manifest is not the one that was written", where=where)
    return data


def write_manifest(path: Path, data: dict[str, Any]) -> None:
    """Replace the manifest of a folder; adds format and digest."""
    data = {"format": FORMAT, **data}
    files.write_atomic(path / MANIFEST, files.to_json({**data, "digest": _digest(data)}) + "\n")


def bind(path: Path, data: dict[str, Any]) -> bool:
    """The first manifest of a folder, without shards; False where somebody was first."""
    data = {"format": FORMAT, **data, "complete": False, "shards": []}
    text = files.to_json({**data, "digest": _digest(data)}) + "\n"
    return files.create_exclusive(path / MANIFEST, text)


def sweep(folder: Path) -> None:
    """Remove what killed processes of this machine left under temporary names."""
    for path in folder.glob(f"{files.TEMPORARY}*"):
        pid = path.name.removeprefix(files.TEMPORARY).partition("-")[0]
        if not pid.isdigit() or _alive(int(pid)):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def claim_folder(out: Path, source: Path, sign: str) -> None:
    """Make `out` for the result of a conversion; `sign`: the file that says it is one.

    UsageError where it is, or lies in, the source, is a file, or holds something else.
    """
    target, origin = out.resolve(), source.resolve()
    if target == origin or (origin.is_dir() and origin in target.parents):
        raise UsageError("OUT lies in SRC, which is never written to", where=out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = [n for n in os.listdir(out) if not n.startswith(files.TEMPORARY)]
        probe = files.temporary_name(out / "writable")
        probe.touch()
        probe.unlink()
    except FileExistsError:
        raise UsageError("OUT is a file", where=out, expected="a folder") from None
    except OSError as e:
        raise UsageError(f"OUT cannot be written: {e.strerror}", where=out) from None
    if names and sign not in names:
        raise UsageError(
            f"OUT holds something else ({sorted(names)[0]})",
            where=out,
            expected=f"an empty folder, or one with {sign}",
        )


def _found(path: Path) -> list[Path]:
    if not path.is_dir():
        raise UsageError("no such folder", where=path)
    names = set(os.listdir(path))  # one listing: 10,000 looks at single files take seconds on NFS
    hidden = files.TEMPORARY
    shards = sorted(n for n in names if n.endswith(".safetensors") and not n.startswith(hidden))
    if not shards:
        raise UsageError("no shards here", where=path, expected="STEM.safetensors with its index")
    for name in shards:
        if (index := index_path(Path(name)).name) not in names:
            raise RunError(f"{name} has no index", where=path, expected=index)
    return [path / name for name in shards]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _digest(data: dict[str, Any]) -> str:
    return files.digest({k: v for k, v in data.items() if k != "digest"})


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
