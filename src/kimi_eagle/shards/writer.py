"""Writes one shard: states go to disk as they come, the header last, the names at the very end.

Writes STEM.safetensors and STEM.index.parquet into a folder, first under temporary names; both
get their names (index first) only when all bytes are on disk. A killed process leaves temporary
names only; abort removes them. Equal input gives equal bytes. Memory: one sample's states and
5 bytes a token.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle import files
from kimi_eagle.errors import RunError
from kimi_eagle.shards.layout import (
    BF16_INFINITY,
    BF16_MAGNITUDE,
    FORMAT,
    INDEX_FORMAT,
    Layout,
    bytes_digest,
    header_size,
    index_path,
    sample_digest,
)


class ShardWriter:
    """`with ShardWriter(...) as w: w.add(...)`; leaving without error closes, else aborts.

    layers: layer ids of the states, in order. meta: further strings or JSON-able values for the
    file's metadata (verifier_id, engine, ...). n_tokens: total where it is known; then the space
    is reserved at once (a full disk shows before any work is done) and the total is checked.
    """

    def __init__(
        self,
        folder: Path,
        stem: str,
        layers: Sequence[int],
        hidden_size: int,
        meta: Mapping[str, Any],
        n_tokens: int | None = None,
    ):
        self.path = Path(folder) / f"{stem}.safetensors"
        self._layers, self._hidden, self._expected = tuple(layers), hidden_size, n_tokens
        own = {"format": FORMAT, "codec": "raw", "layers": json.dumps(list(layers))}
        self._meta = own | {k: _text(v) for k, v in meta.items() if k not in own}
        self._header = header_size(self._meta, len(self._layers), hidden_size)
        self._ids: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._rows: list[tuple[str, int, int, str]] = []
        self._tokens = 0
        self._fd = -1
        self._temp = files.temporary_name(self.path)
        try:
            self._fd = os.open(self._temp, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            if n_tokens:
                size = self._header + sum(t[2] for t in self._layout(n_tokens).tensors().values())
                _reserve(self._fd, size)
            os.lseek(self._fd, self._header, os.SEEK_SET)
        except OSError as e:
            self.abort()
            raise _disk_error(e, self.path) from e

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    @property
    def tokens(self) -> int:
        """Tokens added so far."""
        return self._tokens

    def add(self, sample_id: str, states: Any, token_ids: Any, loss_mask: Any) -> None:
        """Append a sample.

        states: [T, layers, hidden], torch.bfloat16 or numpy uint16 (its bits); token_ids [T]
        integers; loss_mask [T] booleans. T >= 1. RunError, and the shard is dropped, where
        shapes disagree, a state is inf or NaN (names sample, layer, token) or the disk is full.
        """
        bits = _bits(states)
        ids = np.ascontiguousarray(token_ids, dtype=np.int32)
        mask = np.ascontiguousarray(loss_mask).astype(np.bool_).view(np.uint8)
        count = len(ids)
        want = (count, len(self._layers), self._hidden)
        if bits.shape != want or mask.shape != (count,) or ids.ndim != 1 or not count:
            self._refuse(
                f"states {bits.shape}, token ids {ids.shape}, mask {mask.shape}",
                f"sample {sample_id}",
                f"states {want}",
            )
        if (bits & BF16_MAGNITUDE).max() >= BF16_INFINITY:
            bad = np.argwhere((bits & BF16_MAGNITUDE) >= BF16_INFINITY)
            token, layer = int(bad[0][0]), self._layers[int(bad[0][1])]
            self._refuse(
                f"{len(bad)} inf or NaN in the hidden states, first at token {token}",
                f"sample {sample_id}, layer {layer}",
                "finite values",
            )
        self._rows.append((sample_id, self._tokens, count, sample_digest(bits, ids)))
        self._ids.append(ids)
        self._masks.append(mask)
        self._tokens += count
        self._write(bits)

    def close(self) -> list[Path]:
        """Finish both files, fsync and name them; -> [shard, index]. RunError on a full disk."""
        if self._expected is not None and self._tokens != self._expected:
            self._refuse(f"{self._tokens} tokens written", self.path, f"{self._expected}")
        for part in (*self._ids, *self._masks):
            self._write(part)
        index = index_path(self.path)
        index_temp = files.temporary_name(index)
        try:
            header = self._layout(self._tokens).header(self._meta, self._header)
            os.pwrite(self._fd, header, 0)
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1
            with open(index_temp, "xb") as f:
                f.write(self._index_bytes())
                f.flush()
                os.fsync(f.fileno())
            os.replace(index_temp, index)
            os.replace(self._temp, self.path)
            files.fsync_dir(self.path.parent)
        except OSError as e:
            index_temp.unlink(missing_ok=True)
            index.unlink(missing_ok=True)
            self.abort()
            raise _disk_error(e, self.path) from e
        return [self.path, index]

    def abort(self) -> None:
        """Remove what was written; nothing stays under any name. Harmless when repeated."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._temp.unlink(missing_ok=True)

    def _layout(self, tokens: int) -> Layout:
        return Layout(tokens, len(self._layers), self._hidden)

    def _write(self, array: np.ndarray) -> None:
        view = memoryview(array.reshape(-1).view(np.uint8))
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as e:
            self.abort()
            raise _disk_error(e, self.path) from e

    def _refuse(self, what: str, where: object, expected: str) -> None:
        self.abort()
        raise RunError(what, where=where, expected=expected)

    def _index_bytes(self) -> bytes:
        import pyarrow as pa
        import pyarrow.parquet as pq

        ids, starts, counts, digests = zip(*self._rows, strict=True) if self._rows else [()] * 4
        meta = {
            "kimi_eagle.format": INDEX_FORMAT,
            "kimi_eagle.shard": self.path.name,
            "kimi_eagle.loss_mask_xxh3": bytes_digest(self._masks),
        }
        schema = pa.schema(
            [
                pa.field("sample_id", pa.string()),
                pa.field("start", pa.int64()),
                pa.field("n_tokens", pa.int32()),
                pa.field("xxh3", pa.string()),
            ],
            metadata=meta,
        )
        columns = [list(ids), list(starts), list(counts), list(digests)]
        table = pa.table(
            [pa.array(c, type=f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
        )
        out = io.BytesIO()
        pq.write_table(table, out, compression="zstd")
        return out.getvalue()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else files.to_json(value)


def _bits(states: Any) -> np.ndarray:
    """bf16 bits as contiguous uint16, from numpy uint16 or a torch bfloat16 tensor on CPU."""
    if isinstance(states, np.ndarray):
        if states.dtype != np.uint16:
            raise TypeError(f"states must be uint16 (bf16 bits), got {states.dtype}")
        return np.ascontiguousarray(states)
    import torch

    if states.dtype != torch.bfloat16:
        raise TypeError(f"states must be bfloat16, got {states.dtype}")
    return states.detach().contiguous().view(torch.int16).numpy().view(np.uint16)


def _reserve(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as e:
        import errno

        if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _disk_error(error: OSError, path: Path) -> RunError:
    return RunError(
        f"cannot write the shard: {error.strerror}",
        where=path,
        fix="free space or give a folder that can be written; the unit will be done again",
    )
