"""What an image file says of itself, read from the file alone: header, objects, labels.

A SIF file is a header, a table of descriptors and the objects they point to; the last one is the
squashfs that becomes the root folder. Login nodes may have no Apptainer, so this reads the format
itself (version 01, as `apptainer sif header` and `sif list` show it). Nothing here says whether the
bytes are the right ones: that is `pins.py`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import struct
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kimi_eagle.errors import UsageError
from kimi_eagle.images import children

ARCHITECTURES = {
    **{b"01": "386", b"02": "amd64", b"03": "arm", b"04": "arm64", b"05": "ppc64"},
    **{b"06": "ppc64le", b"07": "mips", b"08": "mipsle", b"09": "mips64", b"10": "mips64le"},
    **{b"11": "s390x", b"12": "riscv64"},
}
"""Codes of the format, and Go's names for them."""

METADATA = "inspect-metadata.json"
"""The object in which apptainer build leaves labels and scripts for `apptainer inspect`."""

_HEADER = struct.Struct("<32s10s3s3s16s8q")
_DESCRIPTOR = struct.Struct("<i?III5qqq128s384s")
_PARTITION, _JSON = 0x4004, 0x4006
_SYSTEM = 2  # type of the partition that is the root folder
_MOST_DESCRIPTORS = 10_000  # apptainer makes 48
_MOST_METADATA = 64 << 20  # bytes; usually 2 KB


@dataclass(frozen=True)
class Header:
    id: str
    """UUID, another one at each build."""
    arch: str
    """Go's name: amd64, arm64, ..."""
    created: float
    """Unix time."""
    size: int
    """Bytes of the whole file."""
    system_arch: str
    """Architecture of the root folder, which is the one that Apptainer looks at."""


@dataclass(frozen=True)
class _Object:
    kind: int
    name: str
    offset: int
    size: int
    extra: bytes


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header; UsageError where this is no SIF file, or not a whole one."""
    with open_image(path) as file:
        return _read(file, path)[0]


def labels(path: str | os.PathLike[str]) -> dict[str, str]:
    """The labels, from the file; where a build left none of its metadata, asks apptainer."""
    with open_image(path) as file:
        for found in _read(file, path)[1]:
            if found.kind == _JSON and found.name == METADATA:
                if found.size > _MOST_METADATA:
                    raise _damaged(path, f"{found.size} bytes of metadata")
                file.seek(found.offset)
                return _labels_of(file.read(found.size), path)
    return _inspected(path)


def open_image(path: str | os.PathLike[str]) -> BinaryIO:
    """An image file, opened for reading; UsageError for everything that is no readable file."""
    try:
        # Not `open` first: that of a pipe waits for a writer.
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise _is_folder(Path(path))
        if not stat.S_ISREG(mode):
            raise UsageError("not a file", where=path, expected="a SIF image")
        return open(path, "rb")
    except FileNotFoundError:
        raise UsageError("no such image", where=path) from None
    except OSError as e:
        raise UsageError(f"image cannot be read: {e.strerror}", where=path) from None
    except ValueError:  # a NUL in it
        raise UsageError(f"not a path: {os.fspath(path)!r}", expected="a SIF image") from None


def _is_folder(path: Path) -> UsageError:
    for mark, kind in ((".singularity.d", "a sandbox folder"), ("oci-layout", "an OCI layout")):
        if (path / mark).exists():
            fix = f"kimi-eagle image import {shlex.quote(str(path))}"
            what = f"{kind}, which changes without a trace; jobs run SIF files only"
            return UsageError(what, where=path, fix=fix)
    return UsageError("a folder", where=path, expected="a SIF image")


def _read(file: BinaryIO, path: object) -> tuple[Header, list[_Object]]:
    size = os.fstat(file.fileno()).st_size
    try:
        head = file.read(_HEADER.size)
        if not size:
            raise UsageError("empty file", where=path, expected="a SIF image")
        if head[32:42] != b"SIF_MAGIC\0":
            raise UsageError(
                "not a SIF image",
                where=path,
                expected="what apptainer build makes",
                fix="kimi-eagle image import makes one from a docker-archive, OCI files or sandbox",
            )
        if len(head) < _HEADER.size:
            raise _truncated(path, size, _HEADER.size)
        _, _, version, arch, ident, created, _, _, total, table, _, _, _ = _HEADER.unpack(head)
        if version != b"01\0":
            raise UsageError(f"SIF version {version!r}", where=path, expected="01")
        if not 0 < total <= _MOST_DESCRIPTORS or table < _HEADER.size:
            raise _damaged(path, f"{total} descriptors at byte {table}")
        if size < (end := table + total * _DESCRIPTOR.size):
            raise _truncated(path, size, end)
        file.seek(table)
        objects = _objects(file.read(total * _DESCRIPTOR.size), path)
    except OSError as e:
        raise UsageError(f"image cannot be read: {e.strerror}", where=path) from None
    if size < (end := max((o.offset + o.size for o in objects), default=0)):
        raise _truncated(path, size, end)
    systems = [o for o in objects if o.kind == _PARTITION and _partition_type(o) == _SYSTEM]
    if not systems:
        raise _damaged(path, "it holds no root file system")
    system = _arch(systems[0].extra[8:11])
    return Header(str(uuid.UUID(bytes=ident)), _arch(arch), float(created), size, system), objects


def _objects(table: bytes, path: object) -> list[_Object]:
    found = []
    for kind, used, *_, offset, size, _, _, _, _, _, name, extra in _DESCRIPTOR.iter_unpack(table):
        if not used:
            continue
        if offset < _HEADER.size or size < 0:
            raise _damaged(path, f"{size} bytes at byte {offset}")
        text = name.split(b"\0", 1)[0].decode("utf-8", "replace")
        found.append(_Object(kind, text, offset, size, extra))
    return found


def _partition_type(partition: _Object) -> int:
    return int(struct.unpack_from("<i", partition.extra, 4)[0])


def _arch(code: bytes) -> str:
    return ARCHITECTURES.get(code[:2], f"unknown ({code[:2].decode('ascii', 'replace')})")


def _labels_of(metadata: bytes, path: object) -> dict[str, str]:
    try:
        attributes = json.loads(metadata)["data"]["attributes"]
        return {_text(k): _text(v) for k, v in (attributes.get("labels") or {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _damaged(path, f"its {METADATA} cannot be read") from None


def _text(value: Any) -> str:
    """Half of a surrogate pair, which JSON can hold and no file can, becomes a question mark."""
    return str(value).encode("utf-8", "replace").decode()


def _inspected(path: str | os.PathLike[str]) -> dict[str, str]:
    program = shutil.which("apptainer")
    if program is None:
        raise UsageError(
            "the labels of this image can only be read by apptainer, which is not here",
            where=path,
            fix="module load apptainer, or kimi-eagle image import it on a machine that has it",
        )
    argv = [program, "inspect", "--json", "--labels", os.path.abspath(path)]
    try:
        env = children.environment()
        done = subprocess.run(argv, capture_output=True, env=env, timeout=300)
    except subprocess.TimeoutExpired:
        raise UsageError("apptainer inspect does not answer", where=path) from None
    if done.returncode:
        said: Any = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no reason"]
        raise UsageError(f"apptainer inspect failed: {said[-1]}", where=path)
    return _labels_of(done.stdout, path)


def _truncated(path: object, size: int, wanted: int) -> UsageError:
    return UsageError(
        f"truncated: {size} bytes",
        where=path,
        expected=f"at least {wanted}",
        fix="copy it again; sha256sum tells whether both are the same",
    )


def _damaged(path: object, why: str) -> UsageError:
    return UsageError(f"damaged image: {why}", where=path, fix="copy it again, or build it anew")
