"""The `shards` backend: samples by content, without copies, through speculators' registry."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest

from kimi_eagle.errors import RunError


@pytest.fixture
def view(corpus, tmp_path):
    from kimi_eagle.training.backend import write_view

    tokens = write_view(corpus.shards, corpus.order, tmp_path / "view")
    assert tokens == sum(len(ids) for ids, _, _ in corpus.states.values())
    return tmp_path / "view"


def test_rows_are_read_by_content(corpus, view):
    import torch

    from kimi_eagle.training.backend import ShardsTransfer

    transfer = ShardsTransfer(view, corpus.shards)
    for row, sample_id in enumerate(corpus.order):
        got = transfer.get_cached(row)
        ids, _, states = corpus.states[sample_id]
        assert got["hidden_states"].dtype == torch.bfloat16
        assert got["token_ids"].dtype == torch.int64
        assert torch.equal(got["hidden_states"], states)
        assert got["token_ids"].tolist() == ids.tolist()


def test_states_are_not_copied(corpus, view):
    from kimi_eagle.shards import ShardSet
    from kimi_eagle.training.backend import ShardsTransfer
    from kimi_eagle.training.tensors import bfloat16_view

    states = ShardSet(corpus.shards).sample(corpus.order[3])["hidden_states"]
    assert bfloat16_view(states).data_ptr() == states.ctypes.data
    transfer = ShardsTransfer(view, corpus.shards)
    first, second = (transfer.get_cached(3)["hidden_states"].data_ptr() for _ in range(2))
    assert first == second, "two reads of a sample are two views of one map"


def test_view_is_what_speculators_reads(corpus, view):
    import torch
    from datasets import load_from_disk

    data = load_from_disk(str(view))
    assert data.column_names == ["input_ids", "loss_mask", "seq_len", "sample_id"]
    row = data[5]
    ids, mask, _ = corpus.states[corpus.order[5]]
    assert row["input_ids"].dtype == row["loss_mask"].dtype == torch.int64
    assert row["input_ids"].tolist() == ids.tolist()
    assert row["loss_mask"].tolist() == mask.tolist()
    assert row["sample_id"] == corpus.order[5]


def test_view_is_kept_or_written_anew(corpus, view):
    from kimi_eagle.training.backend import write_view

    before = (view / "view.json").stat().st_mtime_ns
    write_view(corpus.shards, corpus.order, view)
    assert (view / "view.json").stat().st_mtime_ns == before
    write_view(corpus.shards, corpus.order[::-1], view)
    from kimi_eagle.training.backend import ShardsTransfer

    got = ShardsTransfer(view, corpus.shards).get_cached(0)["token_ids"]
    assert got.tolist() == corpus.states[corpus.order[-1]][0].tolist()
    assert [p.name for p in view.parent.iterdir()] == ["view"], "nothing temporary is left"


def test_missing_sample_is_an_error(corpus, tmp_path):
    from kimi_eagle.training.backend import ShardsTransfer, write_view

    with pytest.raises(RunError):
        write_view(corpus.shards[:1], corpus.order, tmp_path / "view")
    assert list(tmp_path.iterdir()) == []
    write_view(corpus.shards, corpus.order, tmp_path / "view")
    transfer = ShardsTransfer(tmp_path / "view", corpus.shards[:1])
    with pytest.raises(RunError):
        for row in range(len(corpus.order)):
            transfer.get_cached(row)


def test_too_few_samples(corpus, tmp_path):
    from kimi_eagle.training.backend import write_view

    with pytest.raises(RunError, match="1 samples"):
        write_view(corpus.shards, corpus.order[:1], tmp_path / "view")


def test_transfer_travels_to_data_workers(corpus, view):
    from kimi_eagle.training.backend import ShardsTransfer

    transfer = ShardsTransfer(view, corpus.shards)
    transfer.get_cached(0)
    data = pickle.dumps(transfer)
    assert len(data) < 10_000, "no states, ids or open files in it"
    again = pickle.loads(data)
    assert np.array_equal(again.get_cached(1)["token_ids"], transfer.get_cached(1)["token_ids"])


def test_speculators_own_command_line_knows_the_backend():
    code = """
import kimi_eagle.training.backend
from speculators.train.config import TrainConfig
config = TrainConfig.resolve(["--verifier-name-or-path", "x", "--data-path", "y",
    "--hidden-states-backend", "shards", "--shards", "some/folder"])
assert config.data.hidden_states_backend == "shards"
assert config.backend_args == {"shards": "some/folder"}, config.backend_args
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
