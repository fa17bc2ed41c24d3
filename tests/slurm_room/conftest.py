"""A real Slurm for the tests of this room: `testbed` with accounting, `bare_testbed` without.

Both are made by slurm/testbed/testbed.py as a user would, live as long as the test session, and are
wiped at its end. A test that breaks one mends it (`start_node`, `up`) before it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from campaign import Case, reference  # noqa: E402
from places import Place, places  # noqa: E402

TESTBED = Path(__file__).resolve().parents[2] / "slurm/testbed/testbed.py"
INHERITED = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_")


class Testbed:
    """A running testbed: its commands, Slurm's commands on it, and waiting for what they show."""

    __test__ = False  # for pytest: no class of tests

    def __init__(self, directory: Path) -> None:
        self.dir = directory
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(INHERITED)}
        self.env["SLURM_CONF"] = str(directory / "etc/slurm.conf")

    def testbed(self, *args: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`testbed.py COMMAND --dir DIR ...`"""
        command, *rest = map(str, args)
        done = subprocess.run(
            [sys.executable, str(TESTBED), command, "--dir", str(self.dir), *rest],
            env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
        )
        if check and done.returncode:
            pytest.fail(f"testbed.py {command}: {done.stderr or done.stdout}", pytrace=False)
        return done

    def status(self) -> dict[str, Any]:
        """What `testbed.py status --json` tells."""
        return json.loads(self.testbed("status", "--json", check=False).stdout)

    def up(self, *options: str) -> None:
        """Mend it, or change its dials: `up("--grace-time", "10", "--preempt-signal")`."""
        self.testbed("up", *options)

    def kill_node(self, number: int, seen: bool = False) -> None:
        """Power cut of a node; slurmctld finds it in some 30 s, or at once if told (seen)."""
        self.testbed("kill-node", number, *(["--seen"] if seen else []))

    def start_node(self, number: int) -> None:
        """Bring a node back."""
        self.testbed("start-node", number)

    def run(self, *command: object, check: bool = True) -> str:
        """Output of one of Slurm's commands."""
        done = subprocess.run(
            list(map(str, command)), env=self.env, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=60, cwd=self.dir,
        )
        if check and done.returncode:
            raise AssertionError(f"{command}: exit status {done.returncode}: {done.stderr}")
        return done.stdout.strip()

    def sbatch(self, script: str, *options: object) -> str:
        """Submit these shell lines; the job's id. Output goes to DIR/ID.out unless told."""
        return self.run(
            "sbatch", "--parsable", f"--output={self.dir}/%A.out", *options, "--wrap", script
        )

    def squeue(self, job: str, what: str = "%T") -> str:
        """A field of a job, empty when squeue no longer shows it."""
        return self.run("squeue", "--noheader", "--states=all", "-j", job, "-o", what, check=False)

    def wait_state(self, job: str, *states: str, seconds: float = 30) -> str:
        """Until the job is in one of these states."""
        return self.wait(lambda: self.squeue(job), *states, seconds=seconds)

    def wait(self, look: Any, *wanted: object, seconds: float = 30) -> Any:
        """Until `look()` gives one of these; what it gave last is in the error."""
        deadline = time.monotonic() + seconds
        while (got := look()) not in wanted:
            if time.monotonic() > deadline:
                raise AssertionError(f"{got!r} after {seconds} s, wanted one of {wanted}")
            time.sleep(0.1)
        return got

    def output(self, job: str) -> str:
        """What the job wrote so far."""
        file = self.dir / f"{job}.out"
        return file.read_text() if file.exists() else ""

    def clear(self) -> None:
        """Cancel all jobs and wait until they are gone; mend what is broken."""
        self.up()
        jobs = set(self.run("squeue", "--noheader", "-o", "%A").split())
        if jobs:
            self.run("scancel", *sorted(jobs), check=False)
            self.wait(lambda: self.run("squeue", "--noheader"), "")


@contextlib.contextmanager
def running(name: str, *options: str) -> Iterator[Testbed]:
    """A new testbed, wiped in the end; those of test sessions that were killed are wiped now."""
    for leftover in Path("/tmp").glob("ke-test-*-*"):
        session = Path("/proc", leftover.name.split("-")[2])
        if leftover.stat().st_uid == os.getuid() and not session.exists():
            Testbed(leftover).testbed("wipe", check=False)
            shutil.rmtree(leftover, ignore_errors=True)
    # Short: sockets lie in it, and their paths are limited to 107 characters.
    bed = Testbed(Path(f"/tmp/ke-test-{os.getpid()}-{name}"))
    try:
        bed.up(*options)
        yield bed
    finally:
        bed.testbed("wipe")


@pytest.fixture(scope="session")
def testbed() -> Iterator[Testbed]:
    """4 nodes with 8 GPUs each and accounting; SLURM_CONF points to it for the whole session."""
    with running("a") as bed, pytest.MonkeyPatch.context() as patch:
        for key in set(os.environ) - set(bed.env):
            patch.delenv(key)
        patch.setenv("SLURM_CONF", bed.env["SLURM_CONF"])
        yield bed


@pytest.fixture(scope="session")
def bare_testbed() -> Iterator[Testbed]:
    """The same without accounting. Its `.env` has to be given to what shall use it."""
    with running("b", "--no-accounting") as bed:
        yield bed


@pytest.fixture(scope="session")
def place(verifier_dir: Path) -> Iterator[Callable[[str], Place]]:
    """`place("user")`: see places.py."""
    with places(verifier_dir) as named:
        yield named


@pytest.fixture
def case(
    request: Any, testbed: Any, place: Any, tmp_path: Path, tmp_path_factory: Any
) -> Iterator[Case]:
    """A run of the tiny recipe on a clean testbed, at the place that the test's parameter names."""
    where = place(getattr(request, "param", "host"))
    folder = tmp_path
    if where.ids:  # pytest's folders are closed to others
        folder = Path(tempfile.mkdtemp(prefix="ke-case-", dir="/tmp"))
        where.own(folder)
    yield Case(testbed, reference(tmp_path_factory.getbasetemp()), folder, where)
    testbed.clear()
    if folder != tmp_path:
        shutil.rmtree(folder)
