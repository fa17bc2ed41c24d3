"""The forms of input, the layouts of folders, and the choice of rows."""

from __future__ import annotations

import datetime
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kimi_eagle.data.rows import Conversation, TokenRow
from kimi_eagle.data.sources import find_files, read_rows, select
from kimi_eagle.errors import UsageError
from kimi_eagle.recipe import SourceSection

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
]
FORMS = {
    "messages": {"messages": MESSAGES},
    "parts": {
        "messages": [
            MESSAGES[0],
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": ["Hello"], "name": None, "tool_calls": None},
        ]
    },
    "sharegpt": {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Hello"},
        ]
    },
    "sharegpt with system beside": {
        "system": "Be brief.",
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
    },
    "sharegpt with roles": {"conversations": MESSAGES},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, *MESSAGES[1:]]},
}


def read(path, **section):
    return list(read_rows(SourceSection(path=str(path), **section)))


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_a_conversation_are_one(rows, form):
    path = rows(FORMS[form])
    if form != "parts":  # Arrow has no lists of objects and texts mixed
        pq.write_table(pa.Table.from_pylist([FORMS[form]]), path.with_name("t.parquet"))
        assert read(path.with_name("t.parquet"))[0].messages == MESSAGES
    (row,) = read(path)
    assert row.messages == MESSAGES and row.tools is None
    assert row.id == Conversation("", MESSAGES).id


def test_prompt_tools_and_thinking(rows):
    tool = {"type": "function", "function": {"name": "f"}}
    asked, thought = read(
        rows(
            {"prompt": "Hi", "tools": json.dumps([tool])},
            {"messages": [MESSAGES[1], {"role": "assistant", "content": "A", "thinking": "T"}]},
        )
    )
    assert asked.messages == [MESSAGES[1]] and asked.tools == [tool]
    assert thought.messages[1]["reasoning_content"] == thought.messages[1]["reasoning"] == "T"


@pytest.mark.parametrize("mask", ["bool", "int"])
def test_tokens_from_parquet(tmp_path, mask):
    table = {
        "input_ids": pa.array([[1, 2, 3], [4, 5]], pa.list_(pa.int64())),
        "loss_mask": pa.array(
            [[False, True, True], [False, True]] if mask == "bool" else [[0, 1, 1], [0, 1]]
        ),
    }
    pq.write_table(pa.table(table), tmp_path / "t.parquet", row_group_size=1)
    first, second = read(tmp_path / "t.parquet")
    assert isinstance(second, TokenRow) and second.where == (str(tmp_path / "t.parquet"), 2)
    assert second.input_ids.dtype == np.int32 and second.loss_mask.dtype == bool
    assert second.input_ids.tolist() == [4, 5] and second.loss_mask.tolist() == [False, True]
    assert first.id != second.id


def test_json_list_json_lines_under_that_name_and_byte_order_mark(tmp_path):
    rows = [{"prompt": str(i)} for i in range(3)]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    lines = "\n\n".join(json.dumps(r) for r in rows)
    (tmp_path / "lines.json").write_text(lines)
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    for name, numbers in (
        ("list.json", [1, 2, 3]),
        ("lines.json", [1, 3, 5]),
        ("bom.jsonl", [1, 3, 5]),
    ):
        found = read(tmp_path / name)
        assert [r.messages[0]["content"] for r in found] == ["0", "1", "2"], name
        assert [r.where[1] for r in found] == numbers


def test_folder_in_name_order_and_the_hugging_face_layout(tmp_path):
    for i, name in enumerate(("b.jsonl", "a.parquet", "notes.txt")):
        if name.endswith("parquet"):
            pq.write_table(pa.table({"prompt": [str(i)]}), tmp_path / name)
        else:
            (tmp_path / name).write_text(json.dumps({"prompt": str(i)}))
    assert [r.messages[0]["content"] for r in read(tmp_path)] == ["1", "0"]
    data = tmp_path / "hub" / "data"
    data.mkdir(parents=True)
    for name in ("train-00001-of-00002", "train-00000-of-00002", "test-00000-of-00001"):
        pq.write_table(pa.table({"prompt": [name]}), data / f"{name}.parquet")
    (tmp_path / "hub" / "dataset_info.json").write_text("{}")
    assert [r.messages[0]["content"] for r in read(tmp_path / "hub")] == [
        "train-00000-of-00002",
        "train-00001-of-00002",
    ]
    (data / "train-00000-of-00002.parquet").unlink()
    (data / "train-00001-of-00002.parquet").rename(data / "dev-00000-of-00001.parquet")
    with pytest.raises(UsageError, match="several splits: dev, test"):
        find_files(tmp_path / "hub")


def test_save_to_disk_of_the_datasets_library(tmp_path):
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list([{"messages": MESSAGES}, {"messages": MESSAGES[1:]}] * 3)
    rows.shuffle(seed=1).select(range(4)).save_to_disk(tmp_path / "d", num_shards=2)
    found = read(tmp_path / "d")
    assert [r.messages for r in found] == [
        r["messages"] for r in rows.shuffle(seed=1).select(range(4))
    ]
    DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "dd")
    with pytest.raises(UsageError, match="name one of them: test, train"):
        find_files(tmp_path / "dd")
    assert len(read(tmp_path / "dd" / "train")) == 6


def prompts(rows, name, count, first=0):
    return rows(
        *({"prompt": f"{name} {i}"} for i in range(first, first + count)), name=f"{name}.jsonl"
    )


def texts(selection):
    return [r.messages[0]["content"] for r in selection.rows]


def test_seeded_order_does_not_depend_on_files_and_keeps_as_a_source_grows(rows):
    many = SourceSection(path=str(prompts(rows, "a", 50)))
    found = texts(select([many], 7))
    assert found == texts(select([many], 7)) != texts(select([many], 8))
    assert found != sorted(found, key=lambda t: int(t.split()[1]))
    few = SourceSection(path=str(prompts(rows, "a", 30)))
    assert texts(select([few], 7)) == [t for t in found if int(t.split()[1]) < 30]


def test_limits_and_weights(rows):
    a, b, c = (str(prompts(rows, n, k)) for n, k in (("a", 60), ("b", 40), ("c", 10)))
    limited = select([SourceSection(path=a, limit=5), SourceSection(path=c)], 1)
    assert {k: v["taken"] for k, v in limited.counts_by_source.items()} == {"a": 5, "c": 10}
    whole = texts(select([SourceSection(path=a)], 1))
    assert [t for t in texts(limited) if t[0] == "a"] == whole[:5]
    weighted = select(
        [
            SourceSection(path=a, weight=1.0),
            SourceSection(path=b, weight=3.0),
            SourceSection(path=c),
        ],
        1,
    )
    taken = {k: v["taken"] for k, v in weighted.counts_by_source.items()}
    assert taken == {"a": 13, "b": 40, "c": 10}  # b is the scarcest for its weight
    assert len(weighted.rows) == 63 and len(set(texts(weighted))) == 63


def test_no_duplicates_across_sources(rows):
    a, b = prompts(rows, "a", 3), rows({"prompt": "a 1"}, {"prompt": "b"}, name="b.jsonl")
    found = select([SourceSection(path=str(a)), SourceSection(path=str(b))], 0)
    assert [(r.rule, r.source, r.row) for r in found.rejects] == [("duplicate", "b", 1)]
    assert f"{a} row 2" in found.rejects[0].detail


def test_odd_values_of_a_table_reject_their_row_alone(tmp_path):
    raw = pa.array([b"good", b"bad \xff", b"fine"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"prompt": text}), tmp_path / "text.parquet")
    found = list(read_rows(SourceSection(path=str(tmp_path / "text.parquet"))))
    assert [getattr(r, "rule", "") for r in found] == ["", "not-utf8", ""]

    when = pa.array([[datetime.datetime(2026, 1, 1)], None])
    pq.write_table(pa.table({"prompt": ["a", "b"], "tools": when}), tmp_path / "tools.parquet")
    found = list(read_rows(SourceSection(path=str(tmp_path / "tools.parquet"))))
    assert getattr(found[0], "rule", "").startswith("bad-") and isinstance(found[1], Conversation)

    ids = pa.array([{"a": 1}])
    pq.write_table(pa.table({"input_ids": ids, "loss_mask": [[True]]}), tmp_path / "ids.parquet")
    with pytest.raises(UsageError, match="column input_ids is struct"):
        list(read_rows(SourceSection(path=str(tmp_path / "ids.parquet"))))


def test_rows_nested_too_deep_are_rejected(tmp_path):
    deep = '{"prompt": "a", "tools": [' + '{"a":' * 900 + "1" + "}" * 900 + "]}"
    (tmp_path / "deep.jsonl").write_text(deep + '\n{"prompt": "b"}\n')
    found = list(read_rows(SourceSection(path=str(tmp_path / "deep.jsonl"))))
    assert getattr(found[0], "rule", None) in ("bad-value", "broken-json")
    assert isinstance(found[1], Conversation)
