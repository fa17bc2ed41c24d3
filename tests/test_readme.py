"""README.md is true where a test can tell: commands, options, paths, targets, the error shown."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from kimi_eagle.cli import main

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"(?m)^    (.*)$", README))
INLINE = re.findall(r"`([^`\n]+)`", README)


def shown() -> list[str]:
    """Every line of the README that types `kimi-eagle ...`."""
    lines = [s.split("#")[0].strip().removeprefix("$ ") for s in BLOCKS.splitlines()] + INLINE
    lines = [s.removeprefix(".venv/bin/") for s in lines]
    return sorted({s for s in lines if re.match(r"kimi-eagle [a-z-]", s)})


def test_commands_are_found() -> None:
    assert len(shown()) >= 10


@pytest.mark.parametrize("line", shown())
def test_command_and_its_options_exist(line: str) -> None:
    command: click.Command = main
    words = shlex.split(line)[1:]
    while words and isinstance(command, click.Group):
        name = words.pop(0)
        if name.startswith("-"):
            break
        found = command.commands.get(name)
        assert found, f"no command {name!r} in {line!r}"
        command = found
    options = {o for p in command.params for o in p.opts} | {"--help"}
    used = [w for w in shlex.split(line) if w.startswith("--")]
    assert set(used) <= options, f"{line!r}: {sorted(set(used) - options)}"


def test_files_that_are_named_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    typed = [w.rstrip("?:,;.") for text in [*INLINE, BLOCKS] for w in text.split()]
    here = ("jobs/", "tests/", "src/", "containers/")
    paths = {w for w in links + typed if w.startswith(here) and w != "jobs/smolm2.toml"}
    assert len(paths) >= 8
    assert [p for p in sorted(paths) if not (ROOT / p).exists()] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    used = set(re.findall(r"\bmake ([a-z]+)(?=[ `\n])", BLOCKS + "\n" + "\n".join(INLINE) + "\n"))
    assert used >= {"demo", "test", "setup"}
    assert [t for t in sorted(used) if not re.search(rf"(?m)^{t}:", makefile)] == []


def test_the_error_shown_is_the_error(eagle: Callable) -> None:
    command, expected = re.search(r"(?m)^    \$ kimi-eagle (.*)\n    (error: .*)$", README).groups()
    done = eagle(*shlex.split(command))
    assert (done.returncode, done.stderr.strip()) == (2, expected)
