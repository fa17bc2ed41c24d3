"""Images are built here: the wheels of a lock, a definition of `containers/`, Apptainer.

Two layers. The base image is the system and the whole lock; it is kept, by the digest of what it
is made from, because it takes minutes. The image itself is the same definition on that base
(`Bootstrap: localimage`) and gets this project's wheel, labels and bill of materials; this is what
a change of our source costs. Price: the base, 1.2 GB for CPUs, stays in the cache.

Both are built by one definition with `containers/install-image.sh`, which reads two mounts:
/mnt (lock, pip, our wheel, facts for labels) and /srv (wheels). See containers/README.md, "Images".
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import kimi_eagle
from kimi_eagle import files
from kimi_eagle.containers.exec import mount_text
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.images.wheels import (
    Say,
    cache,
    checkout,
    exclusive,
    lock_file,
    own_wheel,
    pip_wheel,
    source_digest,
    wheels,
)
from kimi_eagle.images.workplace import run, search_path, workplace
from kimi_eagle.provenance import NO_PINS, git

__all__ = ["BuildReport", "base_image", "build", "sbom_path", "wheels"]

DEFINITIONS = {"cpu": "kimi-eagle-cpu.def", "cuda": "kimi-eagle.def"}
ROOM = {"cpu": 9_000_000_000, "cuda": 45_000_000_000}
"""Bytes that a build wants free beside its output at its peak: an unpacked tree, its packed copy
and the base. Measured for cpu (tree 3.5 GB); for cuda an estimate from the size of such bases."""
FAST = "-comp zstd -Xcompression-level 1"
"""Packs the CPU tree, 3.5 GB, in 12 s on two idle cores; gzip, the default, takes minutes."""


@dataclass
class BuildReport:
    """What a build made and what it took."""

    path: Path
    seconds: dict[str, float] = field(default_factory=dict)
    """By step, in their order."""
    bytes: int = 0


def sbom_path(image: Path) -> Path:
    """Where the bill of materials lies beside an image."""
    return image.with_name(image.stem + ".sbom.cdx.json")


def build(
    flavour: str,
    out: Path,
    *,
    base: tuple[str, str] | None = None,
    build_args: Mapping[str, str] | None = None,
    lock: Path | None = None,
    workdir: Path | None = None,
    replace: bool = False,
    say: Say = print,
) -> BuildReport:
    """Build an image of the checkout's present state into `out`, whole or not at all.

    flavour: "cpu" or "cuda". base: (Bootstrap, From) to build on in one layer, instead of the kept
    base image. build_args: `%arguments` of the definition. lock: another one than the flavour's.
    workdir: folder for the gigabytes in between, default beside `out`; empty again at the end, also
    after Ctrl-C. UsageError for what cannot be built, RunError with the last words of what failed.
    """
    out = Path(os.path.abspath(out))
    lock = lock or lock_file(flavour)
    check_possible(flavour, out, replace)
    report, args = BuildReport(out), dict(build_args or {})
    room = 0 if base else ROOM[flavour]
    if base is None:
        with _step(report, "base image", say):
            made = base_image(flavour, build_args=args, lock=lock, workdir=workdir, say=say)
            base = ("localimage", str(made))
    with workplace(workdir or out.parent, room) as work:
        with _step(report, "wheels", say):
            house = wheels(flavour, lock=lock, say=say)
        with _step(report, "own wheel", say):
            context = _context(work, lock)
            own = own_wheel(context / "app")
            (context / "facts").write_text(_lines(facts(lock, own)))
        args |= {"BOOTSTRAP": base[0], "BASE": _short(base, work)}
        with _whole(out) as fresh:
            with _step(report, "image", say):
                _apptainer_build(flavour, fresh, context, house, work, args)
            with _step(report, "bill of materials", say):
                bill = _read_out(fresh, "/opt/kimi-eagle/sbom.cdx.json", work)
            files.write_atomic(sbom_path(out), bill)
    report.bytes = out.stat().st_size
    say(f"{out}: {report.bytes / 1e9:.2f} GB in {sum(report.seconds.values()):.0f} s")
    return report


def base_image(
    flavour: str,
    *,
    build_args: Mapping[str, str] | None = None,
    lock: Path | None = None,
    workdir: Path | None = None,
    say: Say = print,
) -> Path:
    """The stack without our wheel, built if it is not in the cache (workdir: beside it).

    Named by what it is made from: lock, install script, definition, arguments.
    """
    lock = lock or lock_file(flavour)
    root, args = checkout() / "containers", dict(build_args or {})
    digest = hashlib.sha256(files.to_json(args).encode())
    for source in (lock, root / "install-image.sh", root / DEFINITIONS[flavour], root / "pip.lock"):
        digest.update(files.sha256_file(source).encode())
    path = cache() / "images" / f"{flavour}-base-{digest.hexdigest()[:16]}.sif"
    with exclusive(path.with_name(f"{flavour}-base.busy")):
        if path.is_file():
            os.utime(path)
            return path
        _forget_older(path.parent, f"{flavour}-base-*.sif")
        say(f"building the base image of {lock.name} (kept as {path})")
        report = BuildReport(path)
        with workplace(workdir or path.parent, ROOM[flavour]) as work:
            with _step(report, "  wheels", say):
                house = wheels(flavour, lock=lock, say=say)
            context = _context(work, lock)
            with _whole(path) as fresh, _step(report, "  system, lock, packing", say):
                _apptainer_build(flavour, fresh, context, house, work, args, test=False)
    return path


def facts(lock: Path, wheel: Path) -> dict[str, str]:
    """Labels that only the builder knows; the others are read inside (images/inside.py)."""
    oci = {
        "title": "kimi-eagle",
        "version": kimi_eagle.__version__,
        "revision": revision(checkout()),
        "source": _origin(checkout()),
        "created": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
    }
    labels = {f"org.opencontainers.image.{name}": value for name, value in oci.items()}
    return labels | {
        "ai.kimi-eagle.lock-sha256": files.sha256_file(lock),
        "ai.kimi-eagle.source-sha256": source_digest(wheel),
    }


def revision(root: Path) -> str:
    """Git commit of a checkout, `+dirty` where what goes into the wheel differs from it."""
    head = git(root, "rev-parse", "HEAD")
    packed = ("src", "jobs", "slurm", "containers", "pyproject.toml", "README.md")
    changed = git(root, "status", "--porcelain", "--", *packed, NO_PINS)
    return head.decode().strip() + ("+dirty" if changed else "") if head else "unknown"


def _origin(root: Path) -> str:
    """Where the checkout came from, without user names and passwords; `unknown` for a folder."""
    url = (git(root, "remote", "get-url", "origin") or b"").decode().strip()
    found = re.fullmatch(r"(https?://)(?:[^@/]*@)?([^\s?#]+)|(?:ssh://)?git@([^\s?#]+)", url)
    if not found:
        return "unknown"
    return f"{found[1]}{found[2]}" if found[1] else f"git@{found[3]}"


def _lines(pairs: Mapping[str, str]) -> str:
    return "".join(f"{name} {value}\n" for name, value in pairs.items())


def check_possible(flavour: str, out: Path, replace: bool, *, here: bool = True) -> None:
    """UsageError or RunError where a build could only fail. here: this machine builds."""
    lock_file(flavour)
    if not out.parent.is_dir():
        raise UsageError("no such folder", where=out.parent, fix=f"mkdir -p {out.parent}")
    if out.is_dir() or (out.exists() and not replace):
        raise UsageError("there is something of this name", where=out, expected="a new name")
    for name in ("apptainer", "mksquashfs") if here else ():
        if shutil.which(name, path=search_path()) is None:
            raise RunError(f"no program {name!r}", fix="sudo bash containers/install-apptainer.sh")


@contextlib.contextmanager
def _step(report: BuildReport, name: str, say: Say) -> Iterator[None]:
    start = time.monotonic()
    yield
    report.seconds[name] = time.monotonic() - start
    say(f"{name}: {report.seconds[name]:.1f} s")


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A name for a file to build, which becomes `path` at the end and goes away on any failure."""
    fresh = files.temporary_name(path)
    try:
        yield fresh
        fresh.chmod(0o644)
        files.fsync_file(fresh)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def _forget_older(folder: Path, pattern: str) -> None:
    """Remove base images that no build has used for a day."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 86_400:
                path.unlink()


def _context(work: Path, lock: Path) -> Path:
    """The folder that is /mnt inside; with `app` and `facts` it becomes that of an image."""
    context = work / "context"
    context.mkdir()
    shutil.copy(checkout() / "containers" / "install-image.sh", context)
    shutil.copy(lock, context / "lock")
    shutil.copy(pip_wheel(), context)
    return context


def _short(base: tuple[str, str], work: Path) -> str:
    """`From` without folders: Apptainer writes it into the image's labels, for all to read."""
    kind, source = base
    if kind not in ("localimage", "docker-archive", "oci-archive"):
        return source
    link = work / Path(source).name
    link.symlink_to(os.path.abspath(source))
    return link.name


def _apptainer_build(
    flavour: str,
    out: Path,
    context: Path,
    house: Path,
    work: Path,
    args: Mapping[str, str],
    *,
    test: bool = True,
) -> None:
    if args.get("BOOTSTRAP", "debootstrap" if flavour == "cpu" else "") == "debootstrap":
        _need_debootstrap()
    argv = ["apptainer", "build", *([] if test else ["--notest"]), "--mksquashfs-args", FAST]
    for source, target in ((context, "/mnt"), (house, "/srv")):
        argv += ["--mount", mount_text(str(source), target, read_only=True)]
    for name, value in args.items():
        argv += ["--build-arg", f"{name}={value}"]
    definition = checkout() / "containers" / DEFINITIONS[flavour]
    run([*argv, str(out), str(definition)], work)


def _read_out(image: Path, inside: str, work: Path) -> str:
    """A small text file of the image."""
    argv = ["apptainer", "-q", "exec", "--no-home", "--no-mount", "cwd,hostfs", str(image)]
    return run([*argv, "cat", inside], work)


def _need_debootstrap() -> None:
    if shutil.which("debootstrap", path=search_path()):
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update"], ["install", "-y", "--no-install-recommends", "debootstrap"]):
            subprocess.run([*apt, *words], env=env, capture_output=True)
    if not shutil.which("debootstrap", path=search_path()):
        raise RunError("no program 'debootstrap'", fix="sudo apt-get install debootstrap")
