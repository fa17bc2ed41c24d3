"""Shards: what is written is what is read, by us and by plain libraries; damage shows."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

from kimi_eagle.errors import RunError
from kimi_eagle.shards import Shard, ShardSet, ShardWriter
from kimi_eagle.shards.layout import index_path

sys.path.insert(0, str(Path(__file__).parent))
from shard_samples import CODECS, HIDDEN, LAYERS, META, bits, make, write  # noqa: E402


def test_round_trip_at_random(tmp_path):
    samples = make(60)
    shard = Shard(write(tmp_path, samples))
    assert shard.sample_ids == [s[0] for s in samples]
    assert (shard.layers, shard.hidden_size) == (LAYERS, HIDDEN)
    assert shard.tokens == sum(len(s[2]) for s in samples)
    for i in np.random.default_rng(1).permutation(len(samples)):
        name, states, ids, mask = samples[i]
        got = shard.sample(name)
        assert np.array_equal(got["hidden_states"], bits(states))
        assert got["token_ids"].dtype == np.int32 and np.array_equal(got["token_ids"], ids)
        assert got["loss_mask"].dtype == np.bool_ and np.array_equal(got["loss_mask"], mask)
        assert shard.n_tokens(name) == len(ids)
    assert list(shard.faults()) == []
    with pytest.raises(RunError, match="no sample nobody"):
        shard.sample("nobody")


def test_plain_safetensors_reads_it(tmp_path):
    samples = make()
    with safe_open(write(tmp_path, samples), "pt") as f:
        assert torch.equal(f.get_tensor("hidden_states"), torch.cat([s[1] for s in samples]))
        assert f.get_tensor("token_ids").tolist() == [int(t) for s in samples for t in s[2]]
        assert f.get_tensor("loss_mask").dtype == torch.uint8
        meta = f.metadata()
    assert (meta["format"], meta["codec"], meta["verifier_id"]) == ("shard/2", "raw", "abc")
    assert json.loads(meta["layers"]) == list(LAYERS)
    assert json.loads(meta["engine"]) == META["engine"]


def test_index_opens_in_datasets(tmp_path):
    from datasets import load_dataset

    samples = make()
    shard = write(tmp_path, samples)
    index = shard.with_name("u0.index.parquet")
    rows = load_dataset(
        "parquet", data_files=str(index), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert rows["sample_id"][:] == [s[0] for s in samples]
    assert rows["start"][:] == np.cumsum([0] + [len(s[2]) for s in samples])[:-1].tolist()
    types = {f.name: str(f.type) for f in pq.read_schema(index)}
    assert types == {"sample_id": "string", "start": "int64", "n_tokens": "int32", "xxh3": "string"}


def test_digest_is_the_documented_one(tmp_path):
    import xxhash

    samples = make(3)
    shard = write(tmp_path, samples)
    digests = pq.read_table(shard.with_name("u0.index.parquet")).column("xxh3").to_pylist()
    for (_, states, ids, mask), digest in zip(samples, digests, strict=True):
        written = bits(states).tobytes() + ids.tobytes() + mask.tobytes()
        assert digest == xxhash.xxh3_64(written).hexdigest()


@pytest.mark.parametrize("codec", CODECS)
def test_equal_input_gives_equal_bytes(tmp_path, codec):
    """Whatever the number of threads, the order of the metadata, the length of the queue."""
    digests = set()
    for name, meta in (("a", META), ("b", dict(reversed(META.items())))):
        (tmp_path / name).mkdir()
        more = {"threads": 4, "n_tokens": 99} if name == "b" else {"threads": 1, "queue_bytes": 1}
        writer = ShardWriter(tmp_path / name, "u", LAYERS, HIDDEN, meta, codec=codec, **more)
        for sample in make(50):
            writer.add(*sample)
        digests.add(tuple(hashlib.sha256(p.read_bytes()).hexdigest() for p in writer.close()))
    assert len(digests) == 1


def test_numpy_bits_and_torch_give_the_same(tmp_path):
    name, states, ids, mask = make(1)[0]
    one = write(tmp_path, [(name, states, ids.tolist(), mask.tolist())], "one")
    two = write(tmp_path, [(name, bits(states), ids, mask)], "two")
    assert one.read_bytes() == two.read_bytes()
    with pytest.raises(TypeError, match="float32"):
        write(tmp_path, [(name, states.float(), ids, mask)], "three")


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_is_refused_by_name(tmp_path, bad):
    samples = make()
    samples[3][1][-1, 2, 5] = bad
    with pytest.raises(RunError) as e:
        write(tmp_path, samples)
    assert "sample 0-3, layer 27" in e.value.line()
    assert list(tmp_path.iterdir()) == []


def test_largest_finite_values_pass(tmp_path):
    name, states, ids, mask = make(1)[0]
    states[0, 0, 0], states[0, 0, 1] = torch.finfo(torch.bfloat16).max, -0.0
    assert np.array_equal(
        Shard(write(tmp_path, [(name, states, ids, mask)])).sample(name)["hidden_states"],
        bits(states),
    )


@pytest.mark.parametrize("what", ["states", "mask", "empty", "layers"])
def test_shapes_must_agree(tmp_path, what):
    name, states, ids, mask = make(1)[0]
    broken = {
        "states": (name, states[:-1], ids, mask),
        "mask": (name, states, ids, np.append(mask, True)),
        "empty": (name, states[:0], ids[:0], mask[:0]),
        "layers": (name, states[:, :3], ids, mask),
    }[what]
    with pytest.raises(RunError, match="sample 0-0"):
        write(tmp_path, [broken])
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_refused_at_once(tmp_path):
    with pytest.raises(RunError, match="No space left"):
        ShardWriter(tmp_path, "u", LAYERS, HIDDEN, META, n_tokens=10**13)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("codec", CODECS)
def test_no_samples(tmp_path, codec):
    shard = Shard(write(tmp_path, [], codec=codec))
    assert list(shard.faults()) == []
    assert (shard.tokens, shard.sample_ids) == (0, [])


def test_nothing_has_its_name_before_close(tmp_path):
    writer = ShardWriter(tmp_path, "u0", LAYERS, HIDDEN, META)
    for sample in make():
        writer.add(*sample)
    assert all(p.name.startswith(".tmp-") for p in tmp_path.iterdir())
    assert sorted(p.name for p in writer.close()) == ["u0.index.parquet", "u0.safetensors"]
    assert len(list(tmp_path.iterdir())) == 2


def test_error_inside_with_removes_all(tmp_path):
    with pytest.raises(KeyError), ShardWriter(tmp_path, "u0", LAYERS, HIDDEN, META) as writer:
        writer.add(*make(1)[0])
        raise KeyError("x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_full_disk_leaves_nothing(tmp_path, codec):
    """A file size limit stands for the full disk: the kernel refuses the write half-way."""
    code = textwrap.dedent(f"""
        import resource, signal, sys
        from pathlib import Path
        import numpy as np
        from kimi_eagle.errors import RunError
        from kimi_eagle.shards import ShardWriter
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        n = 100
        try:
            with ShardWriter(Path(sys.argv[1]), "u0", [1, 2], 64, {{}},
                             codec={codec!r}) as w:
                for i in range(100):
                    w.add(str(i), np.ones((n, 2, 64), np.uint16), np.zeros(n), np.ones(n))
        except RunError as e:
            print(e.line())
            sys.exit(1)
    """)
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "cannot write the shard" in done.stdout and "u0.safetensors" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_full_disk_at_the_index_leaves_nothing(tmp_path, monkeypatch):
    writer = ShardWriter(tmp_path, "u0", LAYERS, HIDDEN, META)
    writer.add(*make(1)[0])
    real = os.replace

    def refuse(source, target):
        if str(target).endswith(".safetensors"):
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RunError, match="No space left") as e:
        writer.close()
    assert isinstance(e.value.__cause__, OSError)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder(tmp_path):
    with pytest.raises(RunError, match="cannot write the shard"):
        ShardWriter(tmp_path / "missing", "u0", LAYERS, HIDDEN, META)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_writer_leaves_temporary_names_only(tmp_path, number):
    code = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        import numpy as np
        from kimi_eagle.shards import ShardWriter
        w = ShardWriter(Path(sys.argv[1]), "u0", [1, 2], 64, {})
        w.add("a", np.ones((50, 2, 64), np.uint16), np.zeros(50), np.ones(50))
        print("ready", flush=True)
        time.sleep(60)
    """)
    child = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    child.send_signal(number)
    assert child.wait(10) == -number
    child.stdout.close()
    left = [p.name for p in tmp_path.iterdir()]
    assert len(left) == 1 and left[0].startswith(".tmp-")


@pytest.mark.parametrize("cut", [1, 100, 5000, -10, -4000])
def test_truncated_file_gives_no_sample(tmp_path, cut):
    path = write(tmp_path, make(40))
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    with pytest.raises(RunError, match="not a whole shard") as e:
        Shard(path).at(0)
    assert str(path) in e.value.line() and "run extract again" in e.value.line()


def test_longer_file_gives_no_sample(tmp_path):
    path = write(tmp_path, make())
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(RunError, match="not a whole shard"):
        Shard(path).at(0)


def test_file_cut_short_after_it_was_mapped(tmp_path):
    """The next sample says so; touching the missing page would end the process."""
    path = write(tmp_path, make(40))
    store = ShardSet([path])
    store.proven(0)
    os.truncate(path, path.stat().st_size - 5000)
    with pytest.raises(RunError, match="bytes now.*sample 0-39|sample 0-39.*bytes now"):
        store.proven(39)


@pytest.mark.parametrize("codec", CODECS)
def test_one_flipped_bit_is_found_and_named(tmp_path, codec):
    samples = make(20)
    path = write(tmp_path, samples, codec=codec)
    whole = path.read_bytes()
    shard = Shard(path)
    first = 8 + int.from_bytes(whole[:8], "little")
    places = {first: 0, len(whole) - 1: 19}  # the first state, the last mask
    places[len(whole) - shard.tokens - 1] = 19  # the last token id
    for offset, row in places.items():
        data = bytearray(whole)
        data[offset] ^= 1
        path.write_bytes(data)
        damaged = Shard(path)
        assert [f.sample_id for f in damaged.faults()] == [samples[row][0]]
        assert damaged.check(row) and not damaged.check(1)
        with pytest.raises(RunError, match=f"sample {samples[row][0]}"):
            ShardSet([path]).proven(row)
    for offset in (9, first - 1):  # the header's JSON, its padding
        data = bytearray(whole)
        data[offset] ^= 1
        path.write_bytes(data)
        (fault,) = Shard(path).faults()
        assert fault.sample_id is None and "header" in fault.what


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}"])
def test_other_files_are_refused(tmp_path, data):
    path = tmp_path / "u0.safetensors"
    path.write_bytes(data)
    with pytest.raises(RunError, match="index cannot be read"):
        Shard(path)
    whole = write(tmp_path, make(), "u1")
    index_path(whole).rename(index_path(path))
    with pytest.raises(RunError, match="not a whole shard"):
        Shard(path).at(0)


def test_index_must_be_there_whole_and_its_own(tmp_path):
    path = write(tmp_path, make())
    index = index_path(path)
    other = write(tmp_path, make(7, seed=3), "other")
    whole = index.read_bytes()
    for data, message in (
        (whole[:-7], "damaged"),
        (b"", "damaged"),
        (index_path(other).read_bytes(), "not a whole shard"),
        (None, "cannot be read"),
    ):
        index.unlink() if data is None else index.write_bytes(data)
        with pytest.raises(RunError, match=message):
            Shard(path).at(0)
    index.write_bytes(whole)
    with pytest.raises(RunError, match="not the one that was recorded"):
        Shard(path, Shard(other).index.digest)
    assert Shard(path, Shard(path).index.digest).check(0) is None


def test_every_flip_in_an_index_is_found(tmp_path):
    """By its own digest where it changes what the index says, by the record's in any case."""
    path = write(tmp_path, make())
    index = index_path(path)
    whole = index.read_bytes()
    digest = Shard(path).index.digest
    silent = 0
    for offset in range(0, len(whole), 7):
        data = bytearray(whole)
        data[offset] ^= 1 << offset % 8
        index.write_bytes(data)
        with pytest.raises(RunError):
            Shard(path, digest)
        try:
            opened = Shard(path)
        except RunError:
            continue
        silent += 1  # a byte that means nothing: what is read is right all the same
        assert list(opened.faults()) == []
    assert silent < len(whole) / 14


def test_pickle_and_threads(tmp_path):
    samples = make(30)
    shard = pickle.loads(pickle.dumps(Shard(write(tmp_path, samples))))
    wrong = []

    def read(seed):
        for i in np.random.default_rng(seed).permutation(len(samples)):
            if not np.array_equal(
                shard.sample(samples[i][0])["hidden_states"], bits(samples[i][1])
            ):
                wrong.append(i)

    threads = [threading.Thread(target=read, args=(s,)) for s in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_views_are_read_only_and_not_copies(tmp_path):
    shard = Shard(write(tmp_path, make()))
    states = shard.sample(shard.sample_ids[0])["hidden_states"]
    assert not states.flags.writeable and not states.flags.owndata
    with pytest.raises(ValueError):
        states[0] = 0


def test_states_start_on_a_page(tmp_path):
    with open(write(tmp_path, make()), "rb") as f:
        assert (8 + int.from_bytes(f.read(8), "little")) % 4096 == 0


def test_no_torch_at_import():
    code = "import sys, kimi_eagle.shards; sys.exit(bool({'torch', 'pyarrow'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
