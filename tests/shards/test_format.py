"""FORMAT.md is enough: a reader and a writer made from that page alone, with plain libraries."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file

from kimi_eagle.shards import Shard, ShardSet, ShardWriter

LAYERS, HIDDEN = [2, 15, 30], 40


def given() -> list[tuple[str, torch.Tensor, np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(5)
    found = []
    for i, n in enumerate((3, 1, 17)):
        states = torch.from_numpy(rng.normal(size=(n, len(LAYERS), HIDDEN)) * 50).bfloat16()
        ids = rng.integers(0, 49152, n).astype(np.int32)
        found.append((f"{i:032x}", states, ids, rng.random(n) < 0.5))
    return found


def read_by_the_page(path: Path) -> dict[str, tuple[torch.Tensor, np.ndarray, np.ndarray]]:
    """No line of ours in here."""
    table = pq.read_table(path.with_name(path.stem + ".index.parquet"))
    with safe_open(path, "pt") as f:
        meta = f.metadata()
        tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    assert meta["format"] == "shard/2"
    width = (len(json.loads(meta["layers"])), int(meta["hidden_size"]))
    found = {}
    for row in table.to_pylist():
        part = slice(row["start"], row["start"] + row["n_tokens"])
        ids, mask = tensors["token_ids"][part].numpy(), tensors["loss_mask"][part].numpy()
        if meta["codec"] == "raw":
            states = tensors["hidden_states"][part]
            stored = states.view(torch.uint8).numpy().tobytes()
        elif meta["codec"] == "fp8":
            e4m3, scales = tensors["hidden_states"][part], tensors["scales"][part]
            states = (e4m3.float() * scales[..., None]).bfloat16()
            stored = e4m3.view(torch.uint8).numpy().tobytes() + scales.numpy().tobytes()
        else:
            block = tensors["blocks"][row["offset"] : row["offset"] + row["n_bytes"]].numpy()
            count = row["n_tokens"] * width[0] * width[1]
            high = pa.Codec("zstd").decompress(block[count:].tobytes(), count)
            bits = np.frombuffer(high, np.uint8).astype(np.uint16) << 8 | block[:count]
            states = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
            states = states.reshape(row["n_tokens"], *width)
            stored = bits.tobytes()
            whole = block.tobytes() + ids.tobytes() + mask.tobytes()
            assert row["stored_xxh3"] == xxhash.xxh3_64_hexdigest(whole)
        assert row["xxh3"] == xxhash.xxh3_64_hexdigest(stored + ids.tobytes() + mask.tobytes())
        found[row["sample_id"]] = states, ids, mask.astype(bool)
    return found


@pytest.mark.parametrize("codec", ["raw", "lossless", "fp8"])
def test_a_reader_made_from_the_page(tmp_path, codec):
    meta = {"verifier_id": "abc", "engine": {"vllm": "0.31.0"}}
    with ShardWriter(tmp_path, "u", LAYERS, HIDDEN, meta, codec=codec) as writer:
        for sample in given():
            writer.add(*sample)
    path = tmp_path / "u.safetensors"
    found, ours = read_by_the_page(path), Shard(path)
    for name, states, ids, mask in given():
        got = found[name]
        assert np.array_equal(got[1], ids) and np.array_equal(got[2], mask)
        if codec != "fp8":
            assert torch.equal(got[0], states)
        bits = got[0].view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(ours.sample(name)["hidden_states"], bits)
    head = path.read_bytes()[: 8 + int.from_bytes(path.read_bytes()[:8], "little")]
    kept = {k.decode(): v.decode() for k, v in index_meta(path).items()}
    assert kept["kimi_eagle.header_xxh3"] == xxhash.xxh3_128_hexdigest(head)
    assert kept["kimi_eagle.bytes"] == str(path.stat().st_size)
    assert kept["kimi_eagle.tokens"] == "21" and len(head) % 4096 == 0


def index_meta(path: Path) -> dict[bytes, bytes]:
    return pq.read_metadata(path.with_name(path.stem + ".index.parquet")).metadata


def test_a_writer_made_from_the_page(tmp_path):
    """safetensors' own writer (another order of tensors, no padding) and pyarrow."""
    samples = given()
    path = tmp_path / "by-hand.safetensors"
    meta = {"format": "shard/2", "codec": "raw", "layers": json.dumps(LAYERS)}
    meta["hidden_size"] = str(HIDDEN)
    tensors = {
        "token_ids": torch.from_numpy(np.concatenate([s[2] for s in samples])),
        "hidden_states": torch.cat([s[1] for s in samples]),
        "loss_mask": torch.from_numpy(np.concatenate([s[3] for s in samples]).astype(np.uint8)),
    }
    save_file(tensors, path, metadata=meta)
    data = path.read_bytes()
    sizes = [len(s[2]) for s in samples]
    digests = [
        xxhash.xxh3_64_hexdigest(
            s[1].view(torch.uint8).numpy().tobytes() + s[2].tobytes() + s[3].tobytes()
        )
        for s in samples
    ]
    ids = [s[0] for s in samples]
    starts = np.cumsum([0, *sizes[:-1]])
    table = pa.table(
        {
            "sample_id": pa.array(ids, pa.string()),
            "start": pa.array(starts, pa.int64()),
            "n_tokens": pa.array(sizes, pa.int32()),
            "xxh3": pa.array(digests, pa.string()),
        }
    )
    own = {
        "format": "shard-index/2",
        "codec": "raw",
        "layers": meta["layers"],
        "hidden_size": meta["hidden_size"],
        "tokens": str(sum(sizes)),
        "bytes": str(len(data)),
        "header_xxh3": xxhash.xxh3_128_hexdigest(data[: 8 + int.from_bytes(data[:8], "little")]),
    }
    content = json.dumps(own, sort_keys=True).encode()
    for column in ("n_tokens", "sample_id", "start", "xxh3"):
        values = table.column(column).to_pylist()
        if isinstance(values[0], str):
            ends = np.cumsum([0, *map(len, values)]).astype(np.int32)
            content += ends.tobytes() + "".join(values).encode()
        else:
            content += np.asarray(values, np.int64 if column == "start" else np.int32).tobytes()
    own["index_xxh3"] = xxhash.xxh3_64_hexdigest(content)
    table = table.replace_schema_metadata({f"kimi_eagle.{k}": v for k, v in own.items()})
    pq.write_table(table, tmp_path / "by-hand.index.parquet")

    store = ShardSet([path])
    assert list(store.shards[0].faults()) == []
    for (name, states, token_ids, mask), number in zip(samples, range(3), strict=True):
        got = store.proven(number)
        assert store.ids[number] == name
        assert np.array_equal(got["token_ids"], token_ids)
        assert np.array_equal(got["loss_mask"], mask)
        assert np.array_equal(
            got["hidden_states"], states.view(torch.int16).numpy().view(np.uint16)
        )


def test_the_page_names_every_key_and_column(root):
    from kimi_eagle.shards import index

    page = (root / "src/kimi_eagle/shards/FORMAT.md").read_text()
    for word in (*index.COLUMNS, *index.LOSSLESS_COLUMNS, index.INDEX_FORMAT, index.SELF):
        assert word in page
