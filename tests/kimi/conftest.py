"""The hollow stand-in of Kimi-K2.5-INT4, built once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import standin  # noqa: E402


@pytest.fixture(scope="session")
def kimi_standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of 595 GB apparent, 52 MB real."""
    return standin.build(tmp_path_factory.mktemp("kimi") / "Kimi-K2.5-INT4")
