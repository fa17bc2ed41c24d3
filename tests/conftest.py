"""What all tests share: the small real model and the command line as a user types it."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
MACHINE = ("slurm_room", "containers_room")
"""Rooms whose tests change the machine (daemons, users, installed packages)."""


FIRST = ("machine", "tests/test_demo.py", "tests/contracts/test_table.py", "tests/toy/test_run.py",
         "tests/test_run.py")  # fmt: skip
"""What takes longest comes first, so that two processes end together. (A process is handed two
pieces of work at the start: the third, which waits for the first, is a short one.)"""


def _together(nodeid: str) -> str:
    """What one process does: a file, or all that use the machine as a whole."""
    file = nodeid.partition("::")[0]
    return "machine" if Path(file).parent.name in MACHINE else file


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: i for i, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(_together(item.nodeid), len(FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`pytest -n 2 --no-loadscope-reorder`, as `make test` does.

    Not by `--dist loadgroup`: pytest-xdist 3.8.0 writes the group into Item._nodeid, which pytest
    9.2.0 no longer reads.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Rooms(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _together(nodeid)

    return Rooms(config, log)


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Started in the background by a shell, we and all that we start would ignore Ctrl-C."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def verifier_dir() -> Path:
    """SmolLM2-135M-Instruct as `make setup` lays it down."""
    from kimi_eagle.demo_model import ensure

    return ensure()


@pytest.fixture(scope="session")
def kimi_standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kimi-K2.5-INT4 without its weights (tests/kimi/standin.py): 595 GB apparent, 54 MB real."""
    place = ROOT / "tests" / "kimi" / "standin.py"
    spec = importlib.util.spec_from_file_location("standin", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build(tmp_path_factory.mktemp("kimi") / "Kimi-K2.5-INT4")


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def eagle() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`eagle("run", "jobs/x.toml")`: the command line in a process of its own."""

    def call(
        *args: object, cwd: Path = ROOT, env: dict[str, str] | None = None, timeout: float = 900
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kimi_eagle", *map(str, args)],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return call
