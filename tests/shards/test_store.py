"""Many shards as one store."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from kimi_eagle.errors import RunError
from kimi_eagle.shards import Shard, ShardSet, ShardWriter
from kimi_eagle.shards.layout import index_path

sys.path.insert(0, str(Path(__file__).parent))
from shard_samples import HIDDEN, META, bits, make, write  # noqa: E402


def test_set_over_many_shards(tmp_path):
    all_samples = [make(5, seed=s) for s in range(4)]
    paths = [write(tmp_path, s, f"u{i}") for i, s in enumerate(all_samples)]
    store = ShardSet(paths)
    assert len(store) == 20 and list(store) == [s[0] for part in all_samples for s in part]
    for name, states, _, _ in (s for part in reversed(all_samples) for s in part):
        assert name in store
        assert np.array_equal(store.sample(name)["hidden_states"], bits(states))
    assert all(store.check(i) is None for i in range(20))
    assert "x" not in store
    with pytest.raises(RunError, match="no shard holds sample x"):
        store.sample("x")


def test_set_refuses_other_layers(tmp_path):
    one = write(tmp_path, make())
    with ShardWriter(tmp_path, "u1", (1, 2, 3, 30), HIDDEN, META) as writer:
        writer.add(*make(1, seed=1)[0])
    with pytest.raises(RunError, match=r"u1.*layers \[1, 2, 3, 30\].*expected layers \[2, 15"):
        ShardSet([one, tmp_path / "u1.safetensors"])


def test_same_sample_twice_counts_once(tmp_path):
    sample = make(1)[0]
    shard = Shard(write(tmp_path, [sample, *make(2, seed=1), sample]))
    assert list(shard.faults()) == []
    assert np.array_equal(shard.sample(sample[0])["hidden_states"], bits(sample[1]))
    assert len(ShardSet([shard.path])) == 3


def test_more_shards_than_files_may_be_open(tmp_path):
    """Each map holds a descriptor; a set of 60 shards works where 40 may be open."""
    code = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        import numpy as np
        from kimi_eagle.shards import ShardSet, ShardWriter, store
        store.OPEN = 20
        folder = Path(sys.argv[1])
        for i in range(60):
            with ShardWriter(folder, f"u{i:02d}", [1, 2], 64, {}) as w:
                w.add(str(i), np.full((3, 2, 64), i, np.uint16), np.zeros(3), np.ones(3))
        opened = ShardSet(sorted(folder.glob("*.safetensors")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        for _ in range(3):
            found = [opened.proven(i)["hidden_states"][0, 0, 0] for i in range(60)]
            assert found == list(range(60))
            assert [s["hidden_states"][0, 0, 0] for s in opened.read(range(60))] == found
    """)
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, timeout=60)


def test_a_pickled_set_opens_only_what_it_reads(tmp_path):
    """With the digests that the indexes had: one that changed since is no index of this set."""
    paths = [write(tmp_path, make(5, seed=s), f"u{s}") for s in range(4)]
    store = ShardSet(paths)
    copy = pickle.dumps(store)
    index_path(paths[0]).unlink()
    index_path(paths[1]).write_bytes(index_path(paths[2]).read_bytes())
    again = pickle.loads(copy)
    assert again.ids == store.ids and np.array_equal(again.lengths, store.lengths)
    assert np.array_equal(again.proven(17)["hidden_states"], store.at(17)["hidden_states"])
    assert again.number(store.ids[12]) == 12
    with pytest.raises(RunError, match="cannot be read"):
        again.proven(0)
    with pytest.raises(RunError, match="not the one that was recorded"):
        again.proven(5)
