"""Second half of lock.sh: takes out of a resolved lock what must not be installed.

Reads uv's output, writes a pip lock (atomically). Kept as text, so that `# via` comments stay.
Standard library only: it runs before there is an environment.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

HEADER = """\
# {lock}: made by containers/lock.sh; do not edit.
# Install: pip install --no-deps --require-hashes -r {lock}
# {about}
"""
ABOUT = {
    "base": "CPython 3.13, Linux x86_64: what a login node needs, installed by install.sh.",
    "cpu": "CPython 3.11, Linux x86_64. torch is the CPU build 2.13.0+cpu (see README.md here).",
    "cuda": "CPython 3.12, Linux x86_64, on top of the pinned base image (see README.md here).",
}
DROPPED = ("nvidia-", "cuda-")
"""CUDA's libraries as torch's CUDA build asks for them: the CPU build needs none, the base image
has its own."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--lock", choices=sorted(ABOUT), required=True)
    parser.add_argument("--torch-sha256", help="the only hash that torch may have")
    args = parser.parse_args()

    blocks = re.split(r"(?m)^(?=[a-z0-9])", args.source.read_text(encoding="utf-8"))
    kept = []
    for block in blocks:
        name = block.split("==")[0]
        if name.startswith(DROPPED):
            continue
        if name == "torch":
            block = one_hash(block, args.torch_sha256)
        kept.append(block)
    text = HEADER.format(lock=f"{args.lock}.lock", about=ABOUT[args.lock]) + "".join(kept)
    temp = args.target.with_suffix(".tmp")
    temp.write_text(re.sub(r"(-r|-c|--constraint|--override) \S*/tmp\S*", r"\1 resolved", text))
    os.replace(temp, args.target)


def one_hash(block: str, sha256: str | None) -> str:
    """The torch block with one hash in place of all others."""
    if not sha256:
        raise SystemExit("trim_lock.py: torch must not be in this lock")
    first, *rest = block.splitlines(keepends=True)
    via = [line for line in rest if "--hash" not in line]
    return first + f"    --hash=sha256:{sha256}\n" + "".join(via)


if __name__ == "__main__":
    main()
