"""Writes one shard: states go to disk as they come, the header last, the names at the very end.

Writes STEM.safetensors and STEM.index.parquet into a folder, first under temporary names; both
get their names (index first) only when all bytes are on disk. A killed process leaves temporary
names only; abort removes them. Equal input gives equal bytes, whatever the number of threads.

`add` hands a sample to threads that check and encode it, another one writes in order. At most
`queue_bytes` of states wait, so that an engine which is faster than the disk is held up instead
of filling the memory; `stalled` says for how long it was.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle import files
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.record import CONTENT
from kimi_eagle.shards import index
from kimi_eagle.shards.codecs import BF16_INFINITY, Encoded, ErrorReport, encode, finite
from kimi_eagle.shards.layout import (
    ALIGN,
    CODECS,
    FORMAT,
    Layout,
    flat,
    header_size,
    index_path,
)

QUEUE_BYTES = 1 << 30
"""States waiting to be written, at most: some 9 samples of 2,048 tokens of Kimi-K2.5."""
SHARE = {"raw": 1.0, "lossless": 0.7, "fp8": 0.5}
"""Size to expect of the states, for the look at the free space."""


class ShardWriter:
    """`with ShardWriter(...) as w: w.add(...)`; leaving without error closes, else aborts.

    layers: layer ids of the states, in order. meta: further strings or JSON-able values for the
    file's metadata (verifier_id, engine, ...). n_tokens: about what will come; a disk without
    room for it is refused at once. threads: of encoding, default half the cores, 4 at most.
    """

    def __init__(
        self,
        folder: Path,
        stem: str,
        layers: Sequence[int],
        hidden_size: int,
        meta: Mapping[str, Any],
        n_tokens: int | None = None,
        *,
        codec: str = "raw",
        threads: int | None = None,
        queue_bytes: int = QUEUE_BYTES,
    ):
        if codec not in CODECS:
            raise UsageError(f"unknown codec {codec!r}", expected=f"one of {', '.join(CODECS)}")
        self.path = Path(folder) / f"{stem}.safetensors"
        self.codec = codec
        self.tokens = 0
        """Tokens added so far."""
        self.stalled = 0.0
        """Seconds that `add` waited for the queue."""
        self.digests: dict[Path, tuple[str, str | None]] = {}
        """After close: (xxh3-128, what it is of): of the shard's header, of the whole index."""
        self.error = ErrorReport()
        """fp8: what the samples written so far lost."""
        self._layers, self._hidden = tuple(layers), hidden_size
        own = {"format": FORMAT, "codec": codec, "layers": json.dumps(list(layers))}
        own["hidden_size"] = str(hidden_size)
        self._meta = own | {k: _text(v) for k, v in meta.items() if k not in own}
        self._header = header_size(codec, self._meta, len(self._layers), hidden_size)
        self._rows: dict[str, list[Any]] = {
            k: [] for k in (*index.COLUMNS, *index.LOSSLESS_COLUMNS)
        }
        self._tail: dict[str, list[np.ndarray]] = {"scales": [], "token_ids": [], "loss_mask": []}
        self._written = 0
        self._fd = -1
        self._temp = files.temporary_name(self.path)
        self._line = _Line(self._store, threads or min(4, max(1, _cores() // 2)), queue_bytes)
        try:
            _room_for(self.path.parent, (n_tokens or 0) * self._per_token * SHARE[codec])
            self._fd = os.open(self._temp, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
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
    def content(self) -> str:
        """`content/1:` and 32 hex digits that stand for all samples in their order: equal for raw
        and lossless, and whatever the files are named."""
        return content_of(*(self._rows[k] for k in ("sample_id", "n_tokens", "xxh3")))

    @property
    def _per_token(self) -> int:
        return len(self._layers) * self._hidden * 2

    def add(self, sample_id: str, states: Any, token_ids: Any, loss_mask: Any) -> None:
        """Append a sample; its arrays belong to the writer from now on.

        states: [T, layers, hidden], torch.bfloat16 or numpy uint16 (its bits); token_ids [T]
        integers; loss_mask [T] booleans. T >= 1. RunError, and the shard is dropped, where
        shapes disagree, a state is inf or NaN (names sample, layer, token) or the disk is full;
        the last two are told by a later `add`, or by `close`.
        """
        states = bits(states)
        ids = np.ascontiguousarray(token_ids, dtype=np.int32)
        mask = np.ascontiguousarray(loss_mask).astype(np.bool_).view(np.uint8)
        count = len(ids)
        want = (count, len(self._layers), self._hidden)
        if states.shape != want or mask.shape != (count,) or ids.ndim != 1 or not count:
            self.abort()
            raise RunError(
                f"states {states.shape}, token ids {ids.shape}, mask {mask.shape}",
                where=f"sample {sample_id}",
                expected=f"states {want}",
            )
        self.tokens += count
        self._checked(self._line.put, states.nbytes, self._encode, sample_id, states, ids, mask)

    def close(self) -> list[Path]:
        """Finish both files, fsync and name them; -> [shard, index]. RunError on a full disk."""
        self._checked(self._line.finish)
        self.stalled = self._line.stalled
        index_file = index_path(self.path)
        index_temp = files.temporary_name(index_file)
        try:
            padding = -self._written % ALIGN if self.codec == "lossless" else 0
            self._write(b"\0" * padding)
            layout = Layout(self.codec, self.tokens, len(self._layers), self._hidden, self._written)
            for part in (p for parts in self._tail.values() for p in parts):
                self._write(flat(part))
            header = layout.header(self._meta, self._header)
            os.pwrite(self._fd, header, 0)
            os.fsync(self._fd)
            data = index.write(self._rows, self._index_meta(header))
            os.close(self._fd)
            self._fd = -1
            with open(index_temp, "xb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(index_temp, index_file)
            os.replace(self._temp, self.path)
            files.fsync_dir(self.path.parent)
        except OSError as e:
            index_temp.unlink(missing_ok=True)
            index_file.unlink(missing_ok=True)
            self.abort()
            raise _disk_error(e, self.path) from e
        self.digests = {
            self.path: (files.bytes_digest(header), "header"),
            index_file: (files.bytes_digest(data), None),
        }
        return [self.path, index_file]

    def abort(self) -> None:
        """Remove what was written; nothing stays under any name. Harmless when repeated."""
        self._line.drop()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._temp.unlink(missing_ok=True)

    # -- in the threads ------------------------------------------------------------------------

    def _encode(
        self, sample_id: str, states: np.ndarray, ids: np.ndarray, mask: np.ndarray
    ) -> tuple[str, np.ndarray, np.ndarray, Encoded]:
        if not finite(states):
            bad = np.argwhere((states & BF16_INFINITY) == BF16_INFINITY)
            raise RunError(
                f"{len(bad)} inf or NaN in the hidden states, first at token {bad[0][0]}",
                where=f"sample {sample_id}, layer {self._layers[int(bad[0][1])]}",
                expected="finite values",
            )
        return sample_id, ids, mask, encode(self.codec, states, ids, mask)

    def _store(self, found: tuple[str, np.ndarray, np.ndarray, Encoded]) -> None:
        """Write an encoded sample; called in the order of `add`, by one thread."""
        sample_id, ids, mask, encoded = found
        row = {
            "sample_id": sample_id,
            "start": self._rows["start"][-1] + self._rows["n_tokens"][-1]
            if self._rows["start"]
            else 0,
            "n_tokens": len(ids),
            "xxh3": encoded.xxh3,
            "offset": self._written,
            "n_bytes": encoded.n_bytes,
            "stored_xxh3": encoded.stored_xxh3,
        }
        for part in encoded.parts:
            self._write(flat(part) if isinstance(part, np.ndarray) else part)
        for name, value in row.items():
            self._rows[name].append(value)
        self._tail["token_ids"].append(ids)
        self._tail["loss_mask"].append(mask)
        if encoded.scales is not None:
            self._tail["scales"].append(encoded.scales)
            self.error.add(encoded.error)

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._written += view.nbytes
        while view:
            view = view[os.write(self._fd, view) :]

    # -- else ----------------------------------------------------------------------------------

    def _checked(self, call: Any, *args: Any) -> None:
        """Call, and turn what went wrong in a thread into one error of ours."""
        try:
            call(*args)
        except OSError as e:
            self.abort()
            raise _disk_error(e, self.path) from e
        except BaseException:
            self.abort()
            raise

    def _index_meta(self, header: bytes) -> dict[str, str]:
        own = {
            "codec": self.codec,
            "layers": self._meta["layers"],
            "hidden_size": self._meta["hidden_size"],
            "tokens": str(self.tokens),
            "bytes": str(self._header + self._written),
            "header_xxh3": files.bytes_digest(header),
        }
        return own | ({"error": json.dumps(self.error.sums())} if self.codec == "fp8" else {})


class _Line:
    """Work that threads do side by side, and another thread takes off in order.

    A fault stops everything; it is raised by the next `put`, or by `finish`.
    """

    def __init__(self, take: Any, threads: int, limit: int):
        self.stalled = 0.0
        self._take, self._threads, self._limit = take, threads, limit
        self._queue: queue.SimpleQueue[tuple[int, Future] | None] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._waiting = 0
        self._fault: BaseException | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._thread: threading.Thread | None = None

    def put(self, size: int, work: Any, *args: Any) -> None:
        """Queue `work(*args)`, when there is room for its `size` bytes."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "shard-encode")
            self._thread = threading.Thread(target=self._run, name="shard-write", daemon=True)
            self._thread.start()
        with self._room:
            start = time.monotonic()
            full = self._waiting and self._waiting + size > self._limit
            while full and self._fault is None:
                self._room.wait()
                full = self._waiting and self._waiting + size > self._limit
            self.stalled += time.monotonic() - start
            if self._fault is not None:
                raise self._fault
            self._waiting += size
        self._queue.put((size, self._pool.submit(work, *args)))

    def finish(self) -> None:
        """Wait until all is taken off."""
        self._end()
        if self._fault is not None:
            raise self._fault

    def drop(self) -> None:
        """Stop as soon as may be; what waits is lost."""
        self._fault = self._fault or RunError("the shard was dropped")
        self._end()

    def _end(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._queue.put(None)
            self._thread.join()
            self._thread = None
            self._pool.shutdown(cancel_futures=True)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            size, future = item
            try:
                if self._fault is None:
                    self._take(future.result())
                else:
                    future.cancel()
            except BaseException as e:
                self._fault = e
            with self._room:
                self._waiting -= size
                self._room.notify()


def content_of(sample_ids: list[str], lengths: list[int], digests: list[str]) -> str:
    """See ShardWriter.content. Another meaning gets another prefix: those are never compared."""
    return CONTENT + files.digest([sample_ids, lengths, digests])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else files.to_json(value)


def bits(states: Any) -> np.ndarray:
    """bf16 bits as contiguous uint16, from numpy uint16 or a torch bfloat16 tensor on CPU."""
    if isinstance(states, np.ndarray):
        if states.dtype != np.uint16:
            raise TypeError(f"states must be uint16 (bf16 bits), got {states.dtype}")
        return np.ascontiguousarray(states)
    import torch

    if states.dtype != torch.bfloat16:
        raise TypeError(f"states must be bfloat16, got {states.dtype}")
    return states.detach().contiguous().view(torch.int16).numpy().view(np.uint16)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _room_for(folder: Path, size: float) -> None:
    """OSError where the disk has less free than `size`. Not posix_fallocate: where a file system
    lacks it, libc writes into every block instead."""
    import errno

    found = os.statvfs(folder)
    if size > found.f_bavail * found.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def _disk_error(error: OSError, path: Path) -> RunError:
    return RunError(
        f"cannot write the shard: {error.strerror}",
        where=path,
        fix="free space or give a folder that can be written; the unit will be done again",
    )
