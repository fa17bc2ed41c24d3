"""`site check`: would this cluster take the jobs, and has it room for the run?

Renders every job that `submit` would send and hands each to `sbatch --test-only`, which queues
nothing. A refusal is shown in Slurm's words with the key of the site file to change; where Slurm's
words fit several keys, the job is tried again without each of them. What only a compute node can
tell (driver, image, scontrol there) is said to run later.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from kimi_eagle.errors import KimiEagleError, RunError
from kimi_eagle.recipe import Recipe, parse
from kimi_eagle.site import CpuSection, Site, minutes
from kimi_eagle.slurm import queue, siteinit
from kimi_eagle.slurm.jobs import SLURM_MAX_ARRAY
from kimi_eagle.slurm.sitetools import Check, tools

LEAST_GIB, LEAST_FILES = 10, 10_000
"""Free space and inodes below which even a small run fails."""

_OPTIONS = {
    "partition": ("partition",),
    "account": ("account",),
    "qos": ("qos",),
    "reservation": ("reservation",),
    "constraint": ("constraint",),
    "gpu_request": ("gpus-per-node", "gres"),
    "cpus": ("cpus-per-task",),
    "memory": ("mem",),
    "time": ("time",),
}
"""The sbatch options that come from a key: left out to see whether the key is to blame."""

_REFUSALS = (
    (r"submit limit|policy", ("max_jobs", "time", "qos", "account")),
    (r"time limit|--time spec", ("time",)),
    (r"account/partition|account or partition", ("account", "partition")),
    (r"account", ("account",)),
    (r"qos", ("qos",)),
    (r"reservation", ("reservation",)),
    (r"feature|constraint", ("constraint",)),
    (r"array", ("max_array",)),
    (r"node configuration", ("gpu_request", "cpus", "memory", "constraint", "partition")),
    (r"partition", ("partition",)),
    (r"processors|cpu count|cores", ("cpus",)),
    (r"memory", ("memory",)),
    (r"gres|gpu|tres", ("gpu_request",)),
    (r"node count", ("nodes",)),
    (r"option|node name|license|switch", ("extra",)),
)
"""Slurm's words (22.05 to 24.11, slurm_errno.c) and the keys that they may mean."""

_ADVICE = {
    "gpu_request": "gpu_request or gpu_type; [slurm] gpus in the recipe says how many",
    "nodes": "partition; [slurm] nodes in the recipe says how many",
    "time": "time or times",
}


def check_site(site: Site, recipe: Recipe | None, run: Path) -> list[Check]:
    """Every check that can run here and now; what fails to run becomes a line of its own."""
    try:
        config = siteinit.configuration()
    except RunError as e:
        return [Check("Slurm answers", "problem", e.what), *_room(site, run), *tools(site)]
    found = [Check("Slurm answers", "ok", f"version {config.get('SLURM_VERSION', '?')}")]
    parts: list[tuple[str, Callable[[], list[Check]]]] = [
        ("queue", _queue),
        ("jobs", lambda: _jobs(site, recipe, run)),
        ("partition", lambda: _partitions(site, config)),
        ("array size", lambda: _arrays(site, config)),
        ("jobs in the queue", lambda: _job_limit(site)),
        ("requeue", lambda: _requeue(site, config)),
    ]
    for name, part in parts:
        try:
            found += part()
        except KimiEagleError as e:
            found.append(Check(name, "problem", e.line()))
    return [*found, *_room(site, run), *tools(site)]


def _queue() -> list[Check]:
    mine = len(queue.queued())
    return [Check("queue", "ok", f"squeue answers; {mine} job{'s' * (mine != 1)} of yours in it")]


# -- the jobs themselves --------------------------------------------------------------------------


def _jobs(site: Site, recipe: Recipe | None, run: Path) -> list[Check]:
    from kimi_eagle.slurm.sbatch import all_texts

    found = []
    with tempfile.TemporaryDirectory(prefix="kimi-eagle-") as folder:
        for name, text in all_texts(recipe or one_of_each(site), site, run):
            path = Path(folder) / name
            path.write_text(text, encoding="utf-8")
            found.append(_job(site, path, text))
    return found


def one_of_each(site: Site) -> Recipe:
    """A recipe with a job of each kind: canary, array, single, and on CPUs if the site says how."""
    on_cpu = site.cpu != CpuSection()
    groups = [["regenerate", "prepare"], ["extract", "vocab"], ["train", "benchmark"]]
    if on_cpu:
        groups = [["regenerate"], ["prepare"], ["extract"], ["vocab"], ["train", "benchmark"]]
    data = {
        "name": "site-check",
        "verifier": {"path": "model"},
        "sources": [{"path": "prompts.jsonl"}],
        "extract": {"layers": [2, 4]},
        "vocab": {"draft_vocab_size": 16},
        "benchmark": {"prompts": "heldout.jsonl"},
        "slurm": {
            "groups": groups,
            "workers": 3,
            "cpu_stages": ["prepare", "vocab"] if on_cpu else [],
        },
    }
    return parse(data, where="site check", base=Path("/"))


def _job(site: Site, path: Path, text: str) -> Check:
    name = f"job {path.stem}"
    shell = subprocess.run(
        ["bash", "-n", str(path)], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if shell.returncode:
        said = " ".join(shell.stderr.replace(f"{path}: ", "").split())
        return Check(name, "problem", f"not shell: {said}", "preamble")
    done = queue.call(["sbatch", "--test-only", str(path)])
    if done.returncode == 0:
        words = r"to start at (\S+) using (\d+) processors on nodes (\S+)(?: in partition (\S+))?"
        when = re.search(words, done.stderr)
        told = f": {when[2]} CPUs in {when[4]}, could start at {when[1]}" if when else ""
        return Check(name, "ok", f"Slurm takes it{told}")
    said = queue.said(done)
    keys = keys_for(said)
    if len(keys) > 1:
        keys = tuple(k for k in keys if _taken_without(k, path, text)) or keys
    return Check(name, "problem", said, ", ".join(_advice(site, k, text) for k in keys))


def keys_for(said: str) -> tuple[str, ...]:
    """Keys that Slurm's words may mean; none where they mean none."""
    return next((keys for words, keys in _REFUSALS if re.search(words, said, re.I)), ())


def _taken_without(key: str, path: Path, text: str) -> bool:
    options = "|".join(_OPTIONS.get(key, ()))
    less = re.sub(rf"(?m)^#SBATCH --({options})(=.*)?\n", "", text) if options else text
    if less == text:
        return False
    trial = path.with_suffix(".trial")
    trial.write_text(less, encoding="utf-8")
    return queue.call(["sbatch", "--test-only", str(trial)]).returncode == 0


def _advice(site: Site, key: str, text: str) -> str:
    """The key as it stands in the file: under [cpu] for a job without GPUs that has it there."""
    on_cpu = re.search(r"(?m)^ *--gpus 0 ", text) is not None
    own = key in CpuSection.model_fields and getattr(site.cpu, key, None) not in (None, False)
    if on_cpu and (own or key in ("cpus", "memory")):
        return f"[cpu] {key}"
    return _ADVICE.get(key, key)


# -- limits ----------------------------------------------------------------------------------------


def _partitions(site: Site, config: dict[str, str]) -> list[Check]:
    """State, time limit and preemption of each partition that jobs may go to."""
    names = [n for text in (site.partition, site.cpu.partition) if text for n in text.split(",")]
    if not names:
        return [Check("partition", "unknown", "the site names none: Slurm's default is taken")]
    found = []
    for name in dict.fromkeys(names):
        settings = siteinit.partition_settings(name)
        if not settings:
            found.append(Check(f"partition {name}", "problem", "not known to Slurm", "partition"))
            continue
        found.append(_partition(name, settings, site))
        if said := _preemption(name, settings, config, site):
            found.append(said)
    return found


def _partition(name: str, settings: dict[str, str], site: Site) -> Check:
    what, state = f"partition {name}", settings.get("State", "?")
    if state != "UP":
        return Check(what, "problem", f"its state is {state}: jobs will not start", "partition")
    try:
        most = minutes(settings.get("MaxTime", ""))
    except KimiEagleError:  # UNLIMITED
        return Check(what, "ok", "up; no time limit")
    # Without EnforcePartLimits, sbatch takes a job that is too long and lets it wait for ever.
    limits = {"time": site.time, **{f"times.{k}": v for k, v in site.times.items()}}
    for key, text in limits.items():
        if minutes(text) > most and name == site.partition and not _on_cpu(key, site):
            told = f"{key} = {text!r} is longer than its MaxTime {settings['MaxTime']}"
            return Check(what, "problem", told, key)
    return Check(what, "ok", f"up; MaxTime {settings['MaxTime']}")


def _on_cpu(key: str, site: Site) -> bool:
    return site.cpu.partition is not None and key in ("times.prepare", "times.vocab")


def _preemption(
    name: str, settings: dict[str, str], config: dict[str, str], site: Site
) -> Check | None:
    kind = config.get("PreemptType", "")
    mode = settings.get("PreemptMode", "OFF")
    if kind in ("", "(null)", "preempt/none") or mode == "OFF":
        return None
    what = f"preemption in {name}"
    if mode == "CANCEL" and site.chain == 0:
        told = "preempted jobs are cancelled here, and nobody takes over"
        return Check(what, "problem", told, "chain")
    grace, wait = settings.get("GraceTime", "0"), config.get("KillWait", "?")
    told = f"{mode}, GraceTime {grace} s, KillWait {wait}"
    if int(grace) < site.grace_seconds if grace.isdigit() else True:
        told += f": less than grace_seconds = {site.grace_seconds}, a unit may be dropped"
    return Check(what, "ok", told)


def _arrays(site: Site, config: dict[str, str]) -> list[Check]:
    text = config.get("MaxArraySize", "")
    if not text.isdigit():
        return [Check("array size", "unknown", "Slurm does not tell MaxArraySize")]
    ours, most = site.max_array or SLURM_MAX_ARRAY, int(text)
    if ours > max(1, most):
        told = f"MaxArraySize is {most}; max_array is {site.max_array or f'unset, so {ours}'}"
        return [Check("array size", "problem", told, "max_array")]
    return [Check("array size", "ok", f"max_array {ours}, MaxArraySize {most}")]


def _job_limit(site: Site) -> list[Check]:
    what = "jobs in the queue"
    try:
        rows = siteinit.associations()
        known = {q for _, qos, _ in rows for q in qos}
        qos = site.qos or (known.pop() if len(known) == 1 else None)
        most = siteinit.submit_limit(rows, qos)
    except RunError as e:
        return [Check(what, "unknown", f"accounting does not tell: {e.what}")]
    if most is None:
        return [Check(what, "ok", "accounting names no limit for you")]
    if site.max_jobs is None or site.max_jobs > most:
        told = f"you may have {most}; max_jobs is {site.max_jobs or 'unset'}"
        return [Check(what, "problem", told, "max_jobs")]
    return [Check(what, "ok", f"max_jobs {site.max_jobs}, you may have {most}")]


def _requeue(site: Site, config: dict[str, str]) -> list[Check]:
    if not site.requeue:
        chain = f"{site.chain} follow-up jobs take over" if site.chain else "submit again then"
        return [Check("requeue", "ok", f"not used: at the time limit a job ends; {chain}")]
    own = "by default" if config.get("JobRequeue") == "1" else "for jobs that ask, as ours do"
    told = f"allowed {own}; whether scontrol is on the nodes too: runs later, in the job"
    return [Check("requeue", "ok", told)]


# -- room ------------------------------------------------------------------------------------------


def _room(site: Site, run: Path) -> list[Check]:
    """Free space, inodes and quota under the run directory and scratch."""
    found = [_free("run directory", run), *_quota(run)]
    if site.scratch:
        if Path(site.scratch).is_dir():
            found.append(_free("scratch", Path(site.scratch), "scratch"))
        else:
            told = f"{site.scratch} is not on this machine; runs later, in the job"
            found.append(Check("scratch", "unknown", told))
    away = [m for m in site.mounts if not Path(m.split(":")[0]).exists()]
    if away:
        told = f"not on this machine: {', '.join(away)}; runs later, in the job"
        found.append(Check("mounts", "unknown", told, "mounts"))
    return found


def _free(name: str, path: Path, key: str = "") -> Check:
    there = next(p for p in (path, *path.parents) if p.exists())
    try:
        stat = os.statvfs(there)
    except OSError as e:
        return Check(name, "unknown", f"{there}: {e.strerror}")
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(name, "problem", f"{there} may not be written", key or "--run DIR")
    gib = stat.f_bavail * stat.f_frsize / 2**30
    inodes = f"{stat.f_favail:,} files" if stat.f_files else "no limit of files"
    told = f"{there}: {gib:,.0f} GiB and {inodes} free"
    short = gib < LEAST_GIB or (stat.f_files and stat.f_favail < LEAST_FILES)
    return Check(name, "problem" if short else "ok", told, (key or "--run DIR") if short else "")


def _quota(run: Path) -> list[Check]:
    """What the quota commands say, where they are installed."""
    there = next(p for p in (run, *run.parents) if p.exists())
    user = pwd.getpwuid(os.getuid()).pw_name
    commands = {"lfs": ["lfs", "quota", "-q", "-u", user, str(there)], "quota": ["quota", "-q"]}
    found = []
    for name, argv in commands.items():
        if shutil.which(name) is None:
            continue
        try:
            done = queue.call(argv, timeout=20)
        except RunError as e:
            found.append(Check("quota", "unknown", e.what))
            continue
        said = " ".join(done.stdout.split())[:200]
        # lfs marks what is over its limit with a star; `quota -q` speaks only then.
        if name == "lfs" and done.returncode:
            continue  # not Lustre
        over = "*" in said if name == "lfs" else bool(said)
        told = f"{' '.join(argv)}: {said or 'nothing over its limit'}"
        found.append(Check("quota", "problem" if over else "ok", told, "--run DIR" if over else ""))
    return found or [Check("quota", "unknown", "no quota command on this machine")]
