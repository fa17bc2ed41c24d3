"""Apptainer builds as children that do not outlive us: Ctrl-C, TERM and HUP end them all."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


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


def run(argv: Sequence[str], log: Path, *, cwd: Path, env: Mapping[str, str]) -> tuple[int, str]:
    """Run a program with all that it starts; exit code and what it said, which `log` keeps.

    An exception in this process, such as Ctrl-C, ends the whole family first.
    """
    with open(log, "wb") as file:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            start_new_session=True,  # Ctrl-C reaches us alone; we end the group
        )
        try:
            code = child.wait()
        except BaseException:
            _end(child)
            raise
    return code, log.read_text(errors="replace")


def remove(folder: Path) -> None:
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
