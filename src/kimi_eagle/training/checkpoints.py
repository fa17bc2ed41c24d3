"""Checkpoints that are whole or not there, however the process that wrote them ended.

speculators' Trainer writes into `<epoch>/` in place and resumes from the highest number it
finds, whole or not (0.9.0, train/checkpointer.py). Here a checkpoint is written to
`saving-<epoch>/`, fsynced, and only then takes the number as its name; `tidy` finishes or
undoes what a killed process left, before a Trainer looks. The price: the disk holds one
checkpoint more while one is replaced.

Layout of the folder: `<epoch>/` with model.safetensors, config.json, optimizer_state_dict.pt,
scheduler_state_dict.pt, random-RANK.pt, training_state.json and, after validation,
val_metrics.json; the link `checkpoint_best`. States are float32, so that resuming loses nothing;
frozen copies of the verifier's embedding are left out (speculators loads them from the verifier).
The last `keep` checkpoints stay, and the best.
"""

from __future__ import annotations

import errno
import json
import logging
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kimi_eagle import files

logger = logging.getLogger(__name__)

STATE = "training_state.json"
METRICS = "val_metrics.json"
SAVING, OLD, BROKEN, GONE = "saving-", "old-", "broken-", "gone-"

NOT_THE_FILE = frozenset({errno.EACCES, errno.EPERM, errno.ESTALE, errno.EMFILE, errno.ENFILE})
"""What a lost mount, a wrong user or a full table of open files says, of whole files too."""


def fault(folder: Path, *, scheduler: bool = True) -> str | None:
    """Why the checkpoint in `folder` is not whole; None when it is. OSError where that cannot be
    told now: a good one must not be set aside for it.

    scheduler: whether the run has a learning-rate schedule whose state must be there.
    """
    try:
        open(folder / "model.safetensors", "rb").close()  # errors of safetensors have no errno
        with safe_open(folder / "model.safetensors", framework="pt") as f:
            if not list(f.keys()):
                return "model.safetensors is empty"
        for name in ("optimizer_state_dict.pt", "scheduler_state_dict.pt")[: 1 + scheduler]:
            torch.load(folder / name, weights_only=True, map_location="cpu", mmap=True)
        for path in folder.glob("random-*.pt"):
            torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        json.loads((folder / "config.json").read_bytes())
        state = json.loads((folder / STATE).read_bytes())
        if not {"epoch", "local_step", "global_step"} <= state.keys():
            return f"{STATE} lacks a key"
    except FileNotFoundError as e:
        return f"{Path(e.filename or '').name or 'a file'} is missing"
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError) as e:
        if isinstance(e, OSError) and e.errno in NOT_THE_FILE:
            raise
        return f"{type(e).__name__}: {e}".splitlines()[0]
    except Exception as e:  # torch.load of a torn file: pickle.UnpicklingError and others
        return f"cannot be read: {type(e).__name__}"
    return None


def commit(root: Path, epoch: int) -> None:
    """Give the finished folder `saving-<epoch>` its number, in place of an earlier one."""
    staged, final, old = root / f"{SAVING}{epoch}", root / str(epoch), root / f"{OLD}{epoch}"
    for file in staged.iterdir():
        files.fsync_file(file)
    files.fsync_dir(staged)
    _delete(old)
    if final.exists():
        final.rename(old)
    staged.rename(final)
    files.fsync_dir(root)
    _delete(old)


def tidy(root: Path, *, scheduler: bool = True) -> list[str]:
    """Leave only whole checkpoints under a number; words about what was set aside.

    A finished `saving-` folder whose number is free takes it (the process died between the two
    renames), else the `old-` one goes back; what is torn becomes `broken-<epoch>`.
    """
    if not root.is_dir():
        return []
    words = []
    for folder in root.glob(f"{GONE}*"):
        shutil.rmtree(folder, ignore_errors=True)
    for prefix in (SAVING, OLD):
        for folder in sorted(root.glob(f"{prefix}*")):
            final = root / folder.name.removeprefix(prefix)
            if not final.exists() and fault(folder, scheduler=scheduler) is None:
                folder.rename(final)
                words.append(f"checkpoint {final.name} completed from {folder.name}")
            else:
                _delete(folder)
    for epoch in epochs(root):
        folder = root / str(epoch)
        if reason := fault(folder, scheduler=scheduler):
            aside = root / f"{BROKEN}{epoch}"
            _delete(aside)
            folder.rename(aside)
            words.append(f"checkpoint {epoch} skipped: {reason}")
    link_best(root)
    for word in words:
        logger.warning("%s: %s", root, word)
    return words


def epochs(root: Path) -> list[int]:
    """Numbers of the checkpoints in `root`, ascending."""
    if not root.is_dir():
        return []
    names = [p.name for p in root.iterdir() if p.is_dir() and not p.is_symlink()]
    return sorted(int(name) for name in names if name.isdecimal())


def prune(root: Path, keep: int) -> list[int]:
    """Delete all checkpoints but the last `keep` and the best; the numbers of those deleted."""
    have = epochs(root)
    chosen = best(root)
    gone = [e for e in have[:-keep] if chosen is None or chosen.name != str(e)]
    for epoch in gone:
        _delete(root / str(epoch))
    return gone


def _delete(folder: Path) -> None:
    """Delete a folder, if it is there, or at least its name; `tidy` deletes what is left of it.

    Renamed first: what a killed process leaves is no torn checkpoint. On NFS a file that somebody
    has open (who looks at a checkpoint while training goes on) keeps its folder from going.
    """
    if folder.exists():
        gone = folder.with_name(f"{GONE}{secrets.token_hex(4)}")
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def state(root: Path) -> dict[str, Any]:
    """training_state.json of the newest checkpoint, from which a run goes on; {} without one."""
    have = epochs(root)
    found = files.read_json(root / str(have[-1]) / STATE) if have else None
    return found if isinstance(found, dict) else {}


def validated(root: Path, epoch: int) -> bool:
    """Whether the checkpoint of `epoch` carries its validation metrics."""
    return _val_loss(root / str(epoch)) is not None


def ended(root: Path, epoch: int) -> bool:
    """Whether the checkpoint of `epoch` was taken at its end, not within it."""
    state = files.read_json(root / str(epoch) / STATE)
    return isinstance(state, dict) and state.get("local_step") == 0


def best(root: Path) -> Path | None:
    """The checkpoint with the lowest validation loss, else the last one, else None."""
    have = epochs(root)
    scored = [(loss, e) for e in have if (loss := _val_loss(root / str(e))) is not None]
    if scored:
        return root / str(min(scored)[1])
    return root / str(have[-1]) if have else None


def estimated(folder: Path) -> dict[str, Any] | None:
    """The acceptance estimated for the checkpoint `folder` (`estimate.Tally.result`), if any."""
    metrics: Any = files.read_json(folder / METRICS)
    found = metrics.get("estimated_acceptance") if isinstance(metrics, dict) else None
    return found if isinstance(found, dict) else None


def link_best(root: Path) -> None:
    """Point `checkpoint_best` at the lowest validation loss; no link where none has one."""
    link = root / "checkpoint_best"
    choice = best(root)
    good = choice is not None and _val_loss(choice) is not None
    if link.is_symlink() and not (good and link.readlink() == Path(choice.name)):
        link.unlink()
    if good and not link.is_symlink():
        link.symlink_to(choice.name, target_is_directory=True)


def _val_loss(folder: Path) -> float | None:
    metrics: Any = files.read_json(folder / METRICS)
    value = metrics.get("loss_epoch") if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, (int, float)) else None
