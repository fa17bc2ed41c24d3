"""What the tests of submit share: jobs that may not start before an hour has passed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

RECIPE = "tests/recipes/tiny.toml"
SITE = 'partition = "all"\ntime = "1:00:00"\nmemory = "1G"\nextra = ["--begin=now+1hour"]\n'


@pytest.fixture
def site(tmp_path: Path) -> Path:
    path = tmp_path / "later.toml"
    path.write_text(SITE)
    return path


@pytest.fixture
def submit(testbed, eagle, site: Path, tmp_path: Path) -> Iterator[Callable[..., dict]]:
    """Submit into tmp_path/run; what it printed as JSON, or the finished process if it failed."""

    def call(*args: object, recipe: object = RECIPE, env: dict[str, str] | None = None, ok=True):
        words = ["submit", recipe, "--site", site, "--run", tmp_path / "run", "--json", *args]
        done = eagle(*words, env=env)
        if not ok:
            return done
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    yield call
    testbed.clear()


def names(testbed) -> list[str]:
    return sorted(testbed.run("squeue", "--noheader", "-o", "%j").split())


def wrapped(folder: Path, tool: str, body: str) -> dict[str, str]:
    """An environment in which `tool` is a script; $REAL in it is the real one."""
    folder.mkdir(exist_ok=True)
    script = folder / tool
    script.write_text(f"#!/bin/bash\nREAL={shutil.which(tool)}\n{body}\n")
    script.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}
