"""What a tokens part tells of itself in a moment: its footer and its small columns.

Parquet's own statistics answer for all token ids; no sample is read where they are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Part:
    """What columns and footer of a tokens part tell: ids and n_loss at least and at most, the
    longest sample, how many samples and how many of them truncated. None: an empty part."""

    path: Path
    ids: tuple[int, int] | None
    least_loss: int | None
    longest: int
    samples: int
    truncated: int


def look(path: Path) -> Part:
    """Opens the part twice, reads its small columns; RunError where it is none (read_part)."""
    import pyarrow.compute as pc

    from kimi_eagle.data.samples import TRUNCATED, read_part

    table = read_part(path, ["n_tokens", "n_loss", "finish_reason"])
    return Part(
        path,
        _bounds_of_ids(path),
        pc.min(table.column("n_loss")).as_py(),
        pc.max(table.column("n_tokens")).as_py() or 0,
        len(table),
        pc.sum(pc.equal(table.column("finish_reason"), TRUNCATED)).as_py() or 0,
    )


def _bounds_of_ids(path: Path) -> tuple[int, int] | None:
    """Least and greatest token id by the file's statistics, else by reading them."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        columns = [file.schema.column(i).path for i in range(file.metadata.num_columns)]
        at = next(i for i, name in enumerate(columns) if name.startswith("input_ids"))
        groups = range(file.metadata.num_row_groups)
        told = [file.metadata.row_group(g).column(at).statistics for g in groups]
        if all(s is not None and s.has_min_max for s in told):
            return (min(s.min for s in told), max(s.max for s in told)) if told else None
        values = file.read(["input_ids"]).column(0).combine_chunks().flatten()
    found = pc.min_max(values).as_py()
    return None if found["min"] is None else (found["min"], found["max"])
