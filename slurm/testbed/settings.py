"""What a testbed is: its directory, its ports and its dials, and the configuration made from them.

The settings lie in DIR/settings.json, so that `up` may be called again without repeating them; that
file is also how a directory is known to be a testbed. Daemons and processes are not known here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import shutil
import socket
import zlib
from pathlib import Path
from string import Template

HERE = Path(__file__).resolve().parent
LONGEST_DIR = 107 - len("/spool/127.0.1.10/127.0.1.10_4294967294.4294967294")
FIRST_PORT, LAST_PORT = 20000, 32000  # below the range that Linux gives to outgoing connections
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
}
ACCOUNTING_PACKAGES = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "accounting_storage_mysql.so": "slurm-wlm-mysql-plugin",
}


LIMITS = {
    "port": (1024, 65000),
    "nodes": (1, 40),
    "gpus": (1, 64),
    "grace_time": (0, 3600),
    "max_array_size": (2, 4000001),
    "min_job_age": (2, 86400),
    "requeue_wait": (2, 3600),
}


class Stop(Exception):
    """One line for the user: what, where, how to fix it."""

    exit_status = 1


class WrongUse(Stop):
    """The same for what was typed."""

    exit_status = 2


@dataclasses.dataclass(frozen=True)
class Settings:
    """The dials. Those of SHAPE hold until the testbed is down, the others may change any time."""

    port: int = 0
    """First of 10 + nodes ports; 0: chosen."""
    nodes: int = 4
    gpus: int = 8
    """Emulated GPUs a node."""
    accounting: bool = True
    """slurmdbd and MariaDB, so that sacct works."""
    grace_time: int = 0
    """GraceTime of partition `low`, seconds between the preemption's signal and the end."""
    preempt_signal: bool = False
    """preempt_send_user_signal: preemption sends the signal of `sbatch --signal` too."""
    max_array_size: int = 1001
    min_job_age: int = 300
    """Seconds until slurmctld forgets a finished job."""
    requeue_wait: int = 5
    """Seconds before a requeued job may start again (Slurm's own: 120), and a credential's life."""
    dir: Path = dataclasses.field(default=Path(), compare=False)

    SHAPE = ("port", "nodes", "gpus", "accounting")

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if not low <= value <= high and (name, value) != ("port", 0):
                option = "--" + name.replace("_", "-")
                raise WrongUse(f"{option} {value}; fix: a number from {low} to {high}")

    @property
    def node_names(self) -> list[str]:
        """Names that resolve everywhere: they are loopback addresses."""
        return [f"127.0.1.{i}" for i in range(1, self.nodes + 1)]

    @property
    def ports(self) -> dict[str, int]:
        """Port by daemon."""
        ports = {"slurmctld": self.port}
        if self.accounting:
            ports["slurmdbd"] = self.port + 1
        for i, node in enumerate(self.node_names):
            ports[f"slurmd-{node}"] = self.port + 10 + i
        return ports

    @property
    def slurm_conf(self) -> Path:
        return self.dir / "etc/slurm.conf"

    @property
    def user(self) -> str:
        return pwd.getpwuid(os.getuid()).pw_name


def load(directory: Path) -> Settings | None:
    """The settings of the testbed in this directory; None if there is none yet."""
    file = directory / "settings.json"
    check_directory(directory)
    if not file.exists():
        known = {"lock", "settings.new"}
        if directory.exists() and {p.name for p in directory.iterdir()} - known:
            raise Stop(f"{directory} holds something that is no testbed; fix: choose another --dir")
        return None
    try:
        return Settings(**json.loads(file.read_text()), dir=directory)
    except (ValueError, TypeError) as error:
        raise Stop(f"{file} cannot be read ({error}); fix: down with the version of testbed.py "
                   "that wrote it, then remove the directory") from None


def check_directory(directory: Path) -> None:
    """Refuse what the daemons would refuse with worse words."""
    if len(str(directory)) > LONGEST_DIR:
        raise WrongUse(f"{directory}: {len(str(directory))} characters are too many, sockets' "
                       f"paths leave {LONGEST_DIR}; fix: a shorter --dir, such as /tmp/testbed")
    if set(str(directory)) & set(" \t\n\"'#=,%$\\[]"):
        raise WrongUse(f"{directory}: slurm.conf cannot hold this name; fix: a plainer --dir")
    if directory.exists() and directory.stat().st_uid != os.getuid():
        owner = directory.stat().st_uid
        raise Stop(f"{directory} belongs to user {owner}; fix: be that user, or another --dir")
    for parent in directory.parents:
        if parent.exists():
            mode = parent.stat().st_mode
            if not mode & 0o001 or mode & 0o022 and not mode & 0o1000:
                raise Stop(f"{parent} has mode {mode & 0o7777:o}: munge needs folders that all may "
                           "pass and no other may write; fix: a --dir in /tmp")


def values(settings: Settings) -> dict[str, object]:
    """The dials as plain values."""
    return {k: v for k, v in dataclasses.asdict(settings).items() if k != "dir"}


def save(settings: Settings) -> None:
    """Whole or not at all."""
    draft = settings.dir / "settings.new"
    draft.write_text(json.dumps(values(settings), indent=2) + "\n")
    draft.replace(settings.dir / "settings.json")


def with_free_ports(settings: Settings, asked: bool) -> Settings:
    """A range that nobody uses: the one that was asked for, else the one it had, else a new one.

    The search begins at a place of its own for each directory, so that two testbeds which come up
    at the same moment do not choose the same.
    """
    width = 50
    if settings.port and (asked or all(map(is_free, settings.ports.values()))):
        candidates = [settings.port]
    else:
        ranges = (LAST_PORT - FIRST_PORT) // width
        first = zlib.crc32(str(settings.dir).encode()) % ranges
        candidates = [FIRST_PORT + (first + i) % ranges * width for i in range(ranges)]
    for port in candidates:
        settings = dataclasses.replace(settings, port=port)
        if all(map(is_free, settings.ports.values())):
            return settings
    taken = [port for port in settings.ports.values() if not is_free(port)]
    raise Stop(f"port {taken or settings.port} is in use; fix: another --port")


def is_free(port: int) -> bool:
    """Whether a daemon could listen there."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError:
            return False
        return True


def missing_packages(accounting: bool) -> list[str]:
    """Debian's names of what has to be installed."""
    wanted = {**PACKAGES, **(ACCOUNTING_PACKAGES if accounting else {})}
    return [package for name, package in wanted.items() if not find(name)]


def find(name: str) -> str | None:
    """A command, also where users' PATH does not look, or a plug-in of Slurm."""
    if name.endswith(".so"):
        places = [*Path("/usr").glob("lib*/slurm*"), *Path("/usr").glob("lib/*/slurm*")]
        return next((str(p / name) for p in places if (p / name).exists()), None)
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin")


def prepare_directory(s: Settings) -> None:
    """Folders, munge's key, what stands for the GPUs, and the program that takes mail."""
    s.dir.chmod(0o755)
    for name in ("etc", "run", "state", "log", "dev", "munge", "db"):
        (s.dir / name).mkdir(exist_ok=True)
    for node in s.node_names:
        (s.dir / "spool" / node).mkdir(parents=True, exist_ok=True)
    key = s.dir / "munge/key"
    if not key.exists():
        write(key, os.urandom(1024), mode=0o600)
    for i in range(s.gpus):  # a symlink: a plain file leaves CUDA_VISIBLE_DEVICES empty
        link = s.dir / f"dev/nvidia{i}"
        if not link.is_symlink():
            link.symlink_to("/dev/null")
    mail = f'#!/bin/sh\n{{ echo mail "$@"; cat; }} >>{s.dir}/log/mail\n'
    write(s.dir / "etc/mail", mail.encode(), mode=0o755)


def configuration(s: Settings) -> dict[Path, bytes]:
    """The files that the daemons read, by path."""
    accounting = {
        "AccountingStorageType": "accounting_storage/none",
        "JobAcctGatherType": "jobacct_gather/none",
    }
    if s.accounting:
        accounting = {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": "127.0.0.1",
            "AccountingStoragePort": s.port + 1,
            "AccountingStoragePass": f"{s.dir}/munge/socket",
            "AccountingStorageTRES": "gres/gpu",
            "JobAcctGatherType": "jobacct_gather/linux",
            "JobAcctGatherFrequency": "task=5",
        }
    fields = {
        **dataclasses.asdict(s),
        "host": socket.gethostname().split(".")[0],
        "user": s.user,
        "communication": communication(),
        "port_ctld": s.port,
        "port_dbd": s.port + 1,
        "nodes": f"127.0.1.[1-{s.nodes}]",
        "ports_slurmd": f"[{s.port + 10}-{s.port + 9 + s.nodes}]",
        "preempt_signal": "SlurmctldParameters=preempt_send_user_signal" * s.preempt_signal,
        "accounting": "\n".join(f"{key}={value}" for key, value in accounting.items()),
    }
    gres = f"Name=gpu Type=h200 File={s.dir}/dev/nvidia[0-{s.gpus - 1}] Flags=nvidia_gpu_env\n"
    files = {s.dir / "etc/gres.conf": gres.encode()}
    for name in ("slurm.conf", "slurmdbd.conf", "mariadb.cnf"):
        text = Template((HERE / f"{name}.in").read_text()).substitute(fields)
        files[s.dir / "etc" / name] = text.encode()
    return files


def communication() -> str:
    """The line of slurm.conf that keeps all ports on loopback, where Slurm can do that.

    It binds to all addresses or to that of the host's own name. If that name means 127.0.0.1, as in
    most containers, nothing can be reached from outside. Else munge's key is what keeps others out
    (with 127.0.1.1, as on Debian, srun would wait for nodes where they do not call).
    """
    try:
        local = socket.gethostbyname(socket.gethostname()) == "127.0.0.1"
    except OSError:
        local = False
    return "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny" if local else ""


def differs(files: dict[Path, bytes]) -> bool:
    """Whether any of these is not there as it should be."""
    return any(not file.exists() or file.read_bytes() != files[file] for file in files)


def write(file: Path, content: bytes, mode: int = 0o644) -> None:
    """Whole or not at all."""
    draft = file.with_name(file.name + ".new")
    draft.write_bytes(b"")
    draft.chmod(mode)
    draft.write_bytes(content)
    draft.replace(file)
