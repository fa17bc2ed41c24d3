"""What all commands share: the type of paths, `--json`, and how JSON is printed."""

from __future__ import annotations

import json
from typing import Any

import click

PATH = click.Path(path_type=str)


def json_option(command: Any) -> Any:
    """Adds `--json`, passed on as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def print_json(value: Any) -> None:
    """JSON for machines: indented, sorted, paths as text."""
    click.echo(json.dumps(value, indent=1, sort_keys=True, default=str))
