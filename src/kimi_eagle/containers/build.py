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
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import kimi_eagle
from kimi_eagle import files
from kimi_eagle.containers.exec import mount_text
from kimi_eagle.containers.wheels import (
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
from kimi_eagle.errors import RunError, UsageError

__all__ = ["BuildReport", "base_image", "build", "sbom_path", "wheels"]

DEFINITIONS = {"cpu": "kimi-eagle-cpu.def", "cuda": "kimi-eagle.def"}
ROOM = {"cpu": 9_000_000_000, "cuda": 60_000_000_000}
"""Bytes that a build wants free beside its output at its peak: an unpacked tree, its packed copy
and the base. Measured for cpu (tree 3.9 GB); for cuda an estimate from the size of the base."""
FAST = "-comp zstd -Xcompression-level 1"
"""Packs 3.9 GB in 12 s instead of a minute, for 10% more bytes than level 3."""

_KEPT = re.compile(r"(APPTAINER|SINGULARITY)_(DOCKER_\w+|CONFIGDIR|CACHEDIR)")
"""What the user may tell Apptainer for a build: how to log in to a registry, where to cache."""


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
    _check(flavour, out, replace)
    report, args = BuildReport(out), dict(build_args or {})
    if base is None:
        with _step(report, "base image", say):
            base = ("localimage", str(base_image(flavour, build_args=args, lock=lock, say=say)))
    with _workplace(workdir or out.parent, ROOM[flavour] if base[0] == "docker" else 0) as work:
        with _step(report, "wheels", say):
            house = wheels(flavour, lock=lock, say=say)
        with _step(report, "own wheel", say):
            context = _context(work, lock)
            own = own_wheel(context / "app")
            (context / "facts").write_text(_lines(facts(lock, own)))
        args |= {"BOOTSTRAP": base[0], "BASE": _short(base, work)}
        fresh = files.temporary_name(out)
        try:
            with _step(report, "image", say):
                _apptainer_build(flavour, fresh, context, house, work, args)
            with _step(report, "bill of materials", say):
                bill = _read_out(fresh, "/opt/kimi-eagle/sbom.cdx.json", work)
            fresh.chmod(0o644)
            files.fsync_file(fresh)
            files.write_atomic(sbom_path(out), bill)
            os.replace(fresh, out)
        finally:
            fresh.unlink(missing_ok=True)
    report.bytes = out.stat().st_size
    say(f"{out}: {report.bytes / 1e9:.2f} GB in {sum(report.seconds.values()):.0f} s")
    return report


def base_image(
    flavour: str,
    *,
    build_args: Mapping[str, str] | None = None,
    lock: Path | None = None,
    say: Say = print,
) -> Path:
    """The stack without our wheel, built if it is not in the cache.

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
        with _workplace(path.parent, ROOM[flavour]) as work:
            with _step(report, "  wheels", say):
                house = wheels(flavour, lock=lock, say=say)
            context = _context(work, lock)
            fresh = files.temporary_name(path)
            try:
                with _step(report, "  system, lock, packing", say):
                    _apptainer_build(flavour, fresh, context, house, work, args, test=False)
                fresh.chmod(0o644)
                files.fsync_file(fresh)
                os.replace(fresh, path)
            finally:
                fresh.unlink(missing_ok=True)
    return path


def facts(lock: Path, wheel: Path) -> dict[str, str]:
    """Labels that only the builder knows; the others are read inside (containers/inside.py)."""
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
    head = _git(root, "rev-parse", "HEAD")
    packed = ("src", "jobs", "slurm", "containers", "pyproject.toml", "README.md")
    changed = _git(root, "status", "--porcelain", "--", *packed)
    return "unknown" if not head else head + ("+dirty" if changed else "")


def _origin(root: Path) -> str:
    """Where the checkout came from, without user names and passwords; `unknown` for a folder."""
    url = _git(root, "remote", "get-url", "origin") or ""
    found = re.fullmatch(r"(https?://)(?:[^@/]*@)?([^\s?#]+)|(?:ssh://)?git@([^\s?#]+)", url)
    if not found:
        return "unknown"
    return f"{found[1]}{found[2]}" if found[1] else f"git@{found[3]}"


def _git(root: Path, *args: str) -> str | None:
    argv = ["git", "-C", str(root), *args]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _lines(pairs: Mapping[str, str]) -> str:
    return "".join(f"{name} {value}\n" for name, value in pairs.items())


def _check(flavour: str, out: Path, replace: bool) -> None:
    if flavour not in DEFINITIONS:
        raise UsageError(f"no flavour {flavour!r}", expected=" or ".join(DEFINITIONS))
    if not out.parent.is_dir():
        raise UsageError("no such folder", where=out.parent, fix=f"mkdir -p {out.parent}")
    if out.is_dir() or (out.exists() and not replace):
        raise UsageError("there is something of this name", where=out, expected="a new name")
    for name in ("apptainer", "mksquashfs"):
        if shutil.which(name, path=_PATH()) is None:
            raise RunError(f"no program {name!r}", fix="sudo bash containers/install-apptainer.sh")


def _PATH() -> str:  # noqa: N802
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


@contextlib.contextmanager
def _step(report: BuildReport, name: str, say: Say) -> Iterator[None]:
    start = time.monotonic()
    yield
    report.seconds[name] = time.monotonic() - start
    say(f"{name}: {report.seconds[name]:.1f} s")


@contextlib.contextmanager
def _workplace(folder: Path, room: int) -> Iterator[Path]:
    """A folder for what lies around during a build; gone at the end, whatever happens."""
    if bad := sorted(set(",:\\") & set(str(folder))):  # of its temporary folder (1.4.5)
        raise UsageError(
            f"Apptainer cannot build in a folder with {bad[0]!r} in its path",
            where=folder,
            fix="build elsewhere and move the image",
        )
    free = shutil.disk_usage(folder).free
    if free < room:
        raise RunError(
            f"{free / 1e9:.0f} GB free, {room / 1e9:.0f} GB wanted for this build",
            where=folder,
            fix="free some, or set KIMI_EAGLE_CACHE and --workdir to folders with more",
        )
    work = Path(tempfile.mkdtemp(prefix=".kimi-eagle-build-", dir=folder))
    try:
        with _ends_like_ctrl_c():
            yield work
    finally:
        _remove(work)


@contextlib.contextmanager
def _ends_like_ctrl_c() -> Iterator[None]:
    """TERM and HUP go the way of Ctrl-C, so that what has to be removed is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _remove(folder: Path) -> None:
    """Remove a folder; a user's build leaves files of that user's further ids (subuid) in it."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        argv = ["unshare", "--user", "--map-root-user", "--map-auto", "rm", "-rf", str(folder)]
        with contextlib.suppress(OSError):
            subprocess.run(argv, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def _forget_older(folder: Path, pattern: str, days: float = 1) -> None:
    """Remove base images that no build has used for a day."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > days * 86_400:
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
    _run([*argv, str(out), str(definition)], work)


def _read_out(image: Path, inside: str, work: Path) -> str:
    """A small text file of the image."""
    argv = ["apptainer", "-q", "exec", "--no-home", "--no-mount", "cwd,hostfs", str(image)]
    return _run([*argv, "cat", inside], work)


def _run(argv: list[str], work: Path) -> str:
    """Run Apptainer, and end all of it when we are told to end; its output."""
    log = work / "log"
    with open(log, "wb") as file:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(work),
            cwd=work,
            start_new_session=True,  # Ctrl-C reaches us alone; we end the group
        )
        try:
            code = child.wait()
        except BaseException:
            _end(child)
            raise
    text = log.read_text(errors="replace")
    if code:
        raise RunError(f"{argv[0]} {argv[1]} failed: {_last_words(text)}")
    return text


def _end(child: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(10)


def _last_words(text: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [x.strip() for x in plain.splitlines() if not x.startswith(("INFO:", "I: "))]
    lines = [x for x in lines if x]
    telling = [x for x in lines if re.search(r"\b(error|fatal|cannot|can't)\b", x, re.IGNORECASE)]
    return "; ".join((telling or lines or ["it said nothing"])[-4:])[:1000]


def _environment(work: Path) -> dict[str, str]:
    """The host's (proxies matter here) without what would change what Apptainer does."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("APPTAINER", "SINGULARITY")) or _KEPT.fullmatch(name)
    }
    temporary = work / "tmp"
    temporary.mkdir(exist_ok=True)
    kept |= {"PATH": _PATH(), "TMPDIR": str(temporary), "APPTAINER_TMPDIR": str(temporary)}
    kept.setdefault("APPTAINER_CACHEDIR", str(work / "cache"))
    if os.geteuid() == 0 and (lacking := _lacking_capabilities()):
        kept["APPTAINER_DROP_CAPS"] = lacking
    return kept


def _lacking_capabilities() -> str:
    """Capabilities that root lacks here (in containers): Apptainer dies asking for them."""

    def names(*argv: str) -> set[str]:
        done = subprocess.run(["setpriv", *argv], capture_output=True, text=True)
        listed = re.search(r"^Capability bounding set:(.*)$", done.stdout, re.MULTILINE)
        return set(re.split(r"[\s,]+", (listed[1] if listed else done.stdout).strip())) - {""}

    try:
        lacking = names("--list-caps") - names("--dump")
    except FileNotFoundError:
        return ""
    return ",".join(sorted(f"CAP_{name}".upper() for name in lacking))


def _need_debootstrap() -> None:
    if shutil.which("debootstrap", path=_PATH()):
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update"], ["install", "-y", "--no-install-recommends", "debootstrap"]):
            subprocess.run([*apt, *words], env=env, capture_output=True)
    if not shutil.which("debootstrap", path=_PATH()):
        raise RunError("no program 'debootstrap'", fix="sudo apt-get install debootstrap")
