"""The toy and one whole run of its recipe, shared by the tests of this room."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "jobs/kimi-k2.5-toy.toml"


@pytest.fixture(scope="session")
def toy_dir() -> Path:
    """The toy as `make setup` lays it down."""
    from kimi_eagle import toy

    return toy.ensure()


@pytest.fixture(scope="session")
def toy_run(tmp_path_factory, toy_dir, eagle) -> tuple[Path, dict[str, Any]]:
    """All six stages of jobs/kimi-k2.5-toy.toml: the run, and what `run --json` says."""
    run = tmp_path_factory.mktemp("toy") / "run"
    done = eagle("run", RECIPE, "--run", run, "--json", timeout=1200)
    assert done.returncode == 0, done.stderr
    return run, json.loads(done.stdout)


@pytest.fixture(scope="session")
def own_text(toy_run) -> list[list[int]]:
    """Token ids of samples that the toy wrote, as prepare laid them down."""
    from kimi_eagle.data.samples import read_samples

    parts = sorted((toy_run[0] / "prepare/files").glob("*.tokens.parquet"))
    return [s.input_ids.tolist() for s in read_samples(parts[0])]


@pytest.fixture(scope="session")
def child() -> Callable[..., None]:
    """`child(SCRIPT, ...)`: Python in a process of its own; fails with its last words."""

    def call(*command: object, timeout: float = 600) -> None:
        argv = [sys.executable, *map(str, command)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]

    return call
