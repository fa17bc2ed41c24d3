"""Samples with ids, masks or lengths that training cannot count on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from place import TURN, VOCAB, Case, Place

from kimi_eagle.contracts import Facts
from kimi_eagle.data.samples import Sample, write_part


def samples(place: Place, change: Callable[[dict[str, Any]], None] = lambda s: None) -> None:
    """Two parts of four samples, each of two turns of eight tokens; `change` gets the fields of
    the last sample of the second part."""
    generator = np.random.default_rng(0)
    made = []
    for number in range(8):
        ids = generator.integers(0, 250, 32).astype(np.int32)
        mask = np.zeros(32, bool)
        mask[8:16] = mask[20:28] = True
        ids[[15, 27]] = TURN
        fields = {"input_ids": ids, "loss_mask": mask, "source": "s", "finish_reason": "stop"}
        if number == 7:
            change(fields)
        made.append(Sample(**fields))
    paths = []
    for number in range(2):
        # The changed sample first: masks are read of the first part.
        path = place.path / f"{1 - number:05d}.tokens.parquet"
        write_part(path, made[4 * number : 4 * number + 4], {"tokenizer": "", "template": ""})
        paths.insert(0, path)
    place.given["samples"] = paths


def no_part(place: Place) -> None:
    samples(place)
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"input_ids": [[1, 2]]}), place.given["samples"][1])


def foreign_id(place: Place) -> None:
    samples(place, lambda s: s["input_ids"].__setitem__(3, VOCAB))


def rewrite(place: Place, name: str, change: Callable[[list[Any]], list[Any]]) -> None:
    """Good samples with another column in the first part."""
    samples(place)
    change_column(place, name, change)


def change_column(place: Place, name: str, change: Callable[[list[Any]], list[Any]]) -> None:
    """Another column in the first part, as a program other than ours may write it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = place.given["samples"][0]
    table = pq.read_table(path)
    at = table.schema.get_field_index(name)
    column = table.schema.field(at)
    values = pa.array(change(table.column(name).to_pylist()), column.type)
    pq.write_table(table.set_column(at, column, values), path)


def no_loss(place: Place) -> None:
    rewrite(place, "n_loss", lambda values: [0, *values[1:]])


def miscounted(place: Place) -> None:
    rewrite(place, "n_loss", lambda values: [v + 1 for v in values])


def early(place: Place) -> None:
    rewrite(place, "loss_mask", lambda masks: [m[1:] + m[:1] for m in masks])


def late(place: Place) -> None:
    rewrite(place, "loss_mask", lambda masks: [m[-1:] + m[:-1] for m in masks])


def from_the_start(place: Place) -> None:
    def change(fields: dict[str, Any]) -> None:
        fields["loss_mask"][0] = True

    samples(place, change)


def too_long(place: Place) -> None:
    def change(fields: dict[str, Any]) -> None:
        for name in ("input_ids", "loss_mask"):
            fields[name] = np.concatenate([fields[name]] * 8)

    samples(place, change)


def fits(place: Place) -> None:
    too_long(place)
    place.recipe["engine"]["max_model_len"] = 512


def truncated(place: Place) -> None:
    samples(place, lambda s: s.update(finish_reason="length"))


def kept(place: Place) -> None:
    truncated(place)
    place.recipe["prepare"]["keep_truncated_answers"] = True


def other_shift(place: Place) -> None:
    """A library that leaves the mask where it was."""

    def shift_batch(batch: dict[str, Any]) -> dict[str, Any]:
        cut = {"hidden_states": slice(None, -1), "loss_mask": slice(None, -1)}
        names = ("input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask")
        return {n: batch[n][cut.get(n, slice(1, None))] for n in names}

    def look_up(name: str) -> Any:
        return shift_batch if name.endswith(":shift_batch") else Facts.look_up(name)

    place.given["look_up"] = look_up


def source(place: Place, name: str, content: bytes = b"", **section: Any) -> None:
    """The recipe's one source is this file."""
    (place.path / name).write_bytes(content)
    place.recipe["sources"] = [{"path": name, **section}]


def no_prompts(place: Place) -> None:
    """Sources and held-out prompts are one file here."""
    (place.path / "prompts.jsonl").unlink()


def no_held_out(place: Place) -> None:
    place.recipe["benchmark"]["prompts"] = "held_out.jsonl"


def no_other_draft(place: Place) -> None:
    place.recipe["benchmark"]["against"] = ["drafts/absent"]


def anothers_draft(place: Place) -> None:
    place.recipe["benchmark"]["against"] = ["drafts/foreign"]
    (folder := place.path / "drafts/foreign").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    layer = {"vocab_size": VOCAB + 1}
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    (folder / "config.json").write_text(json.dumps(config))


def no_folder(place: Place) -> None:
    """The disk with all of them is not mounted."""
    names = ("chat", "code", "maths")
    place.recipe["sources"] = [{"path": f"mount/{name}.jsonl"} for name in names]
    place.recipe["benchmark"]["prompts"] = "mount/held_out.jsonl"


def empty_folder(place: Place) -> None:
    (place.path / "rows").mkdir()
    place.recipe["sources"] = [{"path": "rows"}]


def empty_part(place: Place) -> None:
    empty_folder(place)
    (place.path / "rows/1.jsonl").write_text('{"prompt": "x"}')
    (place.path / "rows/2.jsonl").write_text("")


def source_pointer(place: Place) -> None:
    source(place, "rows.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def parquet(place: Place, columns: list[str], format: str = "tokens") -> Path:
    """The recipe's one source is a Parquet file with such columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    source(place, "rows.parquet", format=format)
    pq.write_table(pa.table({name: [[1, 2]] for name in columns}), place.path / "rows.parquet")
    return place.path / "rows.parquet"


def tokens(place: Place) -> None:
    parquet(place, ["input_ids", "loss_mask"])


def cut_parquet(place: Place) -> None:
    file = parquet(place, ["input_ids", "loss_mask"])
    file.write_bytes(file.read_bytes()[:-10])


CASES = [
    Case("data-sources", no_prompts, "source prompts: no such source"),
    Case("data-sources", no_held_out, "benchmark.prompts: no such source", good=tokens),
    Case("data-sources", no_folder, "such source (and of source code, source maths, benchmark.pro"),
    Case("data-sources", empty_folder, "no data files in folder"),
    Case("data-sources", empty_part, "empty file"),
    Case("data-sources", lambda p: source(p, "rows.csv", b"a,b"), "unknown kind of file"),
    Case("data-sources", source_pointer, "a git-LFS pointer"),
    Case("data-sources", cut_parquet, "not a Parquet file, or cut off"),
    Case("data-sources", lambda p: parquet(p, ["text"]), "no columns input_ids+loss_mask"),
    Case("data-sources", lambda p: parquet(p, ["text"], "auto"), "no known columns"),
    Case("data-sources", no_other_draft, "benchmark.against absent: no such directory"),
    Case("data-sources", anothers_draft, "for another verifier: vocab_size 385, the verifier has"),
    Case("data-format", no_part, "tokens part cannot be read", good=samples),
    Case("data-token-ids", foreign_id, "token id 384", good=samples),
    Case("data-loss", no_loss, "a sample without loss token", good=samples),
    Case("data-loss", miscounted, "n_loss is not the number", good=samples),
    Case("data-mask", early, "one token before the end of turn", good=samples),
    Case("data-mask", late, "one token after the end of turn", good=samples),
    Case("data-mask", from_the_start, "loss at its first token", good=samples),
    Case("data-lengths", too_long, "a sample has 256 tokens", good=fits),
    Case("data-truncated", truncated, "1 of 8 samples", good=kept),
    Case("data-shift", other_shift, "an answer in places 3 to 5 is trained as", heavy=True),
]
