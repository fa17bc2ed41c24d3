"""Where a build works and how it starts Apptainer: gigabytes in between, signals, environment.

What must hold: after success, failure, Ctrl-C or the end of a Slurm job nothing is left, no file
and no process. So every build has one folder for all that lies around and one process group.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from kimi_eagle.errors import RunError, UsageError

_KEPT = re.compile(r"(APPTAINER|SINGULARITY)_(DOCKER_\w+|CONFIGDIR|CACHEDIR)")
"""What the user may tell Apptainer for a build: how to log in to a registry, where to cache."""


def search_path() -> str:
    """PATH with the folders of system programs, which a user's often lacks."""
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


@contextlib.contextmanager
def workplace(folder: Path, room: int) -> Iterator[Path]:
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


def run(argv: list[str], work: Path) -> str:
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
        fix = "no registry? build on a copy of the base: --base docker-archive:FILE"
        said = _last_words(text)
        raise RunError(
            f"{argv[0]} {argv[1]} failed: {said}", fix=fix if "conveyor failed" in said else ""
        )
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
    kept |= {"PATH": search_path(), "TMPDIR": str(temporary), "APPTAINER_TMPDIR": str(temporary)}
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
