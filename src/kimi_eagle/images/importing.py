"""From what other tools leave on a disk to one pinned SIF file; nothing is fetched from a network.

A SIF file is copied, everything else goes through `apptainer build`: archives of `docker save`,
OCI archives and layouts (podman, skopeo, buildah) and sandbox folders. What a source is, is read
from its content. The new file gets its name last, after it has been read back.

What stands between the source and Apptainer 1.4.5, each seen: names with colons are cut (so a link
with a plain name is made), compressed archives and OCI archives made by `tar c .` are refused (so
they are unpacked first), and of a sandbox it leaves out, with exit code 0, what may not be read.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import lzma
import os
import re
import shlex
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from kimi_eagle import files
from kimi_eagle.containers.exec import check_program
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.images import children, hashcache, lockfile, pins, sif
from kimi_eagle.images.hashcache import Progress

KINDS = ("sif", "docker-archive", "oci-archive", "oci", "sandbox")
COMPRESSION = ("-comp", "zstd", "-Xcompression-level", "3")
"""For mksquashfs; gzip, its default, takes several times as long."""

_REMOTE = re.compile(r"(docker|library|oras|shub|https?|docker-daemon|ipfs)://.|docker-daemon:.")
_LOCAL = re.compile(r"(docker-archive|oci-archive|oci|localimage|sandbox|dir):(//)?(?P<file>.+)")
_PLAIN = re.compile(r"[A-Za-z0-9_./@+-]+")
_BROKEN = (tarfile.TarError, EOFError, ValueError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
_BLOCK = 4 << 20


def import_image(
    source: str | os.PathLike[str],
    out: Path | None = None,
    *,
    foreign: bool = False,
    name: str | None = None,
    into: Path | None = None,
    replace: bool = False,
    say: Callable[[str], Any] = lambda text: None,
    progress: Progress | None = None,
) -> pins.Image:
    """Make a pinned SIF file of `source`; UsageError or RunError, and then no file, where not.

    out: the new file or the folder for it [default: here, named after the source]; never replaced.
    foreign: take what has not our labels too, for instance as a base; jobs refuse it all the same.
    name, into, replace: as for `pins.lock`. say: told what is done. progress: bytes read or copied.
    """
    origin = _local(os.fspath(source))
    kind = kind_of(origin)
    target = _target(origin, out)
    entry = pins.entry_name(target, name)
    folder = into.expanduser() if into else Path(os.path.realpath(target.parent))
    lock_file = folder / lockfile.NAME
    lockfile.read(lock_file)  # damage is said before minutes of work
    if not replace and kind != "sif":  # what is built is never the same twice
        lockfile.refuse_other(lock_file, entry, None)
    if folder.exists() and not os.access(folder, os.W_OK):
        raise lockfile.unwritable(folder)
    with _workshop(target) as work:
        made = work / "image.sif"
        say(f"{'copy' if kind == 'sif' else 'build'} from {kind}: {origin}")
        digest = _copy(origin, made, progress) if kind == "sif" else _build(kind, origin, work)
        files.fsync_file(made)
        seen, image = pins.look(made)
        if (why := pins.foreign(image)) and not foreign:
            raise UsageError(why.what, where=origin, expected=why.expected, fix="--foreign")
        with open(made, "rb") as file:  # from the disk, not from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read_back = hashcache.sha256(str(made), seen, fresh=True, progress=progress)
        if digest not in (None, read_back):
            raise RunError(f"sha256:{read_back} read back, sha256:{digest} written", where=target)
        if not replace:
            lockfile.refuse_other(lock_file, entry, read_back)
        if not files.link_exclusive(made, target):
            raise _exists(target)
    try:
        return pins.lock(target, name=name, into=into, replace=replace, sha256=read_back)
    except BaseException:
        target.unlink()
        raise


def kind_of(path: Path) -> str:
    """One of KINDS, from the content; UsageError for anything else."""
    if path.is_dir():
        if (path / ".singularity.d").is_dir():
            return "sandbox"
        if (path / "oci-layout").is_file() and (path / "index.json").is_file():
            return "oci"
        raise _unknown(path, "a folder without .singularity.d (a sandbox) or oci-layout")
    with sif.open_image(path) as file:
        head = file.read(48)
    if not head:
        raise UsageError("empty file", where=path)
    if head[32:42] == b"SIF_MAGIC\0":
        return "sif"
    if head[:4] == b"\x28\xb5\x2f\xfd":
        fix = f"zstd -d {shlex.quote(str(path))}, then import the result"
        raise UsageError("compressed with zstd", where=path, fix=fix)
    found = _archive_kind(path)
    if found is None:
        raise _unknown(path, "no SIF and no archive of an image")
    return found


def _archive_kind(path: Path) -> str | None:
    """What a tar file, plain or compressed, has in it; its two marks may stand at the very end."""
    names = set()
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                names.add(member.name.removeprefix("./"))
                if "manifest.json" in names:  # docker save writes both; Apptainer prefers this one
                    return "docker-archive"
    except (*_BROKEN, OSError) as e:
        if names:
            raise UsageError(f"damaged or truncated archive: {e}", where=path) from None
        return None
    return "oci-archive" if {"oci-layout", "index.json"} <= names else None


def _local(source: str) -> Path:
    """The path, absolute; UsageError for what would have to be fetched."""
    if "\0" in source:
        raise UsageError(f"not a path: {source!r}")
    if not os.path.lexists(source):
        quoted = shlex.quote(source)
        if _REMOTE.match(source):
            raise UsageError(
                f"{source} would be fetched from elsewhere, and import reads local files only",
                fix=f"where there is a network: apptainer build image.sif {quoted}; bring image.sif"
                " here and kimi-eagle image import image.sif",
            )
        if (found := _LOCAL.fullmatch(source)) and os.path.lexists(found["file"]):
            fix = f"kimi-eagle image import {shlex.quote(found['file'])}"
            raise UsageError("the kind is read from the content", where=source, fix=fix)
        raise UsageError("no such file or folder", where=source)
    return Path(os.path.abspath(source))


def _target(origin: Path, out: Path | None) -> Path:
    stem = re.sub(r"(\.(tar|tgz|gz|bz2|xz|sif))+$", "", origin.name) or origin.name
    target = Path(os.path.abspath(Path(out).expanduser() if out else f"{stem}.sif"))
    if out and target.is_dir():
        target /= f"{stem}.sif"
    if os.path.lexists(target):
        if os.path.realpath(target) == os.path.realpath(origin):
            fix = f"kimi-eagle image lock {shlex.quote(str(target))}, or -o FILE for a copy"
            raise UsageError("it is here already", where=target, fix=fix)
        raise _exists(target)
    if not target.parent.is_dir():
        fix = f"mkdir -p {shlex.quote(str(target.parent))}"
        raise UsageError("no such folder", where=target.parent, fix=fix)
    return target


def _exists(target: Path) -> UsageError:
    # Running jobs may have it open, and what they run would be pulled away under them.
    return UsageError("there is a file already", where=target, fix="-o another name, or remove it")


@contextlib.contextmanager
def _workshop(target: Path) -> Iterator[Path]:
    """A folder on the disk of `target` that is gone afterwards."""
    work = files.temporary_name(target.with_name("import"))
    try:
        work.mkdir(mode=0o755)
    except OSError as e:
        raise UsageError(
            f"cannot be written: {e.strerror}", where=target.parent, fix="-o FILE elsewhere"
        ) from None
    try:
        with children.gone_at_the_end(work):
            yield work
    except OSError as e:
        raise RunError(f"not imported: {e.strerror or e}", where=e.filename or target) from None


def _copy(origin: Path, made: Path, progress: Progress | None) -> str:
    """The sha256 of the bytes that were copied."""
    sif.read_header(origin)
    state = hashlib.sha256()
    with sif.open_image(origin) as source, open(made, "xb") as copy:
        before = os.fstat(source.fileno())
        for block in hashcache.blocks(source, str(origin), before.st_size, progress):
            state.update(block)
            copy.write(block)
        if hashcache.line_of(before) != hashcache.line_of(os.fstat(source.fileno())):
            raise hashcache.changed(str(origin))
    return state.hexdigest()


def _build(kind: str, origin: Path, work: Path) -> None:
    """image.sif in the folder `work`, by apptainer build."""
    program = check_program("apptainer")
    kind, plain = _prepared(kind, origin, work)
    argv = [program, "build", "--disable-cache", "--mksquashfs-args", " ".join(COMPRESSION)]
    argv += ["image.sif", plain if kind == "sandbox" else f"{kind}:{plain}"]
    # HOME may be full or nobody's to write.
    own = {f"APPTAINER_{name}DIR": str(work / name.lower()) for name in ("CONFIG", "CACHE")}
    env = children.environment() | {"HOME": str(work), **own}
    env["APPTAINER_TMPDIR"] = _unpacking_folder(work, env)
    code, said = children.run(argv, work, env)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    left_out = [line for line in lines if "level=error" in line]
    if kind == "sandbox" and left_out:
        raise RunError(
            f"not all of the sandbox could be read: {left_out[0]}",
            where=origin,
            fix="import it as the user who made it",
        )
    if code or not (work / "image.sif").is_file():
        fatal = [line for line in lines if line.startswith("FATAL")] or lines[-1:]
        fix = "export APPTAINER_TMPDIR=FOLDER with space" if "no space" in said else ""
        raise RunError(f"apptainer build: {' '.join(fatal)}", where=origin, fix=fix)


def _unpacking_folder(work: Path, env: Mapping[str, str]) -> str:
    """What the user says, else beside the result, where there has to be room anyway."""
    beside = str(work) if _PLAIN.fullmatch(str(work)) else env.get("TMPDIR") or "/tmp"
    folder = env.get("APPTAINER_TMPDIR") or beside
    children.refuse_odd(folder, "unpack", fix="export APPTAINER_TMPDIR=/another/folder")
    return folder


def _prepared(kind: str, origin: Path, work: Path) -> tuple[str, str]:
    """Kind and name in `work` of something that Apptainer takes."""
    if kind == "oci-archive":
        folder = work / "source"
        try:
            with tarfile.open(origin) as archive:
                archive.extractall(folder, filter="data")
        except _BROKEN as e:
            raise UsageError(f"damaged archive: {e}", where=origin) from None
        return "oci", "source"
    if kind == "docker-archive" and (opened := _decompressed(origin)):
        try:
            with opened, open(work / "source.tar", "xb") as plain:
                shutil.copyfileobj(opened, plain, _BLOCK)
        except _BROKEN as e:
            raise UsageError(f"damaged archive: {e}", where=origin) from None
        return kind, "source.tar"
    os.symlink(origin, work / "source")
    return kind, "source"


def _decompressed(path: Path) -> BinaryIO | None:
    """The bytes of a compressed file; None where it is none."""
    with open(path, "rb") as file:
        head = file.read(6)
    for magic, opener in ((b"\x1f\x8b", gzip), (b"BZh", bz2), (b"\xfd7zXZ", lzma)):
        if head.startswith(magic):
            return opener.open(path, "rb")  # type: ignore[return-value,attr-defined]
    return None


def _unknown(path: Path, what: str) -> UsageError:
    return UsageError(
        what,
        where=path,
        expected="a SIF file, an archive of docker save, an OCI archive or layout, or a sandbox",
    )
