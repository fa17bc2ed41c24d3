"""What a killed process can leave among checkpoints, and what the next one makes of it."""

from __future__ import annotations

import json
import shutil

import pytest


@pytest.fixture
def make():
    """Write a small whole checkpoint into a folder."""
    import torch
    from safetensors.torch import save_file

    def write(folder, epoch=0, loss=None, local_step=0):
        folder.mkdir(parents=True)
        save_file({"w": torch.ones(64)}, folder / "model.safetensors")
        torch.save({"state": torch.ones(64)}, folder / "optimizer_state_dict.pt")
        torch.save({"last": 1}, folder / "scheduler_state_dict.pt")
        (folder / "config.json").write_text("{}")
        state = {"epoch": epoch, "local_step": local_step, "global_step": 7}
        (folder / "training_state.json").write_text(json.dumps(state))
        if loss is not None:
            (folder / "val_metrics.json").write_text(json.dumps({"loss_epoch": loss}))
        return folder

    return write


def test_whole(make, tmp_path):
    from kimi_eagle.training import checkpoints

    assert checkpoints.fault(make(tmp_path / "0")) is None


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "config.json",
        "optimizer_state_dict.pt",
        "scheduler_state_dict.pt",
        "training_state.json",
    ],
)
@pytest.mark.parametrize("how", ["missing", "empty", "torn"])
def test_each_file_missing_empty_or_torn(make, tmp_path, name, how):
    from kimi_eagle.training import checkpoints

    make(tmp_path / "0", epoch=0)
    path = make(tmp_path / "1", epoch=1) / name
    data = path.read_bytes()
    keep = {"empty": 0, "torn": len(data) // 2}
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(data[: keep[how]])
    words = checkpoints.tidy(tmp_path)
    assert checkpoints.epochs(tmp_path) == [0]
    assert len(words) == 1 and "checkpoint 1 skipped" in words[0]
    assert (tmp_path / "broken-1").is_dir()


def test_no_schedule_no_scheduler_state(make, tmp_path):
    from kimi_eagle.training import checkpoints

    (make(tmp_path / "0") / "scheduler_state_dict.pt").unlink()
    assert checkpoints.fault(tmp_path / "0", scheduler=False) is None
    assert "scheduler_state_dict.pt is missing" in checkpoints.fault(tmp_path / "0")


def test_killed_while_saving(make, tmp_path):
    from kimi_eagle.training import checkpoints

    make(tmp_path / "0")
    (make(tmp_path / "saving-1", epoch=1) / "config.json").unlink()
    checkpoints.tidy(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["0"]


def test_killed_between_the_two_renames(make, tmp_path):
    from kimi_eagle.training import checkpoints

    make(tmp_path / "saving-0", local_step=9)
    make(tmp_path / "old-0", local_step=4)
    checkpoints.tidy(tmp_path)
    assert checkpoints.epochs(tmp_path) == [0]
    assert json.loads((tmp_path / "0/training_state.json").read_text())["local_step"] == 9
    assert [p.name for p in tmp_path.iterdir()] == ["0"]


def test_the_old_one_comes_back_if_the_new_one_is_torn(make, tmp_path):
    from kimi_eagle.training import checkpoints

    (make(tmp_path / "saving-0") / "model.safetensors").write_bytes(b"")
    make(tmp_path / "old-0", local_step=4)
    checkpoints.tidy(tmp_path)
    assert json.loads((tmp_path / "0/training_state.json").read_text())["local_step"] == 4


def test_commit_replaces(make, tmp_path):
    from kimi_eagle.training import checkpoints

    make(tmp_path / "0", local_step=4)
    make(tmp_path / "saving-0", local_step=0)
    checkpoints.commit(tmp_path, 0)
    assert [p.name for p in tmp_path.iterdir()] == ["0"]
    assert checkpoints.ended(tmp_path, 0)


def test_best_is_the_lowest_validation_loss_else_the_last(make, tmp_path):
    from kimi_eagle.training import checkpoints

    assert checkpoints.best(tmp_path / "none") is None
    make(tmp_path / "0")
    make(tmp_path / "1")
    assert checkpoints.best(tmp_path).name == "1"
    shutil.rmtree(tmp_path / "1")
    make(tmp_path / "1", loss=2.0)
    make(tmp_path / "2", loss=3.0)
    make(tmp_path / "10", loss=2.5)
    checkpoints.link_best(tmp_path)
    assert checkpoints.best(tmp_path).name == "1"
    assert (tmp_path / "checkpoint_best").readlink().name == "1"


def test_a_link_to_a_lost_checkpoint_is_mended(make, tmp_path):
    from kimi_eagle.training import checkpoints

    make(tmp_path / "0", loss=2.0)
    (tmp_path / "checkpoint_best").symlink_to("3")
    checkpoints.tidy(tmp_path)
    assert (tmp_path / "checkpoint_best").readlink().name == "0"


def test_the_last_ones_and_the_best_stay(make, tmp_path):
    from kimi_eagle.training import checkpoints

    for epoch, loss in enumerate([3.0, 1.0, 2.0, 2.5, None]):
        make(tmp_path / str(epoch), epoch=epoch, loss=loss)
    assert checkpoints.prune(tmp_path, 9) == []
    assert checkpoints.prune(tmp_path, 2) == [0, 2]
    assert checkpoints.epochs(tmp_path) == [1, 3, 4]
    assert checkpoints.prune(tmp_path, 1) == [3]
    assert checkpoints.state(tmp_path)["epoch"] == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "4"]


def test_killed_while_deleting_an_old_one(make, tmp_path):
    from kimi_eagle.training import checkpoints

    make(tmp_path / "1", epoch=1, loss=1.0)
    (make(tmp_path / "old-0") / "model.safetensors").unlink()
    assert checkpoints.tidy(tmp_path) == []
    assert checkpoints.epochs(tmp_path) == [1] and not (tmp_path / "old-0").exists()


def test_a_mount_that_is_lost_is_no_torn_checkpoint(make, tmp_path, monkeypatch):
    """Set aside, it would be trained again from the start, with a word in a log."""
    from kimi_eagle.training import checkpoints

    make(tmp_path / "0")

    def lost(path, _mode):
        raise OSError(116, "Stale file handle", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "open", lost, raising=False)
        with pytest.raises(OSError, match="Stale"):
            checkpoints.tidy(tmp_path)
    assert checkpoints.tidy(tmp_path) == [] and checkpoints.epochs(tmp_path) == [0]


def test_a_folder_that_does_not_go_ends_nothing(make, tmp_path, monkeypatch):
    """As on NFS, where a file that somebody has open stays as `.nfs...` until it is closed."""
    from kimi_eagle.training import checkpoints

    def busy(path, ignore_errors=False):
        for file in path.glob("model.safetensors"):
            file.rename(path / ".nfs01")
        if not ignore_errors:
            raise OSError(39, "Directory not empty", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "rmtree", busy)
        make(tmp_path / "0")
        for step in (4, 5, 6):
            make(tmp_path / "saving-1", epoch=1, local_step=step)
            checkpoints.commit(tmp_path, 1)
        assert checkpoints.prune(tmp_path, 1) == [0]
        make(tmp_path / "saving-1", epoch=1, local_step=7)
        checkpoints.tidy(tmp_path)
    assert checkpoints.epochs(tmp_path) == [1] and checkpoints.state(tmp_path)["local_step"] == 6
    checkpoints.tidy(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


def test_a_torn_random_state_is_a_torn_checkpoint(make, tmp_path):
    from kimi_eagle.training import checkpoints, states

    folder = make(tmp_path / "0")
    states.save_random(folder, 0)
    assert checkpoints.fault(folder) is None
    path = folder / "random-0.pt"
    path.write_bytes(path.read_bytes()[:100])
    assert checkpoints.fault(folder) is not None


def test_random_state_of_python_numpy_and_torch(tmp_path):
    import random

    import numpy as np
    import torch

    from kimi_eagle.training import states

    def draw() -> tuple[float, float, float]:
        # An odd number of normal ones: both generators keep a second one for later.
        return random.gauss(), np.random.normal(), torch.randn(()).item()  # noqa: NPY002

    draw()
    states.save_random(tmp_path, 3)
    first = draw()
    with states.random_state_kept():
        draw()
    second = draw()
    states.load_random(tmp_path, 3)
    assert (draw(), draw()) == (first, second)
    states.load_random(tmp_path, 4)  # another rank: nothing there, nothing changed
