"""The command line starts light: it runs on login nodes, where importing torch is bad manners."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

HEAVY = ("torch", "vllm", "transformers", "pyarrow", "speculators", "datasets", "numpy")

PROBE = """
import sys
from kimi_eagle.cli import main
try:
    main({args!r}, prog_name="kimi-eagle")
except SystemExit as stop:
    assert stop.code in (0, None), stop.code
print("IMPORTED:", *sorted(set(sys.modules) & set({heavy!r})))
"""


def console_script() -> Path:
    script = Path(sys.executable).with_name("kimi-eagle")
    if not script.is_file():
        pytest.fail(f"{script} is not there; fix: make setup")
    return script


@pytest.mark.parametrize(
    "args", [["--help"], ["--version"], ["run", "--help"], ["stage", "--help"]], ids=" ".join
)
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    code = PROBE.format(args=args, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "IMPORTED:"


def test_the_probe_sees_heavy_imports() -> None:
    code = PROBE.format(args=["--help"], heavy=HEAVY).replace(
        "import sys", "import sys, pyarrow", 1
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pyarrow" in done.stdout.splitlines()[-1]


def test_console_script_shows_help() -> None:
    done = subprocess.run([console_script(), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "Usage: kimi-eagle" in done.stdout and "run" in done.stdout


def test_help_is_quick() -> None:
    """Goal 0.15 s on an idle machine (tests/bench/bench_help.py shows it).

    Tests run on busy machines, so the time is taken in units of an empty interpreter's.
    """

    def seconds(command: list[str]) -> float:
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - start

    python, script = [sys.executable, "-c", "pass"], [str(console_script()), "--help"]
    pairs = [(seconds(python), seconds(script)) for _ in range(11)]
    ratio = statistics.median(b for _, b in pairs) / statistics.median(a for a, _ in pairs)
    assert ratio < 12, f"kimi-eagle --help takes {ratio:.1f} times as long as python -c pass"
