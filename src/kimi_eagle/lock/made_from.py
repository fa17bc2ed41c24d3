"""Digests of what a run reads: source files, benchmark prompts, chat template, and the verifier.

A file is read again only when its size or time of change is another than the previous lock says;
a file changed within two seconds of that look is not believed either, as its time may not tell.
The verifier's id is made of headers and sizes (see verifier.py). No torch, no transformers.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from kimi_eagle import files
from kimi_eagle.data.sources import find_files
from kimi_eagle.errors import KimiEagleError
from kimi_eagle.recipe import Recipe, input_paths
from kimi_eagle.verifier import open_verifier

LISTED = 1000
"""Files of a folder that are named one by one; of more there is only their digest together."""
RACY_NS = 2_000_000_000


def describe(
    recipe: Recipe, before: dict[str, Any], written: float, hash_bytes: int | None
) -> dict[str, Any]:
    """Key of the recipe -> {"sha256", "bytes", "files"} or {"sha256": null, "reason"}.

    before, written: the inputs of the previous lock and its time. hash_bytes: read at most so much.
    """
    found, left = {}, hash_bytes
    for key, path in input_paths(recipe).items():
        if key == "verifier.path":
            continue
        found[key], used = digest_of(Path(path), before.get(key) or {}, written, left)
        left = None if left is None else left - used
    return found


def digest_of(
    path: Path, before: dict[str, Any], written: float = 0.0, left: int | None = None
) -> tuple[dict[str, Any], int]:
    """({"sha256", "bytes", "files": [{"name", "bytes", "sha256", "mtime_ns"}]}, bytes read).

    A folder's sha256 is that of its files' sha256, a line each, in the order in which they are
    read; names are not in it. before: the entry of an earlier look, made at `written`. left: bytes
    that may be read; when they do not suffice, sha256 is null with the reason. Raises nothing.
    """
    known = {}
    for f in _entries(before):
        if f["mtime_ns"] < written * 1e9 - RACY_NS:
            known[f["name"], f["bytes"], f["mtime_ns"]] = f["sha256"]
    read, entries = 0, []
    try:
        for file in _files(path):
            stat = file.stat()
            name = str(file.relative_to(path)) if file != path else file.name
            about = {"name": name, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
            sha = known.get((name, stat.st_size, stat.st_mtime_ns))
            entries.append(about | {"sha256": sha, "path": file})
        seen = None
        if len(entries) > LISTED:
            seen = files.digest([[e["name"], e["bytes"], e["mtime_ns"]] for e in entries])
            if before.get("seen") == seen and before.get("sha256"):
                return before, 0
            if left is not None and sum(e["bytes"] for e in entries) > left:
                left = 0  # all or nothing: there is no place to note a part of them
        for e in entries:
            file = e.pop("path")
            if e["sha256"] is None and (left is None or read + e["bytes"] <= left):
                e["sha256"], read = files.sha256_file(file), read + e["bytes"]
    except (OSError, KimiEagleError, ValueError) as e:
        return {"sha256": None, "reason": _words(e)}, read
    size = sum(e["bytes"] for e in entries)
    found: dict[str, Any] = {"bytes": size, "sha256": None}
    missing = [e for e in entries if e["sha256"] is None]
    if missing:
        count = sum(e["bytes"] for e in missing)
        found["reason"] = f"not read yet: {count:,} bytes in {len(missing)} files"
    elif len(entries) == 1 and path.is_file():
        found["sha256"] = entries[0]["sha256"]
    else:
        text = "".join(f"{e['sha256']}\n" for e in entries)
        found["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    if seen is None:
        found["files"] = entries
    else:
        found |= {"file_count": len(entries), "seen": seen}
    return found, read


def _files(path: Path) -> list[Path]:
    """The data files of a source; all files of a folder with a draft or a mapping."""
    if not path.is_dir():
        return [path]
    if any((path / name).is_file() for name in ("config.json", "mapping.json")):
        return sorted(p for p in path.iterdir() if p.is_file())
    return find_files(path)


def _entries(before: dict[str, Any]) -> list[dict[str, Any]]:
    """The whole file entries of an earlier look."""
    wanted = {"name": str, "bytes": int, "mtime_ns": int, "sha256": str}
    listed = before.get("files")
    return [
        f
        for f in (listed if isinstance(listed, list) else ())
        if isinstance(f, dict) and all(isinstance(f.get(k), t) for k, t in wanted.items())
    ]


def verifier(path: str, before: dict[str, Any]) -> dict[str, Any]:
    """{"id", "tokenizer_digest", "bytes", "seen"}, or {"id": null, "reason"}.

    seen: names, sizes and times of the folder's files; unchanged, the headers are not read again.
    """
    try:
        folder = Path(path)
        stats = [(p.name, p.stat()) for p in sorted(folder.iterdir()) if p.is_file()]
        seen = files.digest([[n, s.st_size, s.st_mtime_ns] for n, s in stats])
        if before.get("seen") == seen and before.get("id"):
            return before
        opened = open_verifier(path)
        return {
            "id": opened.id(),
            "tokenizer_digest": opened.tokenizer_digest(),
            "bytes": sum(s.st_size for _, s in stats),
            "seen": seen,
        }
    except (OSError, KimiEagleError, ValueError) as e:
        return {"id": None, "reason": _words(e)}


def _words(error: Exception) -> str:
    """One line about a piece that cannot be read."""
    if isinstance(error, KimiEagleError):
        return error.line()[:300]
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"[:300]
    return f"{type(error).__name__}: {error}"[:300]
