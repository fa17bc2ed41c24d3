"""The only place that calls Slurm's commands.

Every call has a time limit, an argv list (no shell) and an environment without what an enclosing
job or the user's settings would slip in: SBATCH_*, SQUEUE_*, SLURM_* change what commands do
(`SLURM_MEM_PER_CPU` of an interactive job makes its sbatch fail). SLURM_CONF stays: it says which
cluster. Output is read in our own format, never in the user's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from kimi_eagle.errors import RunError

SCRUBBED = ("SBATCH_", "SQUEUE_", "SALLOC_", "SRUN_", "SINFO_", "SCONTROL_", "SLURM_")
KEPT = frozenset({"SLURM_CONF", "SLURM_JWT", "SLURM_CONF_SERVER"})
CALL_SECONDS = 60.0
_SEARCH = ("resolve_ctls_from_dns_srv", "fetch_config", "_establish_config_source")
"""What commands say on their way to `Could not establish a configuration source`."""
_FIELDS = ("%i", "%F", "%K", "%T", "%r", "%N", "%S", "%M", "%j", "%k")


@dataclass(frozen=True)
class Queued:
    """One job or array task that Slurm has in its queue now."""

    id: str
    """`123`, or `123_4` for an array task."""
    array: str
    """`123`: what sbatch answered."""
    task: int
    name: str
    state: str
    """Slurm's word: PENDING, RUNNING, SUSPENDED, COMPLETING, ..."""
    reason: str
    nodes: str
    start: str
    elapsed: str
    comment: str

    @property
    def suffix(self) -> str:
        """The part of the name that never changes."""
        return self.name.rpartition("-")[2]


def clean_environment() -> dict[str, str]:
    """This process's environment without what would change Slurm's commands."""
    return {k: v for k, v in os.environ.items() if k in KEPT or not k.startswith(SCRUBBED)}


def call(argv: list[str], *, timeout: float = CALL_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands; its exit code is the caller's matter.

    RunError where the command is missing or does not answer in time.
    """
    if shutil.which(argv[0]) is None:
        raise RunError(
            f"{argv[0]} is not on this machine", fix="type this on a login node of the cluster"
        )
    conf = os.environ.get("SLURM_CONF")
    if conf and not os.path.isfile(conf):  # the commands would look for one on the network, 60 s
        raise RunError(f"SLURM_CONF names {conf}, which is not there", fix="unset SLURM_CONF")
    try:
        return subprocess.run(
            argv,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{argv[0]} did not answer within {timeout:.0f} s") from None


def queued(suffixes: Iterable[str] | None = None, *, ended: bool = False) -> list[Queued]:
    """My jobs that are not over, array tasks one by one; only those of these suffixes if given.

    ended: also jobs that are over, for as long as Slurm remembers them (MinJobAge).

    RunError with Slurm's words where the controller does not answer.
    """
    # The comment comes last: it is the one field that may hold the separator.
    argv = ["squeue", "--noheader", "--array", "--me", "--format", "|".join(_FIELDS)]
    done = call([*argv, "--states=all"] if ended else argv)
    if done.returncode:
        raise RunError(f"squeue: {said(done)}", fix="see whether sinfo answers, then try again")
    wanted = None if suffixes is None else set(suffixes)
    found = [_parse(line) for line in done.stdout.splitlines() if line.count("|") >= 9]
    return [job for job in found if wanted is None or job.suffix in wanted]


def _parse(line: str) -> Queued:
    ident, array, task, state, reason, nodes, start, elapsed, name, comment = line.split("|", 9)
    return Queued(
        id=ident,
        array=array,
        task=int(task) if task.isdigit() else 0,
        name=name,
        state=state,
        reason=reason,
        nodes=nodes,
        start=start,
        elapsed=elapsed,
        comment="" if comment == "(null)" else comment,
    )


def said(done: subprocess.CompletedProcess[str]) -> str:
    """What a command said about its failure, on one line, without `sbatch: error:` before it."""
    lines = (done.stderr or done.stdout or "").strip().splitlines()
    words = [re.sub(r"^(\w+: )?(error: |fatal: )*", "", x).strip() for x in lines if x.strip()]
    words = [x for x in words if not x.startswith(_SEARCH)]
    return "; ".join(words) or f"exit code {done.returncode}"
