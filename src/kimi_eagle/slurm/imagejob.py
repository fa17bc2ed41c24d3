"""An image built as a Slurm job, for sites that forbid long work on login nodes.

`submit` (login node) fetches the wheels, because compute nodes often reach no index, writes
OUT.build.sbatch beside the image and submits it. The job (`main`, compute node) builds with all
temporary files and Apptainer's cache on the node's scratch, and pins the image. What the job still
fetches: Debian's packages (cpu) or the base image (cuda), unless a base image is kept already.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from kimi_eagle import files
from kimi_eagle.errors import KimiEagleError, RunError, UsageError
from kimi_eagle.images import build, pins, wheels
from kimi_eagle.site import Site
from kimi_eagle.slurm import queue
from kimi_eagle.slurm.sbatch import UNSAFE_IN_PATHS


def submit(site: Site, flavour: str, out: Path) -> str:
    """Submit the build; the job's id. UsageError where it cannot work, RunError if refused."""
    out = Path(os.path.abspath(out))
    build.check_possible(flavour, out, replace=False, here=False)
    if bad := sorted(UNSAFE_IN_PATHS & set(str(out))):
        raise UsageError(f"{bad[0]!r} in the path of a job's file", where=out)
    wheels.wheels(flavour)
    wheels.pip_wheel()
    file = out.with_name(out.stem + ".build.sbatch")
    files.write_atomic(file, text(site, flavour, out))
    done = queue.call(["sbatch", "--parsable", str(file)])
    if done.returncode:
        raise RunError(f"sbatch refused: {queue.said(done)}", where=f"site {site.name}")
    return done.stdout.strip().partition(";")[0]


def text(site: Site, flavour: str, out: Path) -> str:
    """The sbatch file: a CPU job of the site on one node."""
    place = site.cpu
    wanted = {
        "job-name": "image",
        "output": out.with_name(out.stem + ".build-%j.log"),
        "nodes": 1,
        "ntasks": 1,
        "time": site.time,
        "partition": place.partition or site.partition,
        "account": place.account or site.account,
        "qos": place.qos or site.qos,
        "cpus-per-task": place.cpus or site.cpus,
        "mem": place.memory or site.memory,
    }
    # Quoted: a blank ends a value otherwise.
    lines = [f'#SBATCH --{k}="{v}"' for k, v in wanted.items() if v is not None]
    lines += [f"#SBATCH {option}" for option in site.extra]
    if site.preamble:
        lines += ["set -e", *site.preamble, "set +e"]
    scratch = shlex.quote(site.scratch) if site.scratch else '"${TMPDIR:-/tmp}"'
    variables = {
        "KIMI_EAGLE_CACHE": str(wheels.cache().absolute()),
        "PYTHONSAFEPATH": "1",
        "PYTHONNOUSERSITE": "1",
    }
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    if site.apptainer and "/" in site.apptainer:
        lines.append(f"export PATH={shlex.quote(os.path.dirname(site.apptainer))}:$PATH")
    command = [sys.executable, "-u", "-m", "kimi_eagle.slurm.imagejob", flavour, str(out)]
    # exec: the end of the job is told to Python itself, which then cleans up.
    lines.append(f"exec {shlex.join(command)} {scratch}")
    return "#!/bin/bash\n" + "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    """The job: build and pin."""
    parser = argparse.ArgumentParser(prog="kimi_eagle.slurm.imagejob")
    parser.add_argument("flavour")
    parser.add_argument("out", type=Path)
    parser.add_argument("scratch", type=Path)
    told = parser.parse_args(argv)
    try:
        report = build.build(told.flavour, told.out, workdir=told.scratch)
        made = pins.lock(report.path)
    except KimiEagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    print(f"pinned as {made.name}: sha256:{made.sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
