"""Each patch is still needed: the unpatched library fails, the patched one does not.

A test that fails here after an upgrade says that its patch can go.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a CPU machine")


@pytest.fixture
def patches():
    from kimi_eagle.training import patches

    patches.remove()
    yield patches
    patches.remove()


def test_synchronize(patches):
    with pytest.raises(RuntimeError, match="accelerator"):
        torch.accelerator.synchronize()
    patches.apply("cpu")
    torch.accelerator.synchronize()


def test_checkpoint_device(patches):
    from speculators.train import checkpointer

    assert checkpointer.get_current_device() == "cuda:0"
    patches.apply("cpu")
    assert checkpointer.get_current_device() == "cpu"


def test_process_group_of_ranks_on_cpus(patches, monkeypatch):
    from speculators.train import distributed

    for name, value in {"LOCAL_RANK": 0, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setattr(distributed, "_is_distributed", False)  # put back at the end
    with pytest.raises((RuntimeError, ValueError), match="accelerator"):
        distributed.maybe_setup_distributed()
    patches.apply("cpu")
    distributed.maybe_setup_distributed()
    try:
        assert torch.distributed.get_backend() == "gloo"
        assert distributed.is_distributed() and distributed.get_dp_size() == 1
    finally:
        distributed.maybe_destroy_distributed()
    assert not distributed.is_distributed()


def test_progress_bar(patches, capfd):
    from speculators.train import trainer

    list(trainer.tqdm(range(3), desc="Epoch 0"))
    assert capfd.readouterr().out.strip(), "speculators draws on a stdout that is no terminal"
    patches.apply("cpu")
    assert list(trainer.tqdm(range(3), desc="Epoch 0")) == [0, 1, 2]
    assert not capfd.readouterr().out


def test_apply_twice_and_remove(patches):
    original = torch.accelerator.synchronize
    patches.apply("cpu")
    patches.apply("cpu")
    assert torch.accelerator.synchronize is not original
    patches.remove()
    assert torch.accelerator.synchronize is original


def test_a_gpu_run_keeps_its_accelerator(patches):
    original = torch.accelerator.synchronize
    patches.apply("cuda")
    assert torch.accelerator.synchronize is original


def test_every_patch_says_why(patches):
    for patch in patches.CPU_PATCHES + patches.QUIET_PATCHES:
        assert "0.9.0" in patch.library and patch.place and patch.reason
