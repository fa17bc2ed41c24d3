"""A job's process: exit codes, signals, what a killed one leaves, and how long a start takes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import statistics
import subprocess
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


def test_signals_to_apptainer_reach_the_payload(room: Any) -> None:
    names = ["SIGUSR2", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT", "SIGUSR2"]
    command = ["/usr/bin/python3", "-c", HEARS, *names]
    process = room.start(room.settings(), command, {})
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
    assert room.python(room.settings(), "answer = sys.argv[1:]", *words) == words


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


def test_scratch_of_killed_starts_is_removed(room: Any) -> None:
    """A folder of a process that lives stays; a TMPDIR that is no folder is not used."""
    waits = ["/usr/bin/python3", "-c", PID_THEN_WAITS]
    killed, alive = (room.start(room.settings(), waits) for _ in range(2))
    for process in (killed, alive):
        process.stdout.readline()
    owners = {int(p.name.rpartition("-")[2]) for p in room.folder.glob("ke-*")}
    assert owners == {killed.pid, alive.pid}
    killed.kill()
    killed.wait()
    room.python(room.settings(), "answer = 1")
    left = {int(p.name.rpartition("-")[2]) for p in room.folder.glob("ke-*")}
    assert killed.pid not in left and alive.pid in left
    alive.kill()
    code = "answer = os.environ['TMPDIR']"
    assert room.python(room.settings(), code, host_env={"TMPDIR": "/no/such"}) == "/eagle/tmp"


ORPHAN = """
import os, time
if os.fork() == 0:
    os.setsid()
    for fd in (0, 1, 2):
        os.close(fd)
    time.sleep(60)
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_scratch_stays_while_a_child_of_a_killed_start_uses_it(room: Any) -> None:
    """Nor does a start in another namespace touch it, as on another node with the same folder."""
    process = room.start(room.settings(), ["/usr/bin/python3", "-c", ORPHAN])
    process.stdout.readline()
    (folder,) = room.folder.glob("ke-*")
    script = [str(room.folder / "start.sh"), "/bin/sh", "-c", "true"]
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(room.folder)}
    if not room.person.ids and os.geteuid() == 0:
        other = ["unshare", "--pid", "--fork", "--mount-proc", "bash", *script]
        subprocess.run(other, env=env, check=True)
        assert folder.exists()
    process.kill()
    process.wait()
    users = [p for p in Path("/proc").glob("[0-9]*") if uses(p, folder)]
    room.python(room.settings(), "answer = 1")
    assert folder.exists() == bool(users)
    for path in users:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.name), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(uses(p, folder) for p in users):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    room.python(room.settings(), "answer = 1")
    assert not folder.exists()


def uses(process: Path, folder: Path) -> bool:
    """Whether a process has the folder mounted."""
    try:
        return f"{folder.name} " in (process / "mountinfo").read_text()
    except OSError:
        return False


def test_only_the_pinned_image_is_started(room: Any) -> None:
    """A proven file is not read again; any other one is, and refused unless its digest fits."""
    image, proven = room.folder / "copy.sif", room.folder / "proven"
    shutil.copy(room.image, image)
    room.person.chown(room.folder)
    digest = hashlib.sha256(image.read_bytes()).hexdigest()
    settings = room.settings(image=str(image), sha256=digest, proven=str(proven))
    code = "answer = os.environ['KIMI_EAGLE_IMAGE']"
    assert room.python(settings, code) == f"sha256:{digest}"
    (line,) = proven.read_text().splitlines()
    assert line.split()[:2] == [digest, str(image.stat().st_size)]
    room.python(settings, code)
    assert proven.read_text().splitlines() == [line]

    before = image.stat()
    with image.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns))  # as who hides it would
    process = room.start(settings, ["/bin/sh", "-c", "true"])
    out, err = process.communicate()
    assert process.returncode == 2 and f"is not the run's image: sha256 {digest[:4]}" not in err
    assert "is not the run's image" in err and out == ""
    image.unlink()
    process = room.start(settings, ["/bin/sh", "-c", "true"])
    assert process.wait() == 2 and "no such image on " in process.stderr.read()
