"""Is this image file the one that is meant?

*Pinned* means that its sha256 stands in a lock file (`lockfile.py`). Whoever starts jobs asks
`verified` and gets the image or the one reason why not: before anything is queued, and again before
a GPU is used. Reads the image file, the lock files and the cache of digests; writes lock files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import platform
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_eagle.errors import UsageError
from kimi_eagle.images import hashcache, lockfile, sif
from kimi_eagle.images.hashcache import Progress, stat_line

__all__ = ["Image", "lock", "lock_files", "stat_line", "verified"]

REQUIRED_LABELS = tuple(
    f"org.opencontainers.image.{name}"
    for name in ("revision", "created", "source", "version", "title")
)
"""Without these nobody can say what an image holds; image build writes them."""

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "i686": "386", "armv7l": "arm"}


@dataclass(frozen=True)
class Image:
    """An image file and what is known of it."""

    path: str
    """Absolute, links resolved."""
    name: str
    """Its entry in the lock file."""
    sha256: str
    """64 hex digits."""
    bytes: int
    sif_id: str
    arch: str
    labels: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """For files such as RUN/image.json."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Image:
        """Back from `as_json`; further keys are left out. UsageError for another shape."""
        kinds = {"bytes": int, "labels": dict}
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(data, dict):
            raise UsageError("not an image", expected=f"an object with {', '.join(names)}")
        for name in names:
            if type(data.get(name)) is not kinds.get(name, str):
                raise UsageError(f"not an image: {name} is {data.get(name)!r}")
        return cls(**{name: data[name] for name in names})


def verified(
    path: str | os.PathLike[str], *, arch: str | None = None, progress: Progress | None = None
) -> Image:
    """The image, proven to be a pinned one of ours that runs on `arch`; UsageError says why not.

    arch: Go's name of the architecture (amd64, arm64) [default: this machine's].
    """
    seen, image = look(path)
    if why := unfit(image, arch):
        raise why
    return _pinned(image, seen, lock_files(path), fresh=False, progress=progress)


def pinned(path: str | os.PathLike[str], *, progress: Progress | None = None) -> Image:
    """The image, every byte read and compared with the lock, whether jobs can use it or not."""
    seen, image = look(path)
    return _pinned(image, seen, lock_files(path), fresh=True, progress=progress)


def unfit(image: Image, arch: str | None = None) -> UsageError | None:
    """Why jobs refuse an image, whatever its digest is; None where they do not."""
    machine = platform.machine()
    wanted = arch or _MACHINES.get(machine, machine)
    has = (image.arch, sif.read_header(image.path).system_arch)
    if other := [one for one in has if one != wanted]:
        return UsageError(
            f"image for another architecture: {other[0]}",
            where=image.path,
            expected=wanted,
            fix=f"build or import one on a machine with {wanted}",
        )
    return foreign(image)


def foreign(image: Image) -> UsageError | None:
    """Why an image is none of ours; None where it is."""
    if missing := [name for name in REQUIRED_LABELS if not image.labels.get(name)]:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        return UsageError(
            f"not an image of kimi-eagle: no label {missing[0]}{more}",
            where=image.path,
            expected="what kimi-eagle image build makes",
        )
    return None


def lock_files(path: str | os.PathLike[str]) -> list[Path]:
    """Where pins of an image file are looked up, first first; not all of them have to exist."""
    real = os.path.dirname(os.path.realpath(path))
    link = os.path.realpath(os.path.dirname(path) or ".")
    return _once([real, link, *_common_folders()])


def common_lock_files() -> list[Path]:
    """Where pins are looked up whatever the image is, and where those of all images may stand."""
    return _once([".", *_common_folders()])


def all_entries() -> list[lockfile.Entry]:
    """All that is pinned in `common_lock_files`."""
    return _entries(common_lock_files())


def _entries(locks: list[Path]) -> list[lockfile.Entry]:
    return [entry for lock in locks for entry in lockfile.read(lock).values()]


def _common_folders() -> list[str]:
    folders = ["containers"]
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file():  # else installed: no checkout is near
        folders.append(str(checkout / "containers"))
    own = os.path.expanduser("~/.config/kimi-eagle")
    return [*folders, own] if os.path.isabs(own) else folders


def _once(folders: list[str]) -> list[Path]:
    found: dict[Path, None] = {}
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):  # the working directory may have been removed
            found[Path(os.path.realpath(folder), lockfile.NAME)] = None
    return list(found)


def lock(
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    into: Path | None = None,
    replace: bool = False,
    sha256: str | None = None,
    progress: Progress | None = None,
) -> Image:
    """Pin an image file: hash it and write its entry. UsageError where the name is another's.

    name: of the entry [default: the file's, without its ending]. into: folder of the lock file
    [default: the image's]. replace: the name may stand for another image until now. sha256: of the
    file, where the caller has just read it all.
    """
    seen, image = look(path)
    folder = Path(into).expanduser().absolute() if into else Path(image.path).parent
    name = entry_name(image.path, name)
    digest = sha256 or hashcache.sha256(image.path, seen, progress=progress)
    near = os.path.relpath(image.path, os.path.realpath(folder))
    entry = lockfile.Entry(
        lock=folder / lockfile.NAME,
        name=name,
        # What lies beside the lock file or below it moves with it.
        file=image.path if near.split("/")[0] == ".." else near,
        sha256=digest,
        bytes=image.bytes,
        sif_id=image.sif_id,
        arch=image.arch,
        labels=image.labels,
        locked=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    lockfile.add(entry.lock, entry, replace=replace)
    return dataclasses.replace(image, name=name, sha256=digest)


def entry_name(path: str | os.PathLike[str], name: str | None) -> str:
    """The name of an image's entry: `name`, else the file's; UsageError where it cannot be one."""
    name = Path(path).stem if name is None else name
    if not name or not name.isprintable() or name != name.strip():
        raise UsageError(f"not a name: {name!r}", where=path, fix="--name NAME")
    return name


def locked_at(sha256: str, locks: list[Path]) -> list[lockfile.Entry]:
    """All entries of these lock files with that digest."""
    return [entry for entry in _entries(locks) if entry.sha256 == sha256]


def look(path: str | os.PathLike[str]) -> tuple[os.stat_result, Image]:
    """What can be seen without reading all of the file; name and sha256 are empty still."""
    sif.open_image(path).close()  # refuses what is no file before it is resolved
    real = os.path.realpath(path)
    seen = os.stat(real)
    header = sif.read_header(real)
    return seen, Image(real, "", "", header.size, header.id, header.arch, sif.labels(real))


def _pinned(
    image: Image,
    seen: os.stat_result,
    locks: list[Path],
    *,
    fresh: bool,
    progress: Progress | None,
) -> Image:
    entries = _entries(locks)
    command = f"kimi-eagle image lock {shlex.quote(image.path)}"
    if not entries:
        raise _in_no_lock(image, locks, command)
    digest = hashcache.sha256(image.path, seen, fresh=fresh, progress=progress)
    claims = _claims(image.path, entries)
    if match := [e for e in claims or entries if e.sha256 == digest]:
        return dataclasses.replace(image, name=match[0].name, sha256=digest)
    if claims:
        raise _another(image, digest, claims[0], command)
    raise _in_no_lock(image, locks, command)


def _claims(path: str, entries: list[lockfile.Entry]) -> list[lockfile.Entry]:
    """The entries that say what this file has to be: those of its path, else of its name.

    Of several lock files the first that speaks of it counts. A file of which none speaks may be any
    of the pinned ones, moved and renamed.
    """
    by_path = [e for e in entries if os.path.realpath(e.path) == path]
    base = os.path.basename(path)
    by_name = [e for e in entries if os.path.basename(e.file) == base or e.name == Path(base).stem]
    claims = by_path or by_name
    return [e for e in claims if e.lock == claims[0].lock]


def _another(image: Image, digest: str, wanted: lockfile.Entry, command: str) -> UsageError:
    if wanted.name != Path(image.path).stem:
        command += f" --name {shlex.quote(wanted.name)}"
    if (folder := str(wanted.lock.parent)) != os.path.dirname(image.path):
        command += f" --into {shlex.quote(folder)}"
    size = "" if wanted.bytes == image.bytes else f" and {wanted.bytes} bytes"
    return UsageError(
        f"not the file that is pinned as {wanted.name!r}: sha256:{digest}, {image.bytes} bytes",
        where=image.path,
        expected=f"sha256:{wanted.sha256}{size} as {wanted.lock} says",
        fix=f"take the right file again, or, if the change is meant, {command} --replace",
    )


def _in_no_lock(image: Image, locks: list[Path], command: str) -> UsageError:
    return UsageError(
        "the image is pinned in no lock file",
        where=image.path,
        expected=f"its sha256 in one of {', '.join(map(str, locks))}",
        fix=command,
    )
