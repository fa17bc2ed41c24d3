"""Apptainer as a child that does not outlive us, in an environment that does not change its work.

What must hold of builds and imports: after success, failure, Ctrl-C, TERM or HUP nothing is left,
no file and no process. So each has one folder for all that lies around and one process group.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kimi_eagle.errors import UsageError

_KEPT = re.compile(
    r"(APPTAINER|SINGULARITY)_(TMPDIR|DROP_CAPS|CONFIGDIR|CACHEDIR|DOCKER_\w+)",
)
"""What the user may tell Apptainer: folders, root's rights, how to log in to a registry."""
_NOT_IN_PATHS = frozenset(",:\\\"'$()`;&|<>\n\r")
"""In the path of its temporary folder: Apptainer 1.4.5 fails, or loses the labels silently. A comma
only where a definition has %post."""


def refuse_odd(folder: str | os.PathLike[str], what: str, fix: str) -> None:
    """UsageError where Apptainer cannot `what` in a temporary folder of this name."""
    if bad := sorted(_NOT_IN_PATHS & set(str(folder))):
        raise UsageError(
            f"Apptainer cannot {what} in a folder with {bad[0]!r} in its path",
            where=repr(str(folder)),
            fix=fix,
        )


def environment() -> dict[str, str]:
    """This environment without what would change what Apptainer does."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("APPTAINER", "SINGULARITY")) or _KEPT.fullmatch(name)
    }
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


@contextlib.contextmanager
def gone_at_the_end(folder: Path) -> Iterator[Path]:
    """Work in a folder of ours, which is removed however the work ends."""
    try:
        with ends_like_ctrl_c():
            yield folder
    finally:
        _remove(folder)


@contextlib.contextmanager
def ends_like_ctrl_c() -> Iterator[None]:
    """TERM and HUP go the way of Ctrl-C, so that what has to be removed is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.signal(n, stop) for n in numbers}  # not HUP under nohup
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(argv: Sequence[str], folder: Path, env: Mapping[str, str]) -> tuple[int, str]:
    """Run a program in a folder; exit code and what it said, which `log` there keeps.

    An exception in this process, such as Ctrl-C, ends the whole family first.
    """
    log = folder / "log"
    with open(log, "wb") as file:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=folder,
            start_new_session=True,  # Ctrl-C reaches us alone; we end the group
        )
        try:
            code = child.wait()
        except BaseException:
            _end(child)
            raise
    return code, log.read_text(errors="replace")


def _remove(folder: Path) -> None:
    """Remove a folder; a user's build leaves files of that user's further ids (subuid) in it."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        argv = ["unshare", "--user", "--map-root-user", "--map-auto", "rm", "-rf", "--"]
        with contextlib.suppress(OSError):
            subprocess.run([*argv, str(folder)], capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def _end(child: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(10)
