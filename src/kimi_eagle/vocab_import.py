"""A vocabulary mapping made by another program: read, told apart, and made ours.

Reads t2d and d2t as .pt (torch.save, opened with weights_only) or .npy; makes the folder that the
mapping will be written to, and writes no file. Programs
differ in how they write the same mapping: t2d as bool, int or uint8; d2t as offsets (speculators,
vLLM: target = i + d2t[i]) or as absolute token ids. Which of the two is told by t2d, never
guessed. What is wrong with a mapping is judged by the rules in contracts/mapping.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle import tensorfiles
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.vocab import FILES, VocabMapping, build_mapping, counts_digest, from_offsets, load


def read_array(path: Path) -> np.ndarray:
    """The one tensor of a .pt or .npy file. UsageError: no such file, pickled code, no tensor."""
    found = tensorfiles.read(path, "a tensor")
    if isinstance(found, np.ndarray):
        return found
    if not hasattr(found, "numpy"):
        raise UsageError(f"holds a {type(found).__name__}", where=path, expected="a tensor")
    try:
        return found.detach().numpy()
    except (TypeError, RuntimeError):  # sparse, bfloat16, on the device `meta` (no numbers at all)
        fault = f"holds a tensor of {found.dtype}, {found.layout}, device {found.device}"
        raise UsageError(fault, where=path, expected="bool or whole numbers, dense") from None


def take(t2d: np.ndarray, d2t: np.ndarray) -> tuple[VocabMapping, list[str]]:
    """(the mapping with offsets, bool and int64; what was read as what, in words).

    t2d: [V] bool, or whole numbers 0 and 1. d2t: [D] whole numbers. UsageError where they are not;
    a d2t that is neither offsets nor absolute ids for this t2d is left as it is.
    """
    told = []
    flags = _whole("t2d", t2d)
    if ((flags != 0) & (flags != 1)).any():
        other = "; are the two files swapped?" if len(t2d) < len(d2t) else ""
        raise UsageError(f"t2d holds {int(flags.max())}", expected=f"0 and 1 (or bool){other}")
    if t2d.dtype != bool:
        told.append(f"t2d is {t2d.dtype}: taken as bool")
    chosen, ids = np.flatnonzero(flags), _whole("d2t", d2t)
    if d2t.dtype != np.int64:
        told.append(f"d2t is {d2t.dtype}: taken as int64")
    if len(ids) == len(chosen) and np.array_equal(np.sort(ids), chosen):
        told.append("d2t holds absolute token ids: turned into offsets")
        ids = ids - np.arange(len(ids))
    elif len(ids) == len(chosen) and np.array_equal(ids + np.arange(len(ids)), chosen):
        told.append("d2t holds offsets, as vLLM and speculators want it")
    return from_offsets(ids, len(flags), flags.astype(bool)), told


def with_counts(mapping: VocabMapping, counts: np.ndarray) -> VocabMapping:
    """The mapping with what counts (int64 [V]) say of it: coverage and their digest."""
    return replace(mapping, coverage=mapping.covered(counts), counts_digest=counts_digest(counts))


def beside_counts(mapping: VocabMapping, counts: np.ndarray) -> str:
    """How the mapping compares with the most frequent tokens of counts (int64 [V]), in words."""
    best = build_mapping(counts, len(mapping.d2t))
    other = int((mapping.t2d & ~best.t2d).sum())
    says = f"covers {mapping.coverage:.2%} of these counts"
    if not other:
        return f"{says}, as the most frequent tokens do: it is the mapping that they give"
    return f"{says}; the most frequent tokens cover {best.coverage:.2%} ({other:,} differ)"


def folder_for(out: str, inputs: Iterable[str | Path]) -> Path:
    """The folder `out`, made and absolute, for a mapping's five files.

    UsageError where one of them is an input, or lies there and is no mapping of ours: files of
    other programs have the same names.
    """
    folder = Path(out).absolute()
    there = [folder / name for name in FILES if os.path.lexists(folder / name)]
    for path in there:
        if any(Path(i).exists() and path.exists() and path.samefile(i) for i in inputs):
            raise UsageError(
                f"--out would replace {path.name}, which is read here",
                where=folder,
                expected="another folder than that of the files",
                fix="name a new folder: --out mapping",
            )
    if there and not (len(there) == len(FILES) and _ours(folder)):
        raise UsageError(
            f"--out would replace {there[0].name}, which kimi-eagle did not write",
            where=folder,
            expected="a new folder, or one with a whole mapping of kimi-eagle",
            fix="name another folder, or remove these files",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"--out cannot be made: {e.strerror}", where=folder) from None
    return folder


def _ours(folder: Path) -> bool:
    try:
        load(folder / "d2t.npy", folder / "t2d.npy")
    except RunError:
        return False
    return True


def _whole(name: str, array: np.ndarray) -> np.ndarray:
    """As int64 [n]."""
    fault: Any = None
    if array.ndim != 1 or not array.size:
        fault = f"{name} has shape {list(array.shape)}"
    elif array.dtype.kind not in "biuf":
        fault = f"{name} is {array.dtype}"
    elif array.dtype.kind == "f" and not np.array_equal(array, np.trunc(array)):
        fault = f"{name} holds no whole numbers"
    if fault:
        raise UsageError(fault, expected="a row of whole numbers")
    return array.astype(np.int64)
