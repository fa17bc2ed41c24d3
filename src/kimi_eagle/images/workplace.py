"""Where a build works and what it says when Apptainer fails: gigabytes in between, last words."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kimi_eagle.errors import RunError
from kimi_eagle.images import children


def search_path() -> str:
    """PATH with the folders of system programs, which a user's often lacks."""
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


@contextlib.contextmanager
def workplace(folder: Path, room: int) -> Iterator[Path]:
    """A folder for what lies around during a build; gone at the end, whatever happens."""
    children.refuse_odd(folder, "build", fix="build elsewhere and move the image")
    free = shutil.disk_usage(folder).free
    if free < room:
        raise RunError(
            f"{free / 1e9:.0f} GB free, {room / 1e9:.0f} GB wanted for this build",
            where=folder,
            fix="free some, or set KIMI_EAGLE_CACHE and --workdir to folders with more",
        )
    work = Path(tempfile.mkdtemp(prefix=".kimi-eagle-build-", dir=folder))
    with children.gone_at_the_end(work):
        yield work


def run(argv: list[str], work: Path) -> str:
    """Run Apptainer, and end all of it when we are told to end; its output."""
    code, text = children.run(argv, work, _environment(work))
    if code:
        fix = "no registry? build on a copy of the base: --base docker-archive:FILE"
        said = _last_words(text)
        raise RunError(
            f"{argv[0]} {argv[1]} failed: {said}", fix=fix if "conveyor failed" in said else ""
        )
    return text


def _last_words(text: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [x.strip() for x in plain.splitlines() if not x.startswith(("INFO:", "I: "))]
    lines = [x for x in lines if x]
    telling = [x for x in lines if re.search(r"\b(error|fatal|cannot|can't)\b", x, re.IGNORECASE)]
    return "; ".join((telling or lines or ["it said nothing"])[-4:])[:1000]


def _environment(work: Path) -> dict[str, str]:
    """The host's; proxies matter here."""
    temporary = work / "tmp"
    temporary.mkdir(exist_ok=True)
    places = {"TMPDIR": str(temporary), "APPTAINER_TMPDIR": str(temporary)}
    cache = {"APPTAINER_CACHEDIR": str(work / "cache")}
    return cache | children.environment() | {"PATH": search_path(), **places}
