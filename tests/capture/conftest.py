"""Runs of vLLM shared by the tests of this room: each once, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("engine_runs.py")


@pytest.fixture(scope="session")
def engine_run(verifier_dir, tmp_path_factory) -> Callable[[str], dict[str, Any]]:
    """`engine_run("generate")`: the result of engine_runs.py, run at the first call."""
    folder = tmp_path_factory.mktemp("engine")
    found: dict[str, dict[str, Any] | str] = {}

    def run(what: str) -> dict[str, Any]:
        if what not in found:
            done = subprocess.run(
                [sys.executable, str(SCRIPT), what, str(verifier_dir), str(folder)],
                capture_output=True,
                text=True,
                timeout=600,
            )
            if done.returncode:
                found[what] = done.stderr[-4000:]
            else:
                result = json.loads((folder / f"{what}.json").read_text())
                found[what] = {**result, "folder": folder}
        result = found[what]
        assert isinstance(result, dict), result
        return result

    return run


@pytest.fixture(scope="session")
def written(engine_run) -> dict[str, Any]:
    """Eight conversations with the model's own greedy answers: ids, mask."""
    made = engine_run("generate")
    samples = [
        (p + ids, [False] * len(p) + [True] * len(ids))
        for p, (ids, _) in zip(made["prompts"], made["greedy"], strict=True)
    ]
    (made["folder"] / "batch.json").write_text(json.dumps([ids for ids, _ in samples]))
    return {"ids": [s[0] for s in samples], "masks": [s[1] for s in samples]}


@pytest.fixture(scope="session")
def memory_run(engine_run, written) -> dict[str, Any]:
    """Extraction handed over in memory."""
    return engine_run("memory")
