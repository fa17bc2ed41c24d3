"""Command line of the toy: make it where it is not."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kimi_eagle.errors import KimiEagleError
from kimi_eagle.toy import EXPERTS, default_path, ensure


def main(argv: list[str] | None = None) -> int:
    """Make the toy; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kimi_eagle.toy", description="Make Kimi-K2.5's architecture at toy size."
    )
    parser.add_argument("dest", nargs="?", type=Path, help=f"default: {default_path()}")
    parser.add_argument("--experts", choices=EXPERTS, default=EXPERTS[0])
    args = parser.parse_args(argv)
    try:
        ensure(args.dest, experts=args.experts, say=lambda t: print(f"toy: {t}", flush=True))
    except KimiEagleError as e:
        print(f"error: {e.line()}", file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
