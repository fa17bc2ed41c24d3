"""Names of jobs: 8 characters for plain `squeue`, then a suffix that never changes.

`ext-kimi-3f9a2c71d0` while waiting, `ext-37%-3f9a2c71d0` while running. The suffix is what a job is
known by: one for each submission, unique, and part of the name whatever happens to its front. Its
first six digits stand for the run directory, so that a run knows its jobs in the queue even where
its book was removed, or where a person submitted them by hand.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path

from kimi_eagle.recipe import STAGES

SHORT = dict(zip(STAGES, ("reg", "pre", "ext", "voc", "trn", "bch"), strict=True))
SUFFIX = re.compile(r"^[0-9a-f]{10}$")
_NAME = re.compile(r"^[a-z]{3}-.{1,4}-[0-9a-f]{10}$")


def run_digits(run: Path) -> str:
    """The six digits of a run directory: of the sha256 of its path (submit.sh makes the same)."""
    return hashlib.sha256(str(run).encode("utf-8", "surrogateescape")).hexdigest()[:6]


def is_of_run(job_name: str, run: Path) -> bool:
    """Is this the name of a job of the run, in its book or not?"""
    return bool(_NAME.match(job_name)) and job_name[-10:].startswith(run_digits(run))


def new_suffix(run: Path) -> str:
    """Ten hex digits: six of the run, four by chance."""
    return run_digits(run) + secrets.token_hex(2)


def waiting_name(stage: str, recipe_name: str) -> str:
    """`ext-kimi`: what plain squeue shows of a job that waits; always 8 characters."""
    letters = re.sub(r"[^A-Za-z0-9]", "", recipe_name)[:4].lower()
    return f"{SHORT[stage]}-{letters:-<4}"
