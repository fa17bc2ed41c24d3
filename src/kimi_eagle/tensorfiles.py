"""Small files of other programs, opened without running code: .pt (torch.save), .npy, .json.

What is wrong with one is said in our own words: torch's and numpy's advise to load it with pickle
allowed, which runs whatever code the file holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle.errors import UsageError
from kimi_eagle.modelfiles import LFS_MARK

COPY = "copy the file again from where it was made"
PLAIN = "open it where it was made and save the tensor alone: torch.save(tensor, 'FILE.pt')"
ZIP = b"PK\x03\x04"  # torch.save since 1.6
PICKLE = b"\x80"  # torch.save before, and pickle itself
NUMPY = b"\x93NUMPY"


def read(path: Path, what: str, kinds: tuple[str, ...] = (".pt", ".npy")) -> Any:
    """The content of a file: a tensor or plain Python values (.pt), an array (.npy), JSON (.json).

    what: the words for what was expected. Raises UsageError: no such file, empty, a git-LFS
    pointer, cut, Python objects in it, another kind of file.
    """
    if path.suffix not in kinds:
        expected = f"{', '.join(kinds[:-1])} or {kinds[-1]}"
        raise UsageError("unknown kind of file", where=path, expected=expected)
    try:
        with open(path, "rb") as f:
            start = f.read(len(LFS_MARK))
    except FileNotFoundError:
        raise UsageError(f"no such file of {what}", where=path) from None
    except OSError as e:
        raise UsageError(f"not {what}: cannot be read: {e.strerror}", where=path) from None
    if not start:
        raise UsageError(f"not {what}: the file is empty", where=path, fix=COPY)
    if start == LFS_MARK:
        fault, fix = f"not {what}: a git-LFS pointer", "git lfs pull in its checkout"
        raise UsageError(fault, where=path, fix=fix)
    return {".pt": _torch, ".npy": _numpy, ".json": _json}[path.suffix](path, what, start)


def _torch(path: Path, what: str, start: bytes) -> Any:
    import pickle
    import warnings

    import torch

    if not start.startswith((ZIP, PICKLE)):
        expected = "a file that torch.save wrote"
        raise UsageError(f"not {what}: another kind of file", where=path, expected=expected)
    try:
        with warnings.catch_warnings(action="ignore"):  # of other pickle protocols, TorchScript
            return torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError:
        # Of the older format this may also be a cut: both are said.
        cut = "" if start.startswith(ZIP) else ", or it is cut short"
        raise UsageError(
            f"not {what}: it holds Python objects{cut}",
            where=path,
            expected="a tensor, or numbers in a list or dict (objects are code, never run here)",
            fix=PLAIN,
        ) from None
    except Exception:  # torch raises many kinds; all mean the same here
        fault = "cut short or damaged"
        if not start.startswith(ZIP):
            fault = "cut short, or not written by torch.save"
        raise UsageError(f"not {what}: {fault}", where=path, fix=COPY) from None


def _numpy(path: Path, what: str, start: bytes) -> np.ndarray:
    if not start.startswith(NUMPY):
        expected = "a file that numpy.save wrote"
        raise UsageError(f"not {what}: another kind of file", where=path, expected=expected)
    try:
        return np.load(path, allow_pickle=False)
    except Exception as e:  # EOFError, ValueError, MemoryError of a torn header, and others
        if "allow_pickle" in str(e):
            raise UsageError(
                f"not {what}: it holds Python objects",
                where=path,
                expected="an array of numbers (objects are code, never run here)",
            ) from None
        raise UsageError(f"not {what}: cut short or damaged", where=path, fix=COPY) from None


def _json(path: Path, what: str, start: bytes) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as e:
        raise UsageError(f"not {what}: no JSON: {e}", where=path) from None
