"""Parts of a step by themselves; whole runs are in test_train.py."""

from __future__ import annotations


def test_no_step_waits_for_the_device_to_be_looked_at(monkeypatch) -> None:
    """A list that becomes a tensor on a GPU is copied there behind all that is going on."""
    import torch

    from kimi_eagle.training.steps import StepTrainer, _nothing_found

    def copied(*_args):
        raise AssertionError("a copy to the device")

    trainer = object.__new__(StepTrainer)
    trainer._not_finite = _nothing_found("cpu")
    monkeypatch.setattr(torch.Tensor, "new_tensor", copied)
    good, bad = torch.tensor(1.0), torch.tensor(float("inf"))
    for step, loss, norm in ((3, good, good), (4, good, bad), (5, bad, bad)):
        trainer.global_step = step
        trainer._look(step - 2, loss, norm)
    assert trainer._not_finite.tolist() == [5, 2, 1.0, float("inf")], "the first one"
