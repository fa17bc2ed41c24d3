"""A finished run with states, made once; every test spoils a copy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1])]

import hidden_run  # noqa: E402
from hidden_run import copied  # noqa: E402
from kimi_eagle.stages.context import Context, open_context  # noqa: E402


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, verifier_dir: Path) -> Path:
    """A whole run. Not to be changed by a test."""
    return hidden_run.whole_run(tmp_path_factory.mktemp("verify"))


@pytest.fixture(scope="session")
def original(finished: Path) -> Context:
    return open_context(finished)


@pytest.fixture
def ctx(original: Context, tmp_path: Path) -> Context:
    """A copy, to be spoilt."""
    return copied(original, tmp_path / "run")
