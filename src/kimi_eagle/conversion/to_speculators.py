"""Any source of samples as the dataset that speculators' own training reads.

Writes OUT/data-00000-of-00001.arrow with what `load_from_disk` wants beside it (one row a sample:
`input_ids`, `loss_mask`, `seq_len`, `sample_id`), and OUT/hidden_states/hs_{row}.safetensors
(`hidden_states` BF16 [T, L, H], `token_ids` I64 [T]), as its FileTransfer wants them (hs_connectors
0.9.0). OUT/states.json says what speculators has no place for: layer ids, verifier, engine, and the
source; `speculators_files.py` reads it back. Each file of states carries its sample's id and
content digest in its metadata, which other readers pass over.

A file of states gets its name when its bytes are on disk, so what a killed process left is whole
or not there, and the next one goes on behind it, after it compared their bytes with their digests
(and, where the source has none of its own, with what the source says now). Rows are streamed: a
sample at a time in memory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kimi_eagle import files
from kimi_eagle.conversion.sources import Bad, Sample, Source, Stream
from kimi_eagle.conversion.speculators_files import (
    FORMAT,
    PROOF,
    SIGN,
    STATES,
    proof_of,
    read_states,
    states_file,
)
from kimi_eagle.conversion.to_shards import (
    ANOTHER,
    Result,
    check_room,
    common_meta,
    leave_out,
    need,
    other_source,
)
from kimi_eagle.data.rows import sample_id
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.shards import folder
from kimi_eagle.shards.layout import digest64

ARROW = "data-00000-of-00001.arrow"
INFO_FILES = ("dataset_info.json", "state.json")
ROWS = 256
"""Rows an arrow batch."""


def to_speculators(
    source: Source,
    out: Path,
    *,
    skip_damaged: bool = False,
    on_progress: Callable[[int], None] = lambda weight: None,
) -> Result:
    """Write all samples of `source` as a dataset of speculators' into `out`, or go on with it.

    Arguments and errors as `convert.to_shards`; states are written in bfloat16, whatever they
    were stored in.
    """
    folder.claim_folder(out, source.path, SIGN)
    want = {
        "format": FORMAT,
        "layers": list(source.layers),
        "hidden_size": source.hidden_size,
        "source": source.identity(),
    }
    for place in (out, out / STATES):
        folder.sweep(place)
    there = _there(out / STATES)
    if (out / SIGN).exists():
        _same(out, want)
    have = sum(states_file(out, row).stat().st_size for row in there.values())
    check_room(out, need(source, "raw", 1 - min(1.0, have / max(1, source.state_bytes))))
    if not files.create_exclusive(out / SIGN, files.to_json({**want, "complete": False}) + "\n"):
        _same(out, want)  # by another process, a moment ago, or long since
    (out / STATES).mkdir(exist_ok=True)
    export = _Export(source, out, skip_damaged, there, on_progress)
    temp = files.temporary_name(out / "rows")
    try:
        temp.mkdir()
        _write_rows(temp, export.rows(), files.digest(want))
        if not export.found.samples:
            raise RunError("no sample could be converted", where=source.path)
        for name in (ARROW, *INFO_FILES):
            files.fsync_file(temp / name)
            os.replace(temp / name, out / name)
        files.fsync_dir(out)
    except OSError as e:
        raise RunError(
            f"cannot be written: {e.strerror or e}",
            where=e.filename or out,
            fix="free space, then type the same command again",
        ) from e
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    files.write_atomic(
        out / SIGN,
        files.to_json(
            {**want, "meta": export.meta, "samples": export.found.samples, "complete": True}
        )
        + "\n",
    )
    return export.found


class _Export:
    """Writes the files of states; hands out the rows that go with them."""

    def __init__(
        self,
        source: Source,
        out: Path,
        skip_damaged: bool,
        there: dict[str, int],
        on_progress: Callable[[int], None],
    ):
        self.source, self.out, self.skip = source, out, skip_damaged
        self.there, self.on_progress = there, on_progress
        self.found = Result(out)
        self.meta: dict[str, str] | None = None
        """What all samples say alike of who computed them."""
        self._seen: set[str] = set()

    def rows(self) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """(sample_id, token_ids, loss_mask) of each row, whose states are in their file by then."""
        stream = Stream(self.source, 0, load=self._load)
        try:
            while (item := stream.peek()) is not None:
                position = stream.position
                if isinstance(item, Bad):
                    leave_out(item, self.source.name(position), self.skip, self.found)
                elif item.sample_id in self._seen:
                    self.found.repeated += 1
                else:
                    self._keep(item, position)
                    yield item.sample_id, item.token_ids, item.loss_mask
                stream.advance()
                self.on_progress(int(self.source.weights[position]))
        finally:
            stream.close()

    def _load(self, number: int) -> Sample | Bad:
        """As the source does, but without states where these are in their file already."""
        quick = self.there and self.source.proven
        row = self.source.tokens_of(number) if quick else None
        if row is None or isinstance(row, Bad) or row[0] not in self.there:
            return self.source.load(number)
        if sample_id(*row[1:]) != row[0]:  # damaged: `load` says so
            return self.source.load(number)
        return Sample(row[0], np.zeros(0, np.uint16), *row[1:], meta=self.source.meta(number))

    def _keep(self, item: Sample, position: int) -> None:
        """Put a sample's states into the file of the next row."""
        row, self.meta = (
            self.found.samples,
            common_meta(self.meta, item.meta, self._where(position)),
        )
        if self.there.get(item.sample_id) == row and self._whole(item, row, position):
            self.found.kept += 1
        else:
            if not item.states.size:  # it is there, but under another row
                loaded = self.source.load(position)
                if isinstance(loaded, Bad):
                    raise RunError(loaded.what, where=self._where(position))
                item = loaded
            self._write(item, states_file(self.out, row))
        self._seen.add(item.sample_id)
        self.found.samples += 1
        self.found.tokens += len(item.token_ids)
        self.found.bytes += states_file(self.out, row).stat().st_size

    def _whole(self, item: Sample, row: int, position: int) -> bool:
        """Whether a file that is there is as it was written; UsageError where it is, but the source
        says something else now."""
        path = states_file(self.out, row)
        found = read_states(path)
        if not isinstance(found, str):
            states, ids, proof = found
            own = digest64([states, item.token_ids, item.loss_mask.view(np.uint8)])
            same = np.array_equal(ids, item.token_ids) and own == proof.get("xxh3")
            found = "" if same else "the bytes are not those that were written"
        if found:
            self.found.remade.append(f"{path.name}: {found}")
            return False
        if item.states.size and own != _content(item):
            where = self._where(position)
            raise other_source(self.out, f"{where} is not what {path.name} holds of it")
        return True

    def _where(self, position: int) -> str:
        return self.source.name(position)

    def _write(self, item: Sample, path: Path) -> None:
        import torch
        from safetensors.torch import save

        from kimi_eagle.training.tensors import bfloat16_view

        states = np.ascontiguousarray(item.states)
        xxh3 = _content(item)
        if item.xxh3 and item.kind == "bf16" and item.xxh3 != xxh3:
            raise RunError(
                f"content {xxh3} is not that of the source, {item.xxh3}",
                where=f"sample {item.sample_id}",
            )
        tensors = {
            STATES: bfloat16_view(states),
            "token_ids": torch.from_numpy(item.token_ids.astype(np.int64)),
        }
        # One key: safetensors writes several in an order of chance (0.8.0), and equal input is to
        # give equal bytes. Its save_file leaves files of names of its own when it is killed.
        proof = files.to_json({"sample_id": item.sample_id, "xxh3": xxh3})
        files.write_atomic(path, save(tensors, metadata={PROOF: proof}))


def _content(item: Sample) -> str:
    states = np.ascontiguousarray(item.states)
    return digest64([states, item.token_ids, item.loss_mask.view(np.uint8)])


def _same(out: Path, want: dict[str, Any]) -> None:
    """UsageError where `out` is something else already."""
    have = files.read_json(out / SIGN)
    if not isinstance(have, dict):
        raise UsageError("cannot be read", where=out / SIGN, fix=ANOTHER)
    if differing := [k for k, v in want.items() if have.get(k) != v]:
        raise other_source(out, f"{differing[0]} differs")


def _there(folder_: Path) -> dict[str, int]:
    """sample_id -> row of the files of states that are whole (by their headers)."""
    from safetensors import SafetensorError, safe_open

    found = {}
    for path in folder_.glob("hs_*.safetensors"):
        number = path.stem.removeprefix("hs_")
        try:
            with safe_open(path, "pt") as f:
                sample_id = proof_of(f.metadata()).get("sample_id")
        except (SafetensorError, OSError):
            continue
        if number.isdigit() and sample_id:
            found[sample_id] = int(number)
    return found


def _write_rows(temp: Path, rows: Iterator[tuple[str, np.ndarray, np.ndarray]], sign: str) -> None:
    """The arrow file and what `load_from_disk` wants beside it, into the folder `temp`."""
    import pyarrow as pa
    from datasets import Dataset, Features, List, Value, disable_progress_bars

    features = Features(
        {
            "input_ids": List(Value("int32")),
            "loss_mask": List(Value("int8")),
            "seq_len": Value("int32"),
            "sample_id": Value("string"),
        }
    )
    schema = features.arrow_schema
    disable_progress_bars()
    # An empty dataset of this form: its two JSON files say all but the rows.
    empty = Dataset(schema.empty_table(), fingerprint=sign[:16])
    empty.set_format("torch")  # as speculators' preprocessing leaves it (0.9.0)
    empty.save_to_disk(str(temp), num_shards=1)
    with pa.OSFile(str(temp / ARROW), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        batch: list[tuple[str, np.ndarray, np.ndarray]] = []
        for row in rows:
            batch.append(row)
            if len(batch) == ROWS:
                writer.write_batch(_batch(batch, schema))
                batch = []
        if batch:
            writer.write_batch(_batch(batch, schema))


def _batch(rows: list[tuple[str, np.ndarray, np.ndarray]], schema: Any) -> Any:
    import pyarrow as pa

    lengths = [len(r[1]) for r in rows]
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = np.concatenate([r[1] for r in rows])
    mask = np.concatenate([r[2] for r in rows]).view(np.int8)
    columns = [
        pa.ListArray.from_arrays(ends, pa.array(ids, pa.int32())),
        pa.ListArray.from_arrays(ends, pa.array(mask, pa.int8())),
        pa.array(lengths, pa.int32()),
        pa.array([r[0] for r in rows], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
