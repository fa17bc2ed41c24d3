"""The good world, built once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from place import Place, build, copy_of  # noqa: E402


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("place") / "base")


@pytest.fixture
def place(base: Path, tmp_path: Path) -> Place:
    """A world of this test's own."""
    return copy_of(base, tmp_path / "place")


@pytest.fixture
def places(base: Path, tmp_path: Path) -> Callable[[str], Place]:
    return lambda name: copy_of(base, tmp_path / name)
