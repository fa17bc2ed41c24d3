"""A job as sbatch text, rendered by submitit; `submit`, --dry-run, --emit and `slurm/` share it.

The text ends in `exec bash host.sh ...`: nothing of submitit or of our Python is needed on the
node. That is why `_submit_command` is used (submitit 1.5.4, core/core.py; its docstring allows a
plain command and warns that results are then not pickled) and not `submit`, whose job waits for a
pickle that is renamed only after sbatch has answered: a submit killed in between leaves a job that
can never start. tests/slurm_room/test_sbatch.py holds the golden texts.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.recipe import Recipe
from kimi_eagle.rundir import RunDir
from kimi_eagle.site import Site
from kimi_eagle.slurm.jobs import Job, whole_run

if TYPE_CHECKING:
    from submitit import SlurmExecutor

UNSAFE_IN_PATHS = frozenset("%\\'\"`$!\n\r\t\0")
"""Slurm replaces % in --output and has its own mind about quotes and backslashes."""


@dataclass(frozen=True)
class Words:
    """What differs between a submitted job and a file to submit by hand; parts are shell text."""

    run: str
    host: str
    log: str | None = None
    """--output, where submitit's own choice does not fit."""
    suffix: str | None = None
    """None: host.sh makes one from the job's id."""
    lines: tuple[str, ...] = ()
    """Shell lines before everything else."""
    recipe: str | None = None
    """Digest of the recipe that the job was submitted for; its stages refuse another."""


def host_script() -> Path:
    """host.sh of the checkout, or of the wheel."""
    here = Path(__file__).resolve()
    for path in (here.parents[3] / "slurm" / "host.sh", here.parents[1] / "_slurm" / "host.sh"):
        if path.is_file():
            return path
    raise RunError("slurm/host.sh is not part of this installation", where=here.parents[1])


def words_for(run: RunDir, suffix: str | None, recipe: str | None = None) -> Words:
    """The words of a job that `submit` hands to Slurm."""
    path = str(run.path)
    if not path.isprintable():
        raise UsageError(
            "the run directory's path holds what is no printable text",
            where=path.encode("utf-8", "backslashreplace").decode(),
            fix="choose another with --run DIR",
        )
    if bad := sorted(UNSAFE_IN_PATHS & set(path)):
        raise UsageError(
            f"the run directory's path holds {bad[0]!r}, which Slurm or a shell would change",
            where=path,
            fix="choose another with --run DIR",
        )
    return Words(
        run=shlex.quote(path),
        host=shlex.quote(str(run.slurm.host)),
        suffix=suffix,
        recipe=recipe,
    )


BY_HAND = Words(
    run='"$RUN"',
    host='"${KIMI_EAGLE_HOST:-host.sh}"',
    log="%x-%j.log",
    lines=("RUN=${1:?usage: sbatch FILE RUN}",),
)
"""A file to submit by hand: `sbatch FILE RUN`, in the folder where it and host.sh lie."""


def text(
    job: Job, recipe: Recipe, site: Site, words: Words, *, folder: Path, after: tuple[str, ...] = ()
) -> str:
    """The sbatch file of a job. after: ids of live jobs to wait for."""
    made = executor(job, recipe, site, words, folder=folder, after=after)
    return made._make_submission_file_text(command(job, recipe, site, words), "")


def all_texts(recipe: Recipe, site: Site, run: Path) -> list[tuple[str, str]]:
    """(file name, text) of every job that a submit of the whole recipe would send."""
    opened = RunDir(run)
    jobs = whole_run(recipe, site)
    folder = opened.slurm.log
    return [
        (job.file_name, text(job, recipe, site, words_for(opened, None), folder=folder))
        for group in jobs
        for job in group
    ]


def command(job: Job, recipe: Recipe, site: Site, words: Words) -> str:
    """The shell text that turns the batch script into its supervisor."""
    section, notify = recipe.slurm, recipe.notify
    options = [("--run", words.run)]
    if words.suffix:
        options.append(("--suffix", words.suffix))
    options += [
        ("--name", job.name),
        ("--role", job.role),
        ("--stages", ",".join(job.stages)),
        ("--gpus", str(job.gpus)),
        ("--grace", str(job.grace)),
        ("--attempts", str(section.max_attempts)),
    ]
    if section.max_gpu_hours is not None:
        options.append(("--hours", f"{section.max_gpu_hours:g}"))
    options += [("--notify", shlex.quote(word)) for word in notify.command]
    if notify.command:
        options.append(("--events", ",".join(notify.on)))
    lines = [f"    {name} {value} \\" for name, value in options]
    switches = [("--requeue", site.requeue), ("--rename", site.squeue_updates)]
    switches.append(("--final", job.final))
    if on := " ".join(name for name, wanted in switches if wanted):
        lines.append(f"    {on} \\")
    stage = f"bash {words.run}/start.sh stage @STAGE@ --run {words.run}"
    return "\n".join([f"exec bash {words.host} \\", *lines, f"    -- {stage}"])


def executor(
    job: Job,
    recipe: Recipe,
    site: Site,
    words: Words,
    *,
    folder: Path,
    after: tuple[str, ...] = (),
) -> SlurmExecutor:
    """submitit's executor with every directive of the job."""
    from submitit import SlurmExecutor

    class Here(SlurmExecutor):
        """Renders also where Slurm is not installed (--emit, --dry-run on a laptop)."""

        @classmethod
        def affinity(cls) -> int:
            return 2

    made = Here(folder=folder)
    made.update_parameters(**_parameters(job, recipe, site, words, after))
    if job.tasks > 1:
        # What submitit's own map_array does (slurm/slurm.py, _internal_process_submissions).
        made.parameters |= {"map_count": job.tasks, "array_parallelism": job.tasks}
    return made


def _parameters(
    job: Job, recipe: Recipe, site: Site, words: Words, after: tuple[str, ...]
) -> dict[str, Any]:
    """submitit's parameters, directive by directive."""
    place = site.cpu if job.gpus == 0 else site
    name = f"{job.name}-{words.suffix}" if words.suffix else job.name
    extra: dict[str, Any] = {
        "signal": f"B:USR2@{job.grace}",
        "kill-on-invalid-dep": "yes",
        ("requeue" if site.requeue else "no-requeue"): True,
    }
    if words.log:
        extra["output"] = words.log
    if site.reservation and job.gpus:
        extra["reservation"] = site.reservation
    cpus, memory = place.cpus or site.cpus, place.memory or site.memory
    if memory is not None:
        extra["mem"] = memory
    found = {
        "job_name": name,
        "time": job.minutes,
        "nodes": job.nodes,
        "partition": place.partition or site.partition,
        "account": place.account or site.account,
        "qos": place.qos or site.qos,
        "cpus_per_task": cpus,
        "exclusive": True if place.exclusive else None,
        "constraint": site.constraint if job.gpus else None,
        "ntasks_per_node": 1,
        "use_srun": False,
        "stderr_to_stdout": True,
        "wckey": None,
        "setup": _setup(site, words),
        "dependency": f"afterany:{':'.join(after)}" if after else None,
        **_mails(job, recipe),
    }
    kind = f"{site.gpu_type}:{job.gpus}" if site.gpu_type else str(job.gpus)
    if job.gpus and site.gpu_request == "gpus-per-node":
        extra["gpus-per-node"] = kind
    elif job.gpus and site.gpu_request == "gres":
        extra["gres"] = f"gpu:{kind}"
    for flag in site.extra:
        key, _, value = flag.removeprefix("--").partition("=")
        extra[key] = value if _ else True
    return {**found, "additional_parameters": extra}


def _mails(job: Job, recipe: Recipe) -> dict[str, Any]:
    """Slurm mails when a job fails (which a hold is, too) and when the last one ends."""
    notify = recipe.notify
    kinds = ["FAIL"] if {"failure", "hold"} & set(notify.on) else []
    kinds += ["END"] if "end" in notify.on and job.final else []
    if not notify.mail or not kinds:
        return {}
    return {"mail_user": notify.mail, "mail_type": ",".join(kinds)}


def _setup(site: Site, words: Words) -> list[str]:
    """Lines before host.sh; a preamble that fails must not be run over."""
    lines = list(words.lines)
    if site.preamble:
        # Preempted or timed out while the preamble runs: host.sh has to hear of it. Without a trap
        # the signal ends the job, which Slurm then counts as failed and does not start again.
        lines += ["trap 'export KIMI_EAGLE_ASKED=limit' USR2"]
        lines += ["set -e", *site.preamble, "set +e"]
    if site.network_interface:
        name = shlex.quote(site.network_interface)
        lines.append(f"export NCCL_SOCKET_IFNAME={name} GLOO_SOCKET_IFNAME={name}")
    if site.scratch:
        lines.append(f"export TMPDIR={shlex.quote(site.scratch)}")
    lines.append("export PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1")
    if words.recipe:
        lines.append(f"export KIMI_EAGLE_RECIPE={words.recipe}")
    return lines
