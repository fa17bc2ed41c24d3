"""The part of `site check` that is about programs: Apptainer, the image, the GPU's driver.

What is on this machine need not be on the nodes, and the other way round: what cannot be seen here
is said to run later. The image's digest is looked at again in each job.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

from kimi_eagle.containers import exec as apptainer
from kimi_eagle.errors import KimiEagleError
from kimi_eagle.images import pins
from kimi_eagle.site import Site

State = Literal["ok", "problem", "unknown"]

OLDEST_DRIVER = {12: 525, 13: 580}
"""Major version of CUDA -> of the oldest Linux driver for it (NVIDIA's CUDA compatibility guide,
minor version compatibility)."""


@dataclass(frozen=True)
class Check:
    """One line of the answer."""

    name: str
    state: State
    text: str
    key: str = ""
    """Key of the site file to change."""


def tools(site: Site) -> list[Check]:
    """Apptainer here, the image and whether this machine's driver is new enough for it."""
    if site.image is None:
        told = f"none: jobs run {sys.executable}, which has to be on every node"
        return [Check("image", "unknown", told, "image")]
    try:
        image = pins.verified(site.image)
    except KimiEagleError as e:
        return [_apptainer(site), Check("image", "problem", e.line(), "image")]
    label = image.labels.get("ai.kimi-eagle.flavour", "?")
    told = f"{image.path}: pinned as {image.name}, {label}, sha256 {image.sha256[:12]}"
    return [_apptainer(site), Check("image", "ok", told), _driver(image)]


def _apptainer(site: Site) -> Check:
    name = site.apptainer or "apptainer"
    try:
        apptainer.check_program(name)
    except KimiEagleError as e:
        wrong = shutil.which(name) is not None
        told = f"{e.line()}; on nodes: runs later, in the job"
        return Check("apptainer", "problem" if wrong else "unknown", told, "apptainer")
    return Check("apptainer", "ok", f"{shutil.which(name)}; on nodes: runs later, in the job")


def _driver(image: pins.Image) -> Check:
    cuda = image.labels.get("ai.kimi-eagle.cuda", "none")
    if not cuda[:1].isdigit():
        return Check("driver and image", "ok", "the image has no CUDA")
    if (have := _driver_version()) is None:
        return Check("driver and image", "unknown", "no GPU driver here; runs later, in the job")
    oldest = OLDEST_DRIVER.get(int(cuda.partition(".")[0]))
    told = f"driver {have} on this machine, CUDA {cuda} in the image"
    if oldest is None or not have.partition(".")[0].isdigit():
        return Check("driver and image", "unknown", told)
    if int(have.partition(".")[0]) < oldest:
        return Check("driver and image", "problem", f"{told}, which needs {oldest}", "image")
    return Check("driver and image", "ok", told)


def _driver_version() -> str | None:
    """As nvidia-smi tells it; None where there is none, or it does not answer."""
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    argv = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split()[0] if done.returncode == 0 and done.stdout.split() else None
