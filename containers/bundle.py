"""`make bundle`: one archive from which machines without internet get kimi-eagle.

    .venv/bin/python containers/bundle.py [--out DIR] [--image FILE]... [--without-model]

Holds the light base (a Python of its own, the wheels of base.lock, our wheel), every lock, the
demo model's package, install-apptainer.sh, install.sh, and images where asked. `install.sh` in it
says how it is installed. The archive is plain tar, since its big parts are compressed already and
an old tar knows no zstd; equal inputs make equal bytes.

What is in it, in this order: BUNDLE (what install.sh has to know, `key=value`), the files, MANIFEST
(their sha256, as sha256sum writes it). MANIFEST is last, so that an archive cut short has none.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from kimi_eagle import __version__, files
from kimi_eagle.errors import KimiEagleError, RunError, UsageError
from kimi_eagle.images import build, lockfile, pins, wheels

FORMAT = "bundle/1"
GLIBC = 31
"""Minor version of the oldest libc: that of Debian 11, where our Python is built."""
WHEEL_GLIBC = 28
"""The wheels' (manylinux_2_28): what base.lock is resolved for."""
LOCKS = ("base", "cpu", "cuda", "model")
MTIME = 1_000_000_000


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder [default: dist]")
    parser.add_argument("--image", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--without-model", action="store_true")
    parser.add_argument("--python", type=Path, metavar="FILE.tar", help="made by python/build.sh")
    parser.add_argument("--lock", type=Path, help="instead of containers/base.lock")
    args = parser.parse_args(argv)
    try:
        made = bundle(
            args.out, args.image, model=not args.without_model, python=args.python, lock=args.lock
        )
    except KimiEagleError as e:
        print(f"error: {e.line()}", file=sys.stderr)
        return e.exit_code
    except OSError as e:
        print(f"error: {e.filename}: {e.strerror}", file=sys.stderr)
        return 1
    name = made.name.removesuffix(".tar")
    print(f"{made}: {made.stat().st_size / 1e6:.0f} MB")
    print("on the other machine:")
    print(f"  tar -xf {made.name} && {name}/install.sh --offline --prefix DIR")
    return 0


def bundle(
    out: Path,
    images: Iterable[Path] = (),
    *,
    model: bool = True,
    python: Path | None = None,
    lock: Path | None = None,
) -> Path:
    """Write the archive into the folder `out`; returns its path.

    images: pinned images (UsageError for others). python: a tar of a relocatable Python instead of
    the one that python/build.sh builds. lock: instead of base.lock.
    RunError where something cannot be fetched or built.
    """
    root = wheels.checkout()
    held = [pins.verified(image) for image in images]  # hours may go by before they are packed
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kimi-eagle-bundle-") as folder:
        work = Path(folder)
        parts = _base(root, work, python, lock or root / "containers" / "base.lock")
        big: dict[str, Path] = {}
        if model:
            locked = root / "containers" / "model.lock"
            for wheel in _fetched(locked, work / "python"):
                big[f"model/{wheel.name}"] = wheel
            big["model/model.lock"] = locked
        for image in held:
            big |= _image(image, work)
        facts = _facts(root, work, parts, big)
        target = out / f"kimi-eagle-{__version__}-linux-{facts['arch']}.tar"
        _write(target, facts, parts | big)
    return target


def _base(root: Path, work: Path, python: Path | None, lock: Path) -> dict[str, Path]:
    """{name in the archive: file} of all that becomes the light base."""
    python = python or _build_python(root)
    with tarfile.open(python) as archive:
        archive.extractall(work / "python", filter="tar")
    containers = root / "containers"
    parts = {
        "install.sh": containers / "install.sh",
        "install-apptainer.sh": containers / "install-apptainer.sh",
        "python.tar": python,
    }
    parts |= {f"locks/{name}.lock": containers / f"{name}.lock" for name in LOCKS}
    parts["locks/base.lock"] = lock
    for wheel in _fetched(lock, work / "python"):
        parts[f"wheels/{wheel.name}"] = wheel
    own = wheels.own_wheel(work)
    parts[f"wheels/{own.name}"] = own
    package = work / "package.lock"
    package.write_text(f"kimi-eagle=={__version__} --hash=sha256:{files.sha256_file(own)}\n")
    return parts | {"locks/package.lock": package}


def _build_python(root: Path) -> Path:
    done = subprocess.run([root / "containers/python/build.sh"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RunError("no Python for the bundle", fix="see above, or give --python FILE.tar")
    return Path(done.stdout.strip())


def _fetched(lock: Path, python: Path) -> list[Path]:
    """The wheels of a lock, as the bundle's Python would choose them on the oldest libc."""
    program = _program(python)
    key = hashlib.sha256(lock.read_bytes() + program.name.encode()).hexdigest()[:16]
    folder = wheels.cache() / "wheels" / f"bundle-{key}"
    with wheels.exclusive(folder.with_suffix(".busy")):
        if not folder.is_dir():
            _fetch(lock, program, folder)
    return sorted(folder.glob("*.whl"))


def _fetch(lock: Path, program: Path, folder: Path) -> None:
    platforms = [f"manylinux_2_{n}_x86_64" for n in range(WHEEL_GLIBC, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    argv = [str(program), "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    argv += ["--require-hashes", "--only-binary=:all:", "--disable-pip-version-check"]
    argv += [f"--platform={name}" for name in platforms]
    try:
        done = subprocess.run(
            [*argv, "--dest", str(fresh), "--requirement", str(lock)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            last = [x for x in done.stderr.splitlines() if x.startswith("ERROR")][-1:]
            why = last[0] if last else "pip said nothing"
            raise RunError(f"pip could not fetch a wheel: {why}", where=lock)
        fresh.chmod(0o755)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _program(python: Path) -> Path:
    """The interpreter in an unpacked tree: bin/python3.N."""
    found = sorted((python / "bin").glob("python3.*"))
    if len(found) != 1:
        raise UsageError("not a Python tree", where=python, expected="one bin/python3.N")
    return found[0]


def _image(image: pins.Image, work: Path) -> dict[str, Path]:
    """An image with a lock file of its own, in a folder named by its digest.

    So images of two bundles lie beside each other, and a run finds the one that it is pinned to.
    """
    folder = f"images/{image.sha256[:12]}"
    name = re.sub(r"[^A-Za-z0-9._+-]", "_", image.name).lstrip(".-") + ".sif"
    lock = work / folder / "images.lock.json"
    lock.parent.mkdir(parents=True)
    fields = {k: v for k, v in image.as_json().items() if k != "path"}
    created = image.labels["org.opencontainers.image.created"]  # no clock: equal bytes
    entry = lockfile.Entry(lock=lock, file=name, locked=created, **fields)
    lockfile.add(lock, entry, replace=False)
    return {f"{folder}/{name}": Path(image.path), f"{folder}/images.lock.json": lock}


def _facts(root: Path, work: Path, parts: dict[str, Path], big: dict[str, Path]) -> dict[str, Any]:
    """What install.sh reads from BUNDLE."""
    program = _program(work / "python")
    digests = "".join(f"{name} {files.sha256_file(parts[name])}\n" for name in sorted(parts))
    base = sum(p.stat().st_size for p in (work / "python").rglob("*") if p.is_file())
    for name in parts:
        if name.startswith("wheels/"):
            with zipfile.ZipFile(parts[name]) as wheel:
                base += sum(info.file_size for info in wheel.infolist())
    room = base * 5 // 4 + sum(file.stat().st_size for file in big.values())  # byte code: a quarter
    return {
        "format": FORMAT,
        "version": __version__,
        "revision": build.revision(root),
        "id": f"{__version__}-{hashlib.sha256(digests.encode()).hexdigest()[:12]}",
        "arch": "x86_64",
        "glibc": f"2.{GLIBC}",
        "python": program.name,
        "room_mb": (room >> 20) + 32,
        "files": len(parts) + len(big) + 1,
    }


class _Hashed(io.RawIOBase):
    """A file that is hashed while it is read."""

    def __init__(self, file: IO[bytes]):
        self._file, self.sha256 = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.sha256.update(data)
        return data


def _write(target: Path, facts: dict[str, Any], parts: dict[str, Path]) -> None:
    """The archive, whole or not at all, and its own sha256 beside it."""
    top, manifest = target.name.removesuffix(".tar"), []

    def add(archive: tarfile.TarFile, name: str, size: int, file: IO[bytes]) -> None:
        info = tarfile.TarInfo(f"{top}/{name}")
        info.size, info.mtime = size, MTIME
        info.mode = 0o755 if name.endswith(".sh") else 0o644
        hashed = _Hashed(file)
        archive.addfile(info, hashed)
        manifest.append(f"{hashed.sha256.hexdigest()}  {name}\n")

    temporary = files.temporary_name(target)
    try:
        with open(temporary, "wb") as raw:
            with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as archive:
                text = "".join(f"{key}={value}\n" for key, value in facts.items()).encode()
                add(archive, "BUNDLE", len(text), io.BytesIO(text))
                for name in sorted(parts):
                    with open(parts[name], "rb") as file:
                        add(archive, name, os.fstat(file.fileno()).st_size, file)
                text = "".join(manifest).encode()
                add(archive, "MANIFEST", len(text), io.BytesIO(text))
            raw.flush()
            os.fsync(raw.fileno())
        digest = files.sha256_file(temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    files.write_atomic(target.with_suffix(".tar.sha256"), f"{digest}  {target.name}\n")


if __name__ == "__main__":
    sys.exit(main())
