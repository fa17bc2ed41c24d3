"""Samples of generated answers, their ids, and the tokens parts."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kimi_eagle.data import rows, samples
from kimi_eagle.data.masks import prefix_mask, token_mask
from kimi_eagle.data.rows import Conversation
from kimi_eagle.errors import RunError

META = {"tokenizer": "t", "template": "p"}


def turn(prompt, answer, reason="stop"):
    return {"prompt_ids": prompt, "answer_ids": answer, "finish_reason": reason}


def flat(found):
    return [(s.input_ids.tolist(), s.loss_mask.astype(int).tolist()) for s in found]


def test_turns_that_extend_each_other_are_one_sample():
    turns = [turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6])]
    (sample,) = samples.samples_from_turns(turns, source="s")
    assert flat([sample]) == [([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])]
    assert (sample.source, sample.finish_reason, sample.n_loss) == ("s", "stop", 3)


def test_turns_that_do_not_are_one_sample_each():
    turns = [turn([1, 2], [3, 4]), turn([1, 2, 4, 5], [6])]  # token 3, the thought, was dropped
    assert flat(samples.samples_from_turns(turns)) == [
        ([1, 2, 3, 4], [0, 0, 1, 1]),
        ([1, 2, 4, 5, 6], [0, 0, 0, 0, 1]),
    ]


def test_truncated_answers_are_left_out_counted_and_kept_when_asked():
    turns = [turn([1], [2]), turn([1, 2, 3], [4, 5], "length")]
    assert flat(samples.samples_from_turns(turns)) == [([1, 2], [0, 1])]
    (kept,) = samples.samples_from_turns(turns, keep_truncated=True)
    assert flat([kept]) == [([1, 2, 3, 4, 5], [0, 1, 0, 1, 1])] and kept.finish_reason == "length"
    assert samples.count_truncated(turns) == 1
    assert samples.samples_from_turns(turns[1:]) == []
    # A truncated turn in the middle is context.
    middle = [turn([1], [2], "length"), turn([1, 2, 3], [4])]
    assert flat(samples.samples_from_turns(middle)) == [([1, 2, 3, 4], [0, 0, 0, 1])]


def test_sample_id_is_the_hash_that_the_format_says():
    sample = samples.make_sample([1, 70000], [False, True])
    data = struct.pack("<ii", 1, 70000) + b"\x00\x01"
    assert sample.sample_id == hashlib.blake2b(data, digest_size=16).hexdigest()
    assert samples.sample_id([1, 70000], [0, 1]) == sample.sample_id
    assert samples.sample_id(np.array([1, 70000]), np.array([1, 1])) != sample.sample_id


def test_part_round_trip(tmp_path):
    made = [
        samples.make_sample(range(i, i + 5 + i), [False] + [True] * (4 + i), f"s{i}", "stop")
        for i in range(4)
    ]
    samples.write_part(tmp_path / "p.parquet", made, META)
    table = samples.read_part(tmp_path / "p.parquet")
    assert table.schema.equals(samples.schema()) and table.schema.metadata[b"template"] == b"p"
    assert table.column("n_tokens").to_pylist() == [5, 6, 7, 8]
    assert table.column("n_loss").to_pylist() == [4, 5, 6, 7]
    again = samples.read_samples(tmp_path / "p.parquet")
    assert [s.sample_id for s in again] == [s.sample_id for s in made]
    assert table.column("sample_id").to_pylist() == [s.sample_id for s in made]
    assert [(s.source, s.finish_reason) for s in again] == [(f"s{i}", "stop") for i in range(4)]
    part = samples.read_part(tmp_path / "p.parquet", ["input_ids", "loss_mask"])
    assert part.column_names == ["input_ids", "loss_mask"]
    assert [p.name for p in tmp_path.iterdir()] == ["p.parquet"]


def test_parts_of_equal_samples_have_equal_bytes(tmp_path):
    made = [samples.make_sample([1, 2], [0, 1])]
    for name in "ab":
        samples.write_part(tmp_path / name, made, META)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    samples.write_part(tmp_path / "none", [], META)
    assert samples.read_samples(tmp_path / "none") == []


def test_part_refuses_a_sample_without_loss_token(tmp_path):
    with pytest.raises(ValueError, match="without loss token"):
        samples.write_part(tmp_path / "p", [samples.make_sample([1], [False])], META)
    assert not list(tmp_path.iterdir())


def test_reading_what_is_no_part(tmp_path):
    (tmp_path / "text").write_text("no")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other")
    metadata = {"kimi_eagle.format": "tokens/1"}
    wrong = pa.table({"input_ids": pa.array([[1]], pa.list_(pa.int64()))}, metadata=metadata)
    pq.write_table(wrong, tmp_path / "wrong")
    for name, match in (
        ("text", "cannot be read"),
        ("gone", "cannot be read"),
        ("other", "not a tokens part"),
        ("wrong", "column sample_id"),
    ):
        with pytest.raises(RunError, match=match):
            samples.read_part(tmp_path / name)


def conversation(*roles):
    return Conversation("s", [{"role": r, "content": f"{r}{i}"} for i, r in enumerate(roles)])


def test_open_turns_drop_given_answers_and_keep_the_users_side():
    def names(c):
        return [[m["content"] for m in turn] for turn in rows.open_turns(c)]

    assert names(conversation("system", "user", "assistant", "user")) == [
        ["system0", "user1"],
        ["user3"],
    ]
    assert names(conversation("assistant", "user", "user", "assistant")) == [["user1", "user2"]]
    assert names(conversation("user", "assistant", "system")) == [["user0"]]
    # With tool results the given calls are context, and the last open turn alone is answered.
    assert names(conversation("user", "assistant", "tool", "assistant")) == [
        ["user0", "assistant1", "tool2"]
    ]


def test_prompt_id_leaves_given_answers_out():
    a, b = conversation("user", "assistant"), conversation("user")
    assert a.id != b.id and a.prompt_id == b.prompt_id


def test_masks_by_position():
    offsets = [(0, 3), (3, 4), (4, 4), (4, 8), (8, 9)]
    assert token_mask(offsets, [(3, 8)]) == [False, True, True, True, False]
    assert token_mask(offsets, [(2, 4)]) == [True, True, False, False, False]
    assert token_mask(offsets, [(0, 1), (8, 9)]) == [True, False, False, False, True]
    assert prefix_mask([1, 2, 3, 4], [([1, 2], [1, 2, 3])]) == [False, False, True, False]
    assert prefix_mask([1, 9, 4], [([1, 2], [1, 2, 3])]) == [False, True, False]
