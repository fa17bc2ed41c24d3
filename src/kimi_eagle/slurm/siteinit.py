"""`site init`: a commented site file from what Slurm says of itself and of this user.

Asks scontrol, sinfo and, where accounting answers, sacctmgr; writes one file. Nothing that Slurm
prints is trusted: a value goes into the file only if `Site` takes it, the rest is told as a note.
What cannot be found out is said and left for the user; the file is right as far as it goes.
"""

from __future__ import annotations

import os
import pwd
import re
from dataclasses import dataclass, field
from pathlib import Path

from kimi_eagle import files
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.site import Site, minutes
from kimi_eagle.slurm import queue
from kimi_eagle.typed_toml import validated

DAY = 24 * 60
WORKED_ON = 8
"""GPUs that our jobs want on a node, unless the recipe says otherwise."""


@dataclass
class Nodes:
    """Nodes of one partition that are alike."""

    count: int = 0
    example: str = ""
    cpus: int = 0
    memory_mb: int = 0
    gpus: int = 0
    gpu_type: str = ""
    features: str = ""


@dataclass
class Partition:
    """One partition as sinfo shows it."""

    name: str
    max_minutes: int | None
    """None: no limit."""
    default: bool = False
    kinds: list[Nodes] = field(default_factory=list)

    @property
    def best(self) -> Nodes:
        """The nodes that most jobs will get: those with most GPUs, then the most of them."""
        return max(self.kinds, key=lambda k: (min(k.gpus, WORKED_ON), k.count))


@dataclass
class Cluster:
    """What could be found out."""

    config: dict[str, str] = field(default_factory=dict)
    partitions: list[Partition] = field(default_factory=list)
    partition_settings: dict[str, str] = field(default_factory=dict)
    accounts: list[str] = field(default_factory=list)
    qos: list[str] = field(default_factory=list)
    max_jobs: int | None = None
    unknown: list[str] = field(default_factory=list)
    """What could not be found out, a sentence each."""


def default_path() -> Path:
    """A file that its name finds: beside the recipes if there is such a folder, else at home."""
    name = configuration().get("ClusterName", "")
    here = Path("slurm/sites")
    folder = here if here.is_dir() else Path("~/.config/kimi-eagle/sites").expanduser()
    return folder / f"{name if _fits(name=name) else 'mycluster'}.toml"


def write_site(out: Path, partition: str | None, *, force: bool = False) -> tuple[Path, Cluster]:
    """Write a site file for this cluster; returns its path and what was found."""
    if not force and os.path.lexists(out):
        raise UsageError("exists already", where=out, fix="--force, or another --out FILE")
    seen = look(partition)
    text = render(seen, out.stem)
    out.parent.mkdir(parents=True, exist_ok=True)
    if force:
        files.write_atomic(out, text)
    elif not files.create_exclusive(out, text):
        raise UsageError("exists already", where=out, fix="--force, or another --out FILE")
    return out, seen


# -- asking Slurm --------------------------------------------------------------------------------


def look(partition: str | None = None) -> Cluster:
    """Ask Slurm. RunError where it does not answer at all; the rest becomes notes."""
    seen = Cluster(config=configuration())
    done = queue.call(["sinfo", "-h", "-N", "-o", "%P|%N|%c|%m|%l|%G|%f"])
    if done.returncode:
        raise RunError(f"sinfo: {queue.said(done)}")
    seen.partitions = partitions(done.stdout)
    if not seen.partitions:
        raise RunError("sinfo shows no partition", fix="ask which ones this user may use")
    chosen = _choose(seen.partitions, partition)
    seen.partitions.sort(key=lambda p: p is not chosen)
    seen.partition_settings = partition_settings(chosen.name)
    if not seen.partition_settings:
        seen.unknown.append(f"scontrol shows nothing of partition {chosen.name}: preemption")
    _usable_cpus(chosen.best)
    _associations(seen)
    return seen


def configuration() -> dict[str, str]:
    """`scontrol show config` as a dictionary."""
    done = queue.call(["scontrol", "show", "config"])
    if done.returncode:
        raise RunError(
            f"scontrol show config: {queue.said(done)}", fix="see whether sinfo answers here"
        )
    found = (re.match(r"(\w[\w/]*)\s*=\s?(.*)$", line) for line in done.stdout.splitlines())
    return {m[1]: m[2].strip() for m in found if m}


def partition_settings(name: str) -> dict[str, str]:
    """`scontrol show partition` as a dictionary; empty where it tells nothing."""
    done = queue.call(["scontrol", "-o", "show", "partition", name])
    return words(done.stdout) if done.returncode == 0 else {}


def words(text: str) -> dict[str, str]:
    """`Key=value Key=value ...` as a dictionary."""
    return dict(w.split("=", 1) for w in text.split() if "=" in w)


def partitions(text: str) -> list[Partition]:
    """sinfo's lines, one a node and partition: NAME*|NODE|CPUS|MEMORY|LIMIT|GRES|FEATURES."""
    found: dict[str, Partition] = {}
    kinds: dict[tuple[str, int, str, int, str], Nodes] = {}
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) != 7:
            continue
        name, node, cpus, memory, limit, gres, features = (p.strip() for p in parts)
        default, name = name.endswith("*"), name.removesuffix("*")
        if not _fits(partition=name):
            continue
        partition = found.setdefault(name, Partition(name, _limit(limit), default))
        kind, gpus = _gpus(gres)
        key = (name, gpus, kind, _number(cpus), features)
        if key not in kinds:
            kinds[key] = Nodes(0, node, _number(cpus), _number(memory), gpus, kind, features)
            partition.kinds.append(kinds[key])
        kinds[key].count += 1
        kinds[key].memory_mb = min(kinds[key].memory_mb, _number(memory))
    return list(found.values())


def _number(text: str) -> int:
    found = re.match(r"\d{1,12}", text)
    return int(found[0]) if found else 0


def _limit(text: str) -> int | None:
    try:
        return minutes(text)
    except UsageError:  # "infinite", "n/a"
        return None


def _gpus(gres: str) -> tuple[str, int]:
    """(type, number) of `gpu:h200:8(S:0-1),shard:h200:16`; the first kind of GPU counts."""
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        found = re.fullmatch(r"gpu(?::([^:,]+))?:(\d{1,4})", item.strip())
        if found:
            return found[1] or "", int(found[2])
    return "", 0


def _choose(found: list[Partition], wanted: str | None) -> Partition:
    if wanted is None:
        return max(found, key=lambda p: (min(p.best.gpus, WORKED_ON), p.default, p.best.count))
    for partition in found:
        if partition.name == wanted:
            return partition
    raise UsageError(
        f"no partition {wanted!r}", expected=f"one of {', '.join(p.name for p in found)}"
    )


def _usable_cpus(nodes: Nodes) -> None:
    """Cores kept for the system are in sinfo's count, but no job gets them."""
    done = queue.call(["scontrol", "-o", "show", "node", nodes.example])
    usable = _number(words(done.stdout).get("CPUEfctv", "")) if done.returncode == 0 else 0
    nodes.cpus = usable or nodes.cpus


def _associations(seen: Cluster) -> None:
    """Accounts, QOS and limits of this user, as far as accounting tells."""
    try:
        rows = associations()
        seen.accounts = sorted({a for a, _, _ in rows if a and _fits(account=a)})
        seen.qos = sorted({q for _, qos, _ in rows for q in qos if _fits(qos=q)})
        seen.max_jobs = submit_limit(rows, seen.qos[0] if len(seen.qos) == 1 else None)
    except RunError as e:
        seen.unknown.append(f"accounts, QOS and the limit of jobs: {e.what}")
        return
    if not rows:
        seen.unknown.append("accounts, QOS and the limit of jobs: accounting knows no such user")


def associations() -> list[tuple[str, list[str], int]]:
    """(account, QOS, MaxSubmitJobs or 0) of this user; RunError where accounting tells nothing."""
    user = pwd.getpwuid(os.getuid()).pw_name
    rows = _sacctmgr("assoc", "where", f"user={user}", "format=Account,QOS,MaxSubmitJobs")
    return [(a, [q for q in qos.split(",") if q], _number(most)) for a, qos, most in rows]


def submit_limit(rows: list[tuple[str, list[str], int]], qos: str | None) -> int | None:
    """Jobs that this user may have in the queue: the least of the associations and the QOS."""
    found = [most for _, _, most in rows if most]
    if qos:
        columns = "format=Name,MaxSubmitJobsPerUser,MaxSubmitJobsPerAccount"
        found += [
            _number(most)
            for name, *limits in _sacctmgr("qos", columns)
            for most in limits
            if name == qos and _number(most)
        ]
    return min(found, default=None)


def _sacctmgr(*what: str) -> list[list[str]]:
    done = queue.call(["sacctmgr", "-n", "-P", "show", *what], timeout=20)
    if done.returncode:
        raise RunError(f"sacctmgr: {queue.said(done)}")
    return [line.split("|") for line in done.stdout.splitlines() if line.count("|") == 2]


def _fits(**keys: object) -> bool:
    try:
        validated(Site, {"name": "x", **keys}, "")
    except UsageError:
        return False
    return True


# -- writing -------------------------------------------------------------------------------------


def render(seen: Cluster, name: str) -> str:
    """The site file's text; loading it again gives a valid site."""
    chosen, config = seen.partitions[0], seen.config
    cluster = config.get("ClusterName", "?")
    version = config.get("SLURM_VERSION", "?")
    lines = [
        f"# Site file of the cluster {_plain(cluster)} (Slurm {_plain(version)}), written by"
        " `kimi-eagle site init`.",
        "# Next: kimi-eagle site check FILE. Every key is explained in slurm/sites/example.toml.",
        *(f"# Not found out: {_plain(s)}." for s in seen.unknown),
        "",
    ]
    if not _fits(name=name):
        lines.append('name = "mycluster"')
    lines += _place(seen, chosen) + _resources(chosen) + _times(seen, chosen) + _limits(seen)
    lines += [
        "",
        "# -- what jobs run in: make it with `kimi-eagle image build` or `image import`",
        '# image = "/shared/images/kimi-eagle.sif"   # unset: this very Python, on every node',
    ]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Text from outside as part of a comment: one line, nothing that a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)[:200]


def _place(seen: Cluster, chosen: Partition) -> list[str]:
    lines = [f'partition = "{chosen.name}"']
    for other in seen.partitions[1:9]:
        best = other.best
        gpus = f"{best.gpus} {best.gpu_type or 'GPUs'}" if best.gpus else "no GPU"
        limit = f"{other.max_minutes} min" if other.max_minutes else "no limit"
        lines.append(f"#   also here: {other.name} ({_plain(gpus)} a node, {limit})")
    allowed = seen.partition_settings.get("AllowAccounts", "ALL")
    known = [a for a in seen.accounts if allowed == "ALL" or a in allowed.split(",")]
    if len(known) > 1:
        lines.append(f'account = "{known[0]}"   # or: {", ".join(known[1:9])}')
    elif known:
        lines.append(f'# account = "{known[0]}"   # yours, and the only one: need not be named')
    if seen.qos:
        lines.append(f'# qos = "{seen.qos[0]}"   # yours: {", ".join(seen.qos[:8])}')
    features = chosen.best.features.removeprefix("(null)").split(",")
    if features := [f for f in features if _fits(constraint=f)]:
        lines.append(f'# constraint = "{features[0]}"   # features: {", ".join(features[:8])}')
    return lines


def _resources(chosen: Partition) -> list[str]:
    nodes = chosen.best
    lines = [
        "",
        f"# -- nodes such as {_plain(nodes.example)}: {nodes.gpus} GPUs, {nodes.cpus} CPUs, "
        f"{nodes.memory_mb} MB",
    ]
    if nodes.gpus == 0:
        lines.append('gpu_request = "none"   # Slurm counts no GPUs here')
    else:
        lines.append('gpu_request = "gpus-per-node"')
        if nodes.gpus < WORKED_ON:
            lines.append(f"#   set [slurm] gpus = {nodes.gpus} in the recipe: nodes have no more")
        if nodes.gpu_type and _fits(gpu_type=nodes.gpu_type):
            only = len({k.gpu_type for k in chosen.kinds if k.gpus}) == 1
            said = "# " if only else ""
            why = "   # the only type here: need not be named" if only else ""
            lines.append(f'{said}gpu_type = "{nodes.gpu_type}"{why}')
    if nodes.cpus:
        lines.append(f"cpus = {nodes.cpus}")
    lines.append('memory = "0"   # all of the node')
    lines.append(f"exclusive = {'false' if nodes.gpus else 'true'}")
    return lines


def _times(seen: Cluster, chosen: Partition) -> list[str]:
    most = chosen.max_minutes
    limit = min(DAY, most or DAY)
    said = f"{most} min at most here" if most else "no limit here"
    grace = max(1, min(300, limit * 60 // 4))
    return [
        "",
        f'time = "{limit // 60:02d}:{limit % 60:02d}:00"   # {said}',
        f"grace_seconds = {grace}",
        *_preemption(seen),
    ]


def _preemption(seen: Cluster) -> list[str]:
    kind = seen.config.get("PreemptType", "")
    mode = seen.partition_settings.get("PreemptMode", seen.config.get("PreemptMode", "OFF"))
    if kind in ("", "(null)", "preempt/none") or mode == "OFF":
        return ["#   no preemption in this partition"]
    grace = seen.partition_settings.get("GraceTime", "0")
    signal = "preempt_send_user_signal" in seen.config.get("SlurmctldParameters", "")
    return [
        f"#   preemption: {_plain(mode)} after GraceTime = {_number(grace)} s, our signal is"
        f" {'sent' if signal else 'not sent (no preempt_send_user_signal)'}"
    ]


def _limits(seen: Cluster) -> list[str]:
    lines = ["", "# -- limits of this cluster"]
    if most := _number(seen.config.get("MaxArraySize", "")):
        lines.append(f"max_array = {most}")
    elif "MaxArraySize" in seen.config:
        lines.append("max_array = 1   # arrays are switched off here")
    if seen.max_jobs:
        lines.append(f"max_jobs = {seen.max_jobs}")
    mode = seen.partition_settings.get("PreemptMode", "")
    lines.append("requeue = true")
    if seen.config.get("JobRequeue") == "0":
        lines.append("#   JobRequeue = 0: only jobs that ask for it are requeued, and ours ask")
    if mode == "CANCEL":
        lines.append("chain = 2   # preempted jobs are cancelled here: others stand ready")
    return lines
