"""Names of jobs: 8 characters for plain `squeue`, then a suffix that never changes.

`ext-kimi-3f9a2c71d0` while waiting, `ext-37%-3f9a2c71d0` while running. The suffix is what a job is
known by: one for each submission, unique, and part of the name whatever happens to its front.
"""

from __future__ import annotations

import re
import secrets

from kimi_eagle.recipe import STAGES

SHORT = dict(zip(STAGES, ("reg", "pre", "ext", "voc", "trn", "bch"), strict=True))
SUFFIX = re.compile(r"^[0-9a-f]{10}$")


def new_suffix() -> str:
    """Ten hex digits: 1,000 jobs a day for a century collide once in some hundred years."""
    return secrets.token_hex(5)


def waiting_name(stage: str, recipe_name: str) -> str:
    """`ext-kimi`: what plain squeue shows of a job that waits; always 8 characters."""
    letters = re.sub(r"[^A-Za-z0-9]", "", recipe_name)[:4].lower()
    return f"{SHORT[stage]}-{letters:-<4}"
