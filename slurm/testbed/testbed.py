#!/usr/bin/env python3
"""A real Slurm on one machine: 4 nodes with 8 emulated GPUs each, without root, systemd or cluster.

README.md beside this file tells what it gives. `up` may be called at any time, in any state that a
crash or a reboot left, and makes it whole. Needs Python 3.9 and its standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also under PYTHONSAFEPATH

import settings as settings_module  # noqa: E402
from daemons import Testbed  # noqa: E402
from settings import Settings, Stop, WrongUse  # noqa: E402


def up(directory: Path, wishes: dict[str, object]) -> None:
    """Bring it up, or change its dials."""
    saved = settings_module.load(directory)
    before = saved or Settings(dir=directory)
    after = dataclasses.replace(before, **wishes)
    install(settings_module.missing_packages(after.accounting))
    if saved and any(Testbed(saved).process(name) for name in Testbed(saved).names):
        for key in Settings.SHAPE:
            if getattr(before, key) != getattr(after, key):
                raise Stop(f"{directory} runs with {key} = {getattr(before, key)}; "
                           "fix: testbed.py down, then up")
    else:
        after = settings_module.with_free_ports(after, asked="port" in wishes)
    settings_module.save(after)
    settings_module.prepare_directory(after)
    bed = Testbed(after)
    files = settings_module.configuration(after)
    if settings_module.differs(files):
        # They read some of it at their start only. Stopped first: an `up` that is cut short here
        # leaves nothing that runs with the old files beside the new.
        bed.stop("slurmctld", "slurmdbd")
        for file, content in files.items():
            mode = 0o600 if file.name == "slurmdbd.conf" else 0o644  # slurmdbd insists
            settings_module.write(file, content, mode)
    for name in bed.names[: -len(bed.slurmds)]:
        bed.start(name)
    bed.start(*bed.slurmds)
    bed.wait_nodes(after.node_names)


def install(packages: list[str]) -> None:
    """As root with apt-get; for a user one line to type."""
    if not packages:
        return
    names = " ".join(packages)
    if not shutil.which("apt-get"):
        raise Stop(f"missing: {names} (Debian's names); fix: install them")
    if os.getuid() != 0:
        raise Stop(f"missing system packages; fix: sudo apt-get install {names}")
    print(f"testbed: installing with apt-get: {names}", file=sys.stderr)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    for step in (["apt-get", "update", "-qq"], command):
        done = subprocess.run(step, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        tail = "\n  ".join(done.stdout.splitlines()[-5:])
        raise Stop(f"apt-get install {names} failed:\n  {tail}")


def existing(directory: Path) -> Testbed:
    saved = settings_module.load(directory)
    if not saved:
        raise Stop(f"no testbed in {directory}; fix: testbed.py up --dir {directory}")
    return Testbed(saved)


def down(directory: Path) -> None:
    """End all of it and nothing else."""
    saved = settings_module.load(directory)
    if not saved:
        return
    bed = Testbed(saved)
    if bed.process("slurmctld"):
        jobs = bed.call("squeue", "-h", "-o", "%A", seconds=5).stdout.split()
        if jobs:  # so that accounting sees their end
            bed.call("scancel", *sorted(set(jobs)))
            deadline = time.monotonic() + 5
            while bed.call("squeue", "-h", seconds=5).stdout and time.monotonic() < deadline:
                time.sleep(0.1)
    bed.stop(*bed.slurmds, "slurmctld")
    bed.kill_jobs()
    bed.stop("slurmdbd")
    bed.stop("mariadbd", "munged")


def wipe(directory: Path) -> None:
    """Down, and remove the directory."""
    if directory.exists():
        down(directory)
        shutil.rmtree(directory)


def status(directory: Path, as_json: bool) -> int:
    """Say how it is; 0 if all runs."""
    bed = existing(directory)
    daemons = {name: bed.process(name) for name in bed.names}
    nodes = bed.node_states() if daemons["slurmctld"] else {}
    ports = bed.settings.ports
    well = all(daemons.values()) and all(
        nodes.get(n, "none").rstrip("+") in ("idle", "mixed", "allocated", "completing")
        for n in bed.settings.node_names)
    if as_json:
        print(json.dumps({
            "ok": well, "dir": str(directory), "slurm_conf": str(bed.settings.slurm_conf),
            "settings": settings_module.values(bed.settings),
            "daemons": {n: {"pid": p.pid if p else None, "port": ports.get(n)}
                        for n, p in daemons.items()},
            "nodes": nodes,
        }))
        return 0 if well else 1
    for name, process in daemons.items():
        what = f"runs, process {process.pid}" if process else "does not run"
        port = f", port {ports[name]}" if name in ports else ""
        state = f", node {nodes.get(name[7:], 'unknown')}" if name.startswith("slurmd-") else ""
        print(f"{name:18} {what}{port}{state}")
    if not well:
        print(f"fix: testbed.py up --dir {directory}")
    return 0 if well else 1


def kill_node(bed: Testbed, node: str, seen: bool) -> None:
    """What a power cut does: nothing of the node is left to tell."""
    bed.stop(f"slurmd-{node}", number=signal.SIGKILL)
    bed.kill_jobs(node)
    if seen:
        bed.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=kill-node")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="testbed.py", description=__doc__.splitlines()[0])
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    default = os.environ.get("KIMI_EAGLE_TESTBED_DIR", f"/tmp/kimi-eagle-testbed-{os.getuid()}")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--dir", default=default, help="where it lies (default: %(default)s)")
        return command

    d = Settings()
    command = add("up", "start it, mend it, or change what runs; what is not named stays as it is")
    command.add_argument("--port", type=int, help="first of its ports (default: a free range)")
    command.add_argument("--nodes", type=int, help=f"number of nodes (default: {d.nodes})")
    command.add_argument("--gpus", type=int, help=f"GPUs a node (default: {d.gpus})")
    command.add_argument("--accounting", action=argparse.BooleanOptionalAction,
                         help="slurmdbd and MariaDB (default: on)")
    command.add_argument("--grace-time", type=int, metavar="S", help="GraceTime of partition low "
                         f"(default: {d.grace_time}, as in Slurm)")
    command.add_argument("--preempt-signal", action=argparse.BooleanOptionalAction,
                         help="preempt_send_user_signal (default: off, as in Slurm)")
    command.add_argument("--max-array-size", type=int, help=f"(default: {d.max_array_size})")
    command.add_argument("--min-job-age", type=int, metavar="S", help="until a finished job is "
                         f"forgotten (default: {d.min_job_age})")
    command.add_argument("--requeue-wait", type=int, metavar="S", help="until a requeued job may "
                         f"start again (default: {d.requeue_wait}; Slurm's own is 120)")
    add("down", "cancel all jobs and end all daemons; data stays")
    command = add("status", "what runs; exit status 0 if all does, else 1")
    command.add_argument("--json", action="store_true", help="for programs")
    add("env", "print the line that makes a shell use it: eval $(testbed.py env)")
    add("wipe", "down, and remove its directory")
    for name, text in FAULTS.items():
        command = add(name, text)
        if name.endswith("-node"):
            command.add_argument("node", help="1 to the number of nodes, or its name")
        if name == "kill-node":
            command.add_argument("--seen", action="store_true", help="tell slurmctld too, which "
                                 "finds it by itself after some 30 s")
    return top


FAULTS = {
    "kill-node": "fault: kill slurmd, steps and tasks of a node",
    "start-node": "bring a node back",
    "stop-ctld": "fault: slurmctld ends",
    "kill-ctld": "fault: slurmctld is killed",
    "start-ctld": "start slurmctld",
    "restart-ctld": "stop and start slurmctld",
    "stop-dbd": "fault: accounting (slurmdbd) ends",
    "start-dbd": "start slurmdbd",
}


def fault(bed: Testbed, name: str, node: str | None = None, seen: bool = False) -> None:
    """The commands of FAULTS."""
    if node is not None:
        node = node if "." in node else f"127.0.1.{node}"
        if node not in bed.settings.node_names:
            raise WrongUse(f"no node {node}; fix: one of {', '.join(bed.settings.node_names)}")
        if name == "kill-node":
            return kill_node(bed, node, seen)
        bed.start(f"slurmd-{node}")
        return bed.wait_nodes([node])
    verb, _, short = name.partition("-")
    daemon = f"slurm{short}"
    if daemon not in bed.names:
        raise Stop(f"{bed.dir} has no accounting")
    if verb != "start":
        bed.stop(daemon, number=signal.SIGKILL if verb == "kill" else signal.SIGTERM)
    if verb in ("start", "restart"):
        bed.start(daemon)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """One command at a time; if it was `wipe` that we waited for, begin in a new directory."""
    while True:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        with open(directory / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                same = os.path.samestat(os.fstat(lock.fileno()), os.stat(directory / "lock"))
            except FileNotFoundError:
                same = False
            if same:
                yield
                return


def main() -> int:
    os.umask(0o022)
    arguments = vars(parser().parse_args())
    command = arguments.pop("command")
    directory = Path(os.path.realpath(arguments.pop("dir")))
    try:
        if command == "env":
            print(f"export SLURM_CONF={shlex.quote(str(existing(directory).settings.slurm_conf))}")
            return 0
        if command == "status":
            return status(directory, arguments["json"])
        wishes = {k: v for k, v in arguments.items() if v is not None}
        found = settings_module.load(directory)  # refuses before anything is touched
        if command == "up":
            dataclasses.replace(found or Settings(), **wishes)
        if command != "up" and not (found or directory.exists()):
            if command in ("down", "wipe"):
                return 0
            existing(directory)
        with locked(directory):
            if command == "up":
                up(directory, wishes)
            elif command == "down":
                down(directory)
            elif command == "wipe":
                wipe(directory)
            else:
                fault(existing(directory), command, **arguments)
    except (Stop, OSError) as error:
        print(f"testbed: error: {error}", file=sys.stderr)
        return getattr(error, "exit_status", 1)
    except KeyboardInterrupt:
        print("testbed: interrupted; fix: the same command again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
