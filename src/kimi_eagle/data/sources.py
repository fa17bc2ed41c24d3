"""Files and folders of rows: found, read as a stream, chosen by weight and limit.

Reads JSONL, JSON (a list, or JSON Lines under that name), Parquet, and folders of them: name
order, a Hugging Face layout (data/train-00000-of-00002.parquet) or a `save_to_disk` folder.
Writes nothing. A fault of a file stops with UsageError; a fault of a row yields a Reject.

The seeded order is by blake2b(seed, row id), not a random generator's: it does not depend on the
order of the files, on a library's version or on the other rows, so that a grown source keeps the
order of the rows it had. The price: all chosen rows are in memory, about twice their text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle.data import formats
from kimi_eagle.data.formats import FORMATS, detect_format, parse_row
from kimi_eagle.data.rejects import DUPLICATE, Reject
from kimi_eagle.data.rows import Conversation, TokenRow
from kimi_eagle.errors import RowError, UsageError

if TYPE_CHECKING:
    from kimi_eagle.recipe import SourceSection

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
METADATA = {"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"}
SPLIT = re.compile(r"^(?P<split>[A-Za-z_]+)-\d+-of-\d+\.")
BATCH_ROWS = 512

ROW_FAULTS = (TypeError, ValueError, AttributeError, KeyError, RecursionError, OverflowError)
"""What odd values of a row raise in the middle of parsing (dates, bytes, nesting 900 deep)."""

Row = Conversation | TokenRow


@dataclass
class Selection:
    """The chosen rows in seeded order, what each source gave, and what was rejected.

    counts_by_source: name -> {"read": rows seen, "rejected": bad ones and duplicates,
    "taken": rows chosen}.
    """

    rows: list[Row]
    counts_by_source: dict[str, dict[str, int]]
    rejects: list[Reject] = field(default_factory=list)


def select(
    sources: Iterable[SourceSection],
    seed: int,
    *,
    vocab_size: int | None = None,
    by_prompt: bool = False,
) -> Selection:
    """Read all sources; drop duplicates; apply weights and limits; order by the seed.

    Duplicates are rows of equal content (by_prompt: of equal prompts, for answers that will be
    generated); the first in the order of the recipe and its files stays. Weighted sources share an
    amount such that the scarcest gives all it has and no row is repeated; unweighted ones give all.
    """
    sources = list(sources)
    kept: dict[str, list[Row]] = {}
    counts: dict[str, dict[str, int]] = {}
    rejects: list[Reject] = []
    seen: dict[str, tuple[str, int]] = {}
    for section in sources:
        name = _name(section)
        rows = kept.setdefault(name, [])
        count = counts.setdefault(name, {"read": 0, "rejected": 0, "taken": 0})
        for row in read_rows(section, vocab_size=vocab_size):
            count["read"] += 1
            if not isinstance(row, Reject):
                key = row.prompt_id if by_prompt and isinstance(row, Conversation) else row.id
                if key not in seen:
                    seen[key] = row.where
                    rows.append(row)
                    continue
                first = seen[key]
                detail = f"same content as {first[0]} row {first[1]}"
                row = Reject(DUPLICATE, detail, row.where[0], row.where[1], name)
            count["rejected"] += 1
            rejects.append(row)
        rows.sort(key=lambda r: _rank(seed, r))
        kept[name] = rows[: section.limit]
    amounts = _amounts({_name(s): (len(kept[_name(s)]), s.weight) for s in sources})
    chosen = []
    for name, amount in amounts.items():
        counts[name]["taken"] = amount
        chosen += kept[name][:amount]
    chosen.sort(key=lambda r: _rank(seed, r))
    return Selection(chosen, counts, rejects)


def read_rows(
    source: SourceSection, *, vocab_size: int | None = None
) -> Iterator[Conversation | TokenRow | Reject]:
    """The rows of one source in file order; bad ones as Reject.

    vocab_size: token ids of pre-tokenised rows must lie below it. UsageError: no such path, a file
    that is empty, of an unknown kind or broken as a whole, a table without the wanted columns.
    """
    name = _name(source)
    for file in find_files(Path(source.path)):
        for number, row in raw_rows(file, source.format):
            where = (str(file), number)
            try:
                if isinstance(row, RowError):
                    raise row
                parsed = parse_row(
                    row, source.format, source=name, where=where, vocab_size=vocab_size
                )
                parsed.id  # noqa: B018  what cannot be hashed as JSON cannot be worked with
            except RowError as e:
                yield Reject.of(e, where, name)
            except ROW_FAULTS as e:
                fault = RowError("bad-value", f"{type(e).__name__}: {e}"[:200])
                yield Reject.of(fault, where, name)
            else:
                yield parsed


def find_files(path: Path) -> list[Path]:
    """The data files of a source, in the order in which they are read."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        dangling = " (a dangling link)" if path.is_symlink() else ""
        raise UsageError(f"no such source{dangling}", where=path, expected="a file or a folder")
    if (path / "dataset_dict.json").is_file():
        splits = sorted(p.parent.name for p in path.glob("*/state.json"))
        raise UsageError("several splits", where=path, fix=f"name one of them: {', '.join(splits)}")
    if (path / "state.json").is_file():
        try:
            state = json.loads((path / "state.json").read_bytes())
            return [path / entry["filename"] for entry in state["_data_files"]]
        except (ValueError, KeyError, TypeError):
            raise UsageError("not a save_to_disk folder", where=path / "state.json") from None
    for folder in (path, path / "data"):
        found = sorted(
            p
            for p in (folder.iterdir() if folder.is_dir() else ())
            if p.suffix in SUFFIXES and p.is_file() and p.name not in METADATA
        )
        if found:
            return _train_split(found)
    raise UsageError("no data files in folder", where=path, expected=", ".join(SUFFIXES))


def _train_split(files: list[Path]) -> list[Path]:
    """Of a folder with named splits only `train`: held-out rows must not slip in."""
    splits = {f: m["split"] for f in files if (m := SPLIT.match(f.name))}
    if len(set(splits.values())) < 2:
        return files
    train = [f for f in files if splits.get(f) == "train"]
    if not train:
        found = ", ".join(sorted(set(splits.values())))
        raise UsageError(f"several splits: {found}", where=files[0].parent, fix="name one file")
    return train


def raw_rows(file: Path, format: str) -> Iterator[tuple[int, Any]]:
    """(row number from 1, row or the RowError that reading it gave).

    format: as in the recipe; of a table the columns that it needs are read, for `any` all.
    """
    if file.suffix not in SUFFIXES:
        raise UsageError("unknown kind of file", where=file, expected=", ".join(SUFFIXES))
    try:
        if file.stat().st_size == 0:
            raise UsageError("empty file", where=file, expected="at least one row")
        table = file.suffix in (".parquet", ".arrow")
        reader = _table(file, format) if table else _json_rows(file)
        count = 0
        for count, item in enumerate(reader, 1):  # noqa: B007
            yield item
    except OSError as e:
        raise UsageError(f"cannot be read: {e.strerror or e}", where=file) from None
    if not count:
        raise UsageError("empty file", where=file, expected="at least one row")


def _json_rows(file: Path) -> Iterator[tuple[int, Any]]:
    with open(file, "rb") as f:
        if f.read(3) != b"\xef\xbb\xbf":  # a byte order mark is skipped
            f.seek(0)
        start = f.tell()
        first = f.read(4096).lstrip()[:1]
        f.seek(start)
        if file.suffix == ".json" and first == b"[":
            yield from enumerate(_json_list(file, f.read()), 1)
            return
        number = 0
        while line := f.readline(formats.MAX_ROW_BYTES + 1):
            number += 1
            if len(line) > formats.MAX_ROW_BYTES and not line.endswith(b"\n"):
                while (rest := f.readline(formats.MAX_ROW_BYTES)) and not rest.endswith(b"\n"):
                    pass
                detail = f"longer than {formats.MAX_ROW_BYTES >> 20} MiB"
                yield number, RowError("giant-row", detail)
            elif line.strip():
                yield number, _json_line(line)


def _json_line(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as e:
        return RowError("not-utf8", f"byte {e.start}: {e.reason}")
    except (ValueError, RecursionError) as e:
        return RowError("broken-json", str(e))


def _json_list(file: Path, data: bytes) -> list[Any]:
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError as e:
        raise UsageError(f"not UTF-8: byte {e.start}", where=file) from None
    except (ValueError, RecursionError) as e:
        raise UsageError(f"broken JSON: {e}", where=file) from None


def _table(file: Path, format: str) -> Iterator[tuple[int, Any]]:
    """Rows of a Parquet or Arrow file; only the columns that the format needs are read."""
    import pyarrow as pa

    try:
        columns, batches = _parquet(file) if file.suffix == ".parquet" else _arrow(file)
        if format == "any":
            yield from enumerate((row for b in batches(columns) for row in _text_rows(b)), 1)
            return
        if format == "auto":
            format = detect_format(columns) or ""
        needed = FORMATS.get(format)
        if not needed or not set(needed) <= set(columns):
            missing = [c for c in needed or () if c not in columns]
            wanted = (
                "+".join(needed)
                if needed
                else ("one of " + ", ".join("+".join(n) for n in FORMATS.values()))
            )
            raise UsageError(
                f"no column {', '.join(missing)}" if missing else "no known columns",
                where=file,
                expected=f"{wanted}; it has {', '.join(columns)}",
            )
        beside = () if format == "tokens" else ("tools", "system")
        wanted = [*needed, *(c for c in beside if c in columns)]
        number = 0
        for batch in batches(wanted):
            for row in _token_rows(batch) if format == "tokens" else _text_rows(batch):
                number += 1
                yield number, row
    except pa.ArrowInvalid as e:
        raise UsageError(f"not {file.suffix[1:]}: {str(e).splitlines()[0]}", where=file) from None


def _text_rows(batch: Any) -> Iterator[Any]:
    """Rows as dicts; one whose bytes are no UTF-8 as a RowError, without losing its neighbours."""
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    for i in range(batch.num_rows):
        try:
            yield batch.slice(i, 1).to_pylist()[0]
        except UnicodeDecodeError as e:
            yield RowError("not-utf8", f"byte {e.start}: {e.reason}")


def _parquet(file: Path):
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file)
    return table.schema_arrow.names, lambda columns: table.iter_batches(BATCH_ROWS, columns=columns)


def _arrow(file: Path):
    """An Arrow file as `datasets` writes it (the stream format) or in the file format."""
    import pyarrow as pa

    source = pa.memory_map(str(file))
    try:
        reader = pa.ipc.open_stream(source)
        batches: Iterable[pa.RecordBatch] = reader
    except pa.ArrowInvalid:
        source.seek(0)
        reader = pa.ipc.open_file(source)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    return reader.schema.names, lambda columns: (b.select(columns) for b in batches)


def _token_rows(batch: Any) -> Iterator[dict[str, Any]]:
    """Token lists as NumPy arrays: a Python list of integers would take ten times the time."""
    import pyarrow as pa

    ids, mask = batch.column("input_ids"), batch.column("loss_mask")
    for name, column in (("input_ids", ids), ("loss_mask", mask)):
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise UsageError(f"column {name} is {column.type}", expected="a list of integers")
    for i in range(batch.num_rows):
        yield {
            name: column[i].values.to_numpy(zero_copy_only=False)
            if hasattr(column[i], "values") and column[i].is_valid
            else None
            for name, column in (("input_ids", ids), ("loss_mask", mask))
        }


def _name(source: SourceSection) -> str:
    return source.name or Path(source.path).stem


def _rank(seed: int, row: Row) -> bytes:
    return hashlib.blake2b(f"{seed}\0{row.id}".encode(), digest_size=16).digest()


def _amounts(have: dict[str, tuple[int, float | None]]) -> dict[str, int]:
    """Rows to take of each source: (rows there, weight or None) -> amount."""
    weighted = {n: (rows, w) for n, (rows, w) in have.items() if w is not None}
    per_weight = min((rows / w for rows, w in weighted.values()), default=0.0)
    return {
        name: rows if w is None else min(rows, int(per_weight * w + 1e-9))
        for name, (rows, w) in have.items()
    }
