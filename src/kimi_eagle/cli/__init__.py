"""The command line: `app.py` has the commands that work on a run, each other file one command or a
group of them. Every command imports its room inside the function: `--help` stays quick.
"""

from kimi_eagle.cli.app import main

__all__ = ["main"]
