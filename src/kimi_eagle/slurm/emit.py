"""The same jobs as files: --dry-run prints them, --emit writes them to be submitted by hand.

`slurm/*.sbatch` and `slurm/submit.sh` of the checkout are what `emit` writes for
jobs/kimi-k2.5.toml on the example site; a test compares them.
"""

from __future__ import annotations

from pathlib import Path

from kimi_eagle import files
from kimi_eagle.errors import UsageError
from kimi_eagle.recipe import Recipe
from kimi_eagle.rundir import RunDir
from kimi_eagle.site import Site
from kimi_eagle.slurm.jobs import Job, whole_run
from kimi_eagle.slurm.sbatch import BY_HAND, host_script, text, words_for

SUBMIT_HEAD = """#!/bin/bash
# Submits the files beside it in order, each behind the jobs it needs: bash submit.sh RUN
# RUN is a run directory: kimi-eagle submit RECIPE --site SITE --run RUN --emit DIR makes it.
set -euo pipefail
run=$(realpath "${1:?usage: bash submit.sh RUN}")
[ -f "$run/run.json" ] || { echo "submit.sh: no run in $run (no run.json)" >&2; exit 2; }
cd "$(dirname "$0")"
mkdir -p "$run"/slurm/{jobs,log}
digits=$(printf %s "$run" | sha256sum | cut -c1-6) # by which a run knows its jobs in squeue
lock=$run/slurm/submit.lock                        # that of kimi-eagle submit
me=$(printf '{"host":"%s","boot":"%s","pid_namespace":"%s","pid":%s,"pid_started":"%s"}' \\
    "$(hostname)" "$(cat /proc/sys/kernel/random/boot_id)" "$(readlink /proc/self/ns/pid)" $$ \\
    "$(sed 's/.*) //' /proc/$$/stat | cut -d' ' -f20)")
(set -o noclobber; echo "$me" >"$lock") 2>/dev/null ||
    { echo "submit.sh: another command is at work ($lock)" >&2; exit 1; }
sent=() suffix=''
finish() { # half a run helps nobody: take back what was sent, heard of or not
    [ "$1" = 0 ] || [ -z "$suffix" ] ||
        sent+=($(squeue --noheader --me --format='%A %j' | sed -n "s/ .*-$suffix\$//p" || true))
    [ "$1" = 0 ] || [ ${#sent[@]} = 0 ] || scancel "${sent[@]}"
    rm -f "$lock"
}
trap 'finish $?' EXIT
queued=$(squeue --noheader --me --format=%j)
if grep -Eq -- "-$digits[0-9a-f]{4}$" <<<"$queued"; then
    echo "submit.sh: jobs of $run are in the queue" >&2
    exit 1
fi
upstream=''
job() { # FILE NAME DEPENDENCY WHAT: sets id and suffix
    suffix=$digits$(od -An -N2 -tx1 /dev/urandom | tr -dc 0-9a-f)
    id=$(sbatch --parsable --job-name="$2-$suffix" ${3:+--dependency=afterany$3} \\
        --output="$run/slurm/log/%x-%j.log" "$1" "$run")
    id=${id%%;*}
    sent+=("$id")
    echo "$id $4"
}
"""


def dry_run(
    run: RunDir, recipe: Recipe, site: Site, *, only: str | None = None
) -> list[dict[str, str]]:
    """Every job of the whole recipe: {"file", "what", "text"}, text for sbatch."""
    words = words_for(run, None)
    return [
        {
            "file": job.file_name,
            "what": _about(job),
            "text": text(job, recipe, site, words, folder=run.slurm.log),
        }
        for job in _jobs(recipe, site, only)
    ]


def emit(
    run: RunDir, recipe: Recipe, site: Site, folder: Path, *, only: str | None = None
) -> list[Path]:
    """Write one sbatch file a job, host.sh, and submit.sh, which sends them in order."""
    if folder.exists() and not folder.is_dir():
        raise UsageError("not a folder", where=folder)
    folder.mkdir(parents=True, exist_ok=True)
    host = host_script()
    written = [folder / "host.sh"]
    if not (written[0].exists() and written[0].samefile(host)):
        files.write_atomic(written[0], host.read_bytes())
    jobs = _jobs(recipe, site, only)
    for job in jobs:
        body = text(job, recipe, site, BY_HAND, folder=run.slurm.log)
        files.write_atomic(folder / job.file_name, body)
        written.append(folder / job.file_name)
    files.write_atomic(folder / "submit.sh", submit_script(jobs))
    return [*written, folder / "submit.sh"]


def submit_script(jobs: list[Job]) -> str:
    """The shell script that knows the order."""
    lines, canary = [], False
    for n, job in enumerate(jobs):
        if n and job.group != jobs[n - 1].group:
            lines.append("upstream=$upstream$group")
            canary = False
        if n == 0 or job.group != jobs[n - 1].group:
            lines.append("group=")
        after = "$upstream"
        if job.link and job.link != jobs[n - 1].link:
            lines.append("before=$group")
        if job.link:
            after = "$before"
        elif canary:
            after = ":$canary"
        lines.append(f'job {job.file_name} {job.name} "{after}" "{_about(job)}"')
        if job.role == "canary":
            lines.append("canary=$id others=$run/slurm/jobs/$suffix.others")
            canary = True
        elif canary and not job.link:
            lines.append('echo "$id" >>"$others"')
        lines.append("group=$group:$id")
    return SUBMIT_HEAD + "\n".join(lines) + "\n"


def _jobs(recipe: Recipe, site: Site, only: str | None) -> list[Job]:
    return [job for jobs in whole_run(recipe, site, only) for job in jobs]


def _about(job: Job) -> str:
    count = f", {job.tasks} at once" if job.tasks > 1 else ""
    return f"{', '.join(job.stages)} ({job.role}{count})"
