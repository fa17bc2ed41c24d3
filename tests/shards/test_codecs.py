"""Codecs: lossless gives back every bit, fp8 is torch's e4m3 with our scales."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch

from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.shards import Shard, ShardWriter, codecs


def states(*shape: int, seed: int = 0, scale: float = 300.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.normal(size=shape) * scale).bfloat16()
    return values.view(torch.int16).numpy().view(np.uint16)


def values(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize(
    "bits",
    [
        np.arange(1 << 16, dtype=np.uint16),  # every pattern, NaNs and infinities too
        np.zeros(0, np.uint16),
        np.full(codecs.PIECE + 3, 0x3F80, np.uint16),
        np.random.default_rng(0).integers(0, 1 << 16, 2 * codecs.PIECE + 5).astype(np.uint16),
        states(3, 4, 7),
    ],
    ids=["all", "none", "equal", "random", "states"],
)
def test_lossless_gives_back_every_bit(bits):
    block = b"".join(bytes(memoryview(p)) for p in codecs.compress(bits))
    assert np.array_equal(codecs.decompress(memoryview(block), bits.size), bits.reshape(-1))


def test_lossless_is_what_the_format_says():
    bits = states(700, 4, 1000)
    block = b"".join(bytes(memoryview(p)) for p in codecs.compress(bits))
    low, frames = np.frombuffer(block[: bits.size], np.uint8), block[bits.size :]
    high = np.frombuffer(pa.Codec("zstd").decompress(frames, bits.size), np.uint8)
    assert np.array_equal(high.astype(np.uint16) << 8 | low, bits.reshape(-1))
    assert frames.count(b"\x28\xb5\x2f\xfd") >= 3  # several frames end to end
    assert len(block) < 0.75 * bits.nbytes


@pytest.mark.parametrize("cut", [0, 10, -1, -100])
def test_a_block_cut_short_is_an_error(cut):
    bits = states(50, 4, 100)
    block = b"".join(bytes(memoryview(p)) for p in codecs.compress(bits))
    with pytest.raises(ValueError):
        codecs.decompress(memoryview(block[:cut]), bits.size)


def test_table_is_torchs_e4m3():
    byte = torch.arange(256, dtype=torch.uint8)
    expected = byte.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(codecs._e4m3(), expected, equal_nan=True)


def test_fp8_is_torchs_own_rounding():
    bits = states(70, 4, 96)
    bits[3] = 0
    bits[5, 2] = values(bits[5, 2].copy()).mul(1e4).view(torch.int16).numpy().view(np.uint16)
    stored, scales, _ = codecs.quantise(bits)
    given = values(bits).float()
    scale = given.abs().amax(-1) / 448
    assert np.allclose(scales, scale, atol=1e-30)
    scale = torch.from_numpy(scales)[..., None]
    wanted = ((given / scale).to(torch.float8_e4m3fn).float() * scale).bfloat16()
    found = values(codecs.dequantise(stored, scales))
    assert torch.equal(found, wanted) and not found[3].any()


def test_fp8_of_a_long_sample_takes_little_memory():
    import tracemalloc

    bits = states(20, 4, 64).repeat(400, axis=0)
    codecs.quantise(bits[:70])
    tracemalloc.start()
    stored, scales, error = codecs.quantise(bits)
    assert tracemalloc.get_traced_memory()[1] < 0.8 * bits.nbytes
    tracemalloc.stop()
    alone = codecs.quantise(bits[64 * 9 + 5 : 64 * 9 + 6])
    assert np.array_equal(stored[64 * 9 + 5], alone[0][0]) and error.values[0] == 8000 * 64


def test_fp8_never_overflows():
    largest = torch.finfo(torch.bfloat16).max
    for value in (
        largest,
        -largest,
        1e-38,
        0.0,
        float(torch.finfo(torch.bfloat16).smallest_normal),
    ):
        given = torch.full((2, 1, 8), value).bfloat16()
        given[1, 0, 3] = 0
        bits = given.view(torch.int16).numpy().view(np.uint16)
        stored, scales, _ = codecs.quantise(bits)
        back = values(codecs.dequantise(stored, scales))
        assert back.isfinite().all() and torch.allclose(back.float(), given.float(), rtol=0.07)


def test_fp8_that_would_decode_to_inf_or_nan_is_seen():
    stored, scales, _ = codecs.quantise(states(9, 2, 33))
    assert codecs.finite_fp8(stored, scales)
    for byte in (0x7F, 0xFF):
        bad = stored.copy()
        bad[4, 1, 32] = byte
        assert not codecs.finite_fp8(bad, scales)
    for scale in (np.nan, np.inf, -np.inf, 1e37):
        bad = scales.copy()
        bad[8, 1] = scale
        assert not codecs.finite_fp8(stored, bad)


def test_error_report_against_direct_figures(tmp_path):
    samples = [states(n, 2, 64, seed=n, scale=10.0**n) for n in (1, 2, 3)]
    with ShardWriter(tmp_path, "u", (3, 9), 64, {}, codec="fp8") as writer:
        for i, bits in enumerate(samples):
            writer.add(str(i), bits, np.zeros(len(bits)), np.ones(len(bits)))
    shard = Shard(tmp_path / "u.safetensors")
    before = values(np.concatenate(samples)).double()
    after = values(np.concatenate([shard.at(i)["hidden_states"] for i in range(3)])).double()
    for i, found in enumerate(writer.error.layers((3, 9))):
        x, error = before[:, i], before[:, i] - after[:, i]
        assert found["layer"] == (3, 9)[i]
        assert found["sqnr_db"] == pytest.approx(
            10 * float(torch.log10(x.square().sum() / error.square().sum())), abs=0.01
        )
        assert found["max_error"] == float(error.abs().max())
        assert found["zeros"] == float(((after[:, i] == 0) & (x != 0)).double().mean())
        assert 25 < found["sqnr_db"] < 50
    import json

    kept = codecs.ErrorReport.from_sums(json.loads(shard.index.meta["error"]))
    assert kept.layers((3, 9)) == writer.error.layers((3, 9))


@pytest.mark.parametrize("size", [1, codecs.CHECK - 1, codecs.CHECK, codecs.CHECK + 1])
def test_finite_sees_any_place(size):
    bits = np.full(size, 0xFF7F, np.uint16)  # the largest magnitude that is finite
    assert codecs.finite(bits)
    for place in {0, size // 2, size - 1}:
        for bad in (0x7F80, 0xFF80, 0x7F81, 0xFFFF):
            other = bits.copy()
            other[place] = bad
            assert not codecs.finite(other)
            assert codecs.finite(other) == bool(values(other).isfinite().all())


def test_unknown_codec(tmp_path):
    with pytest.raises(UsageError, match="expected one of raw, lossless, fp8"):
        ShardWriter(tmp_path, "u", (1, 2), 8, {}, codec="zip")
    assert list(tmp_path.iterdir()) == []


def test_raw_and_lossless_have_equal_content_digests(tmp_path):
    bits = states(9, 2, 64)
    found = []
    for codec in ("raw", "lossless"):
        with ShardWriter(tmp_path, codec, (1, 2), 64, {}, codec=codec) as writer:
            writer.add("a", bits, np.arange(9), np.ones(9))
        found.append(Shard(tmp_path / f"{codec}.safetensors").index.digests)
    assert found[0] == found[1]


def test_the_queue_is_bounded_and_the_wait_is_told(tmp_path, monkeypatch):
    """A disk that is slower than the engine holds `add` up; nothing piles up in memory."""
    import time

    writer = ShardWriter(tmp_path, "u", (1, 2), 64, {}, queue_bytes=3 * 256 * 10, threads=1)
    store, waiting = writer._line._take, []

    def slow(found):
        time.sleep(0.02)
        waiting.append(writer._line._waiting)
        store(found)

    writer._line._take = slow
    for i in range(20):
        writer.add(str(i), states(10, 2, 64), np.zeros(10), np.ones(10))
    writer.close()
    assert max(waiting) <= 3 * 2560 and 0.1 < writer.stalled < 2
    assert len(Shard(tmp_path / "u.safetensors")) == 20


def test_the_first_fault_is_told_and_the_rest_is_dropped(tmp_path):
    bits = states(4, 2, 64)
    bad = bits.copy()
    bad[1, 1, 1] = 0x7F80
    writer = ShardWriter(tmp_path, "u", (1, 2), 64, {}, threads=2)
    with pytest.raises(RunError, match="first at token 1.*sample bad|sample bad.*first at token 1"):
        writer.add("good", bits, np.zeros(4), np.ones(4))
        writer.add("bad", bad, np.zeros(4), np.ones(4))
        for i in range(500):
            writer.add(str(i), bits, np.zeros(4), np.ones(4))
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_no_thread_is_left(tmp_path):
    code = f"""
import numpy as np, threading
from pathlib import Path
from kimi_eagle.shards import ShardWriter
for end in ("close", "abort"):
    w = ShardWriter(Path({str(tmp_path)!r}), end, (1, 2), 64, {{}})
    w.add("a", np.zeros((4, 2, 64), np.uint16), np.zeros(4), np.ones(4))
    getattr(w, end)()
    print(threading.active_count())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["1", "1"], done.stderr
