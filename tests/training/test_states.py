"""Checkpoint states read back: equal, and nothing of the files is held on to."""

from __future__ import annotations

from pathlib import Path


def test_optimizer_states_keep_no_file_open(tmp_path) -> None:
    """A checkpoint is deleted while training goes on. A file of which a map is left becomes
    `.nfs...` on NFS, and its folder cannot be removed."""
    import torch

    from kimi_eagle.training import states

    def trained() -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        return model, [torch.optim.AdamW(model.named_parameters(), lr=0.1)]

    def step(model, optimizers) -> None:
        model(torch.ones(1, 8)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    model, optimizers = trained()
    step(model, optimizers)
    (tmp_path / "0").mkdir()
    saved = states.get_optimizer_state_dict(model, optimizers, options=states.WHOLE)
    torch.save(saved, tmp_path / "0" / "optimizer_state_dict.pt")
    fresh, again = trained()
    states.WholeCheckpointer(tmp_path).load_optimizer_state_dict(fresh, again)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    fresh.load_state_dict(model.state_dict())
    for pair in ((model, optimizers), (fresh, again)):
        step(*pair)
    for name, weight in fresh.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
