"""Starting and stopping the daemons of a testbed, each in the foreground and known by its process.

Order: munged, mariadbd, slurmdbd (slurmctld asks it at once), slurmctld, the slurmds. The choice
against daemons that put themselves into the background: their pid files come late, hold ids only,
and lie after a crash.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable

import processes
from processes import Process
from settings import Settings, Stop, find

# What would change the commands' output or a daemon's mind.
FOREIGN = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_",
           "SALLOC_", "MYSQL_", "MUNGE_")

MARK = "KIMI_EAGLE_TESTBED_DAEMON"  # in the environment of each, with the file that it is known by


class Testbed:
    """The daemons of one directory."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.dir = settings.dir
        env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        path = env.get("PATH", "/usr/bin:/bin") + ":/usr/local/sbin:/usr/sbin:/sbin"
        self.env = {**env, "PATH": path, "SLURM_CONF": str(settings.slurm_conf)}

    @property
    def names(self) -> list[str]:
        """All daemons in the order in which they start."""
        database = ["mariadbd", "slurmdbd"] if self.settings.accounting else []
        return ["munged", *database, "slurmctld", *self.slurmds]

    @property
    def slurmds(self) -> list[str]:
        """The daemons of the nodes."""
        return [f"slurmd-{node}" for node in self.settings.node_names]

    def process(self, name: str) -> Process | None:
        """The running daemon; also one whose start was cut short before it was written down."""
        file = self.dir / "run" / name
        process = processes.recall(file)
        if not process:
            mark = f"{MARK}={file}"
            for candidate in processes.everyone():
                # A step of slurmd has it too.
                if mark in processes.environment(candidate.pid) and "step" not in candidate.comm:
                    processes.remember(file, candidate.pid)
                    return candidate
        return process

    def command(self, name: str) -> list[str]:
        """How a daemon is started, in the foreground."""
        d = self.dir
        if name == "munged":
            return ["munged", "--foreground", f"--socket={d}/munge/socket", "--num-threads=10",
                    f"--key-file={d}/munge/key", f"--pid-file={d}/munge/pid",
                    f"--seed-file={d}/munge/seed", f"--log-file={d}/log/munged.log"]
        if name == "mariadbd":
            return ["mariadbd", f"--defaults-file={d}/etc/mariadb.cnf"]
        if name.startswith("slurmd-"):
            return ["slurmd", "-D", "-N", name.removeprefix("slurmd-")]
        return [name, "-D"]

    def start(self, *names: str) -> None:
        """Start those that do not run, side by side, and wait until each answers."""
        started = [name for name in names if not self.process(name)]
        for name in started:
            self.prepare(name)
            self.launch(name)
        for name in names:
            if name == "munged":
                self.wait(name, lambda: self.ok("munge", "-n", "-S", f"{self.dir}/munge/socket"))
            elif name == "mariadbd":
                self.wait(name, lambda: self.sql("create database if not exists slurm"))
            elif name == "slurmdbd":
                # A failed sacctmgr costs 2 s: try the port first.
                self.wait(name, lambda: listens(self.settings.port + 1))
                self.wait(name, lambda: self.ok("sacctmgr", "-n", "show", "cluster"))
            elif name == "slurmctld":
                self.wait(name, lambda: listens(self.settings.port) and self.ok("scontrol", "ping"))
                if name in started and any(map(self.process, self.slurmds)):
                    # Nodes that were there before are known at once, not after a few seconds, and
                    # read their configuration anew.
                    self.ok("scontrol", "reconfigure")

    def launch(self, name: str) -> None:
        """Start one and write down which process it is."""
        command = self.command(name)
        command[0] = find(command[0]) or command[0]
        # MYSQL_UNIX_PORT: slurmdbd has no setting for the socket of its database.
        mark = {MARK: f"{self.dir}/run/{name}"}
        env = {**self.env, "MYSQL_UNIX_PORT": f"{self.dir}/db/socket", **mark}
        with open(self.dir / f"log/{name}.out", "ab") as out:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                     cwd=self.dir, env=env, start_new_session=True)
        processes.remember(self.dir / "run" / name, child.pid)
        child.returncode = 0  # it outlives us: no warning when this object goes

    def prepare(self, name: str) -> None:
        """What has to be there, or must not be, before a daemon starts."""
        if name == "munged":
            for file in (self.dir / "munge").glob("socket*"):
                file.unlink()
        elif name == "mariadbd" and not (self.dir / "db/data").exists():
            fresh = self.dir / "db/data.new"  # renamed when whole: a crash in it does no harm
            shutil.rmtree(fresh, ignore_errors=True)
            done = self.call(
                "mariadb-install-db", "--no-defaults", f"--user={self.settings.user}",
                f"--datadir={fresh}", "--auth-root-authentication-method=socket",
                f"--auth-root-socket-user={self.settings.user}", "--skip-test-db",
                "--skip-name-resolve", "--innodb-log-file-size=16M", seconds=60)
            (self.dir / "log/mariadb-install.out").write_text(done.stdout + done.stderr)
            if done.returncode:
                raise self.failure("mariadb-install-db failed", "mariadb-install")
            fresh.rename(self.dir / "db/data")

    def stop(self, *names: str, number: int = signal.SIGTERM) -> None:
        """End daemons, side by side."""
        running = [p for p in map(self.process, names) if p]
        if number == signal.SIGKILL:
            for process in running:
                processes.send(process, number)
        processes.end(running)
        for name in names:
            (self.dir / "run" / name).unlink(missing_ok=True)

    def call(self, *command: str, seconds: float = 10) -> subprocess.CompletedProcess[str]:
        """Run a client of this testbed."""
        try:
            return subprocess.run([find(command[0]) or command[0], *command[1:]], env=self.env,
                                  stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  timeout=seconds, cwd="/")
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"{command[0]}: no answer")

    def ok(self, *command: str) -> bool:
        return self.call(*command).returncode == 0

    def sql(self, text: str) -> bool:
        return self.ok("mariadb", "--no-defaults", f"--user={self.settings.user}",
                       f"--socket={self.dir}/db/socket", "-e", text)

    def wait(self, name: str, ready: Callable[[], bool], seconds: float = 30) -> None:
        """Until it answers, or an error with the end of its log."""
        deadline = time.monotonic() + seconds
        while not ready():
            if not self.process(name):
                raise self.failure(f"{name} ended at its start", name)
            if time.monotonic() > deadline:
                raise self.failure(f"{name} does not answer after {seconds:.0f} s", name)
            time.sleep(0.05)

    def failure(self, what: str, name: str) -> Stop:
        """With the last lines of the daemon's own words."""
        logs = [self.dir / f"log/{name}{end}" for end in (".log", ".out")]
        lines = [line for log in logs if log.exists()
                 for line in log.read_text(errors="replace").splitlines()[-5:]]
        return Stop("\n  ".join([f"{what}; its log {self.dir}/log/{name}.* ends with:", *lines]))

    def node_states(self) -> dict[str, str]:
        """Name to state, with Slurm's mark (`down*`); empty if slurmctld does not answer."""
        if not self.process("slurmctld"):
            return {}  # sinfo would try for long
        done = self.call("sinfo", "-h", "-N", "-p", "all", "-o", "%N %T", seconds=5)
        return {} if done.returncode else dict(map(str.split, done.stdout.splitlines()))

    def wait_nodes(self, names: list[str], seconds: float = 30) -> None:
        """Until slurmctld counts on these nodes."""
        good = {"idle", "mixed", "allocated", "completing"}
        deadline = time.monotonic() + seconds
        while bad := [n for n in names if self.node_states().get(n) not in good]:
            if time.monotonic() > deadline or not self.process(f"slurmd-{bad[0]}"):
                state = self.node_states().get(bad[0], "unknown")
                raise self.failure(f"node {bad[0]} is {state}", f"slurmd-{bad[0]}")
            time.sleep(0.05)

    def of_jobs(self, node: str = "") -> list[Process]:
        """Steps and tasks of jobs, on one node or on all.

        A slurmstepd writes over its own environment: it is told by slurmd's log, which it holds
        open. A task is told by SLURM_CONF and the node's name in its environment, so that one which
        left its parents is found too; a shell that only uses the testbed has no such name.
        """
        log = f"{self.dir}/log/slurmd-{node}"
        conf = f"SLURM_CONF={self.settings.slurm_conf}"
        found = []
        for process in processes.everyone():
            if process.comm.startswith("slurmstepd"):
                mine = any(file.startswith(log) for file in processes.open_files(process.pid))
            else:
                env = processes.environment(process.pid)
                names = {e.partition("=")[2] for e in env if e.startswith("SLURMD_NODENAME=")}
                mine = conf in env and bool(names) and (not node or node in names)
            if mine:
                found.append(process)
        return processes.with_descendants(found)

    def kill_jobs(self, node: str = "") -> None:
        """Kill steps and tasks, and what they started while we looked."""
        for _ in range(50):
            found = self.of_jobs(node)
            if not found:
                return
            for process in found:
                processes.send(process, signal.SIGKILL)
            processes.wait_gone(found, 1)


def listens(port: int) -> bool:
    """Whether something takes connections on this port."""
    with socket.socket() as s:
        s.settimeout(1)
        return s.connect_ex(("127.0.0.1", port)) == 0
