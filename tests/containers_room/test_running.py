"""A job's process: exit codes, signals, what a killed one leaves, and how long a start takes."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

HEARS = """
import os, signal, sys, time
def hear(number, frame):
    import decimal  # from the image: its root is still there
    os.write(1, b"%d\\n" % number)  # print may be cut off by the next signal
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), hear)
print("up", flush=True)
for _ in range(600):
    time.sleep(0.05)
"""

PID_THEN_WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


@pytest.mark.parametrize("script", [False, True], ids=["argv", "script"])
def test_signals_to_apptainer_reach_the_payload(room: Any, script: bool) -> None:
    names = ["SIGUSR2", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT", "SIGUSR2"]
    command = ["/usr/bin/python3", "-c", HEARS, *names]
    process = room.start(room.settings(), command, {}, script=script)
    assert process.stdout.readline() == "up\n"
    for name in names:
        process.send_signal(getattr(signal, name))
        line = process.stdout.readline()
        assert line, (name, process.wait(), process.stderr.read())
        assert int(line) == getattr(signal, name)
    process.kill()
    process.wait()


def test_exit_codes_pass(room: Any) -> None:
    for code in (0, 1, 2, 75, 76, 78, 130, 254):
        process = room.start(room.settings(), ["/bin/sh", "-c", f"exit {code}"], {})
        assert process.wait() == code
    process = room.start(room.settings(), ["/bin/sh", "-c", "kill -KILL $$"], {})
    assert process.wait() == -signal.SIGKILL  # a shell says 137
    process = room.start(room.settings(), ["/no/such/program"], {})
    assert process.wait() == 255 and "/no/such/program" in process.stderr.read()


def test_arguments_pass_intact(room: Any) -> None:
    words = ["", " ", "a b", "'", '"', "$HOME", "$(id)", "`id`", "a\nb", "\\", "*", "--nv", "é🎉"]
    for script in (False, True):
        answer = room.python(
            room.settings(), "answer = sys.argv[1:]", *words, host_env={}, script=script
        )
        assert answer == words


@pytest.mark.parametrize("victim", ["apptainer", "payload"])
def test_a_kill_leaves_squashfuse_and_nothing_else(room: Any, victim: str) -> None:
    """The payload never outlives apptainer, so no GPU stays taken."""
    process = room.start(room.settings(), ["/usr/bin/python3", "-c", PID_THEN_WAITS], {})
    payload = int(process.stdout.readline())
    served = room.squashfuses()
    assert len(served) == (1 if room.person.ids or os.geteuid() else 0)
    os.kill(process.pid if victim == "apptainer" else payload, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while Path(f"/proc/{payload}").exists():
        assert time.monotonic() < deadline, "the payload outlived apptainer"
        time.sleep(0.05)
    for pid in served:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while room.squashfuses():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_gpus_without_a_gpu_is_harmless(room: Any) -> None:
    """`--nv` on a machine without a driver: a warning."""
    assert room.python(room.settings(gpus=True), "answer = 1", host_env={}) == 1


def test_start_time(room: Any, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for _ in range(7):
        before = time.perf_counter()
        assert room.start(room.settings(), ["/bin/sh", "-c", ":"], {}).wait() == 0
        seconds.append(time.perf_counter() - before)
    with capsys.disabled():
        print(
            f"\n  container start as {'root' if room.person.name == 'root' else 'a user'}:"
            f" best {min(seconds):.2f} s, median {statistics.median(seconds):.2f} s of 7"
        )
    assert min(seconds) < 0.5
