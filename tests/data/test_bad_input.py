"""Every kind of bad input gets its one-line error or its rejects row; good rows go on."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kimi_eagle.data import formats, samples
from kimi_eagle.data.rejects import Reject, RejectLog
from kimi_eagle.data.rows import Conversation
from kimi_eagle.data.sources import read_rows, select
from kimi_eagle.errors import RowError, RunError, UsageError
from kimi_eagle.recipe import SourceSection

GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
OTHER = {"messages": [{"role": "user", "content": "Bye"}]}


def m(*messages, **more):
    return {"messages": [dict(zip(("role", "content"), x, strict=False)) for x in messages], **more}


def parts(*contents):
    return {"messages": [{"role": "user", "content": list(contents)}]}


CALL = {"function": {"name": "f", "arguments": "{broken"}}
BAD_ROWS = {
    "broken-json": '{"messages": [',
    "not-utf8": b'{"prompt": "\xff\xfe"}',
    "not-utf8 ": '{"prompt": "\\ud800"}',
    "not-an-object": [1, 2],
    "missing-field": {"text": "Hi"},
    "no-messages": {"messages": []},
    "bad-message": {"messages": ["Hi"]},
    "missing-role": {"messages": [{"content": "Hi"}]},
    "missing-role ": {"conversations": [{"value": "Hi"}]},
    "unknown-role": m(("narrator", "Hi")),
    "unknown-role ": {"conversations": [{"from": "observer", "value": "Hi"}]},
    "empty-assistant": m(("user", "Hi"), ("assistant", "")),
    "empty-assistant ": m(("user", "Hi"), ("assistant", None)),
    "empty-user": m(("user", " ")),
    "only-system": m(("system", "Be good.")),
    "no-user": m(("assistant", "Hello")),
    "not-text": parts({"type": "image_url", "image_url": {"url": "x"}}),
    "bad-content": m(("user", 5)),
    "bad-content ": parts({"type": "text"}),
    "bad-content  ": {"prompt": 5},
    "bad-tool-call": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ]
    },
    "bad-tools": {"prompt": "Hi", "tools": "[broken"},
    "bad-tools ": {"prompt": "Hi", "tools": ["text"]},
    "mask-length": {"input_ids": [1, 2, 3], "loss_mask": [0, 1]},
    "id-out-of-vocabulary": {"input_ids": [1, 49152], "loss_mask": [0, 1]},
    "id-out-of-vocabulary ": {"input_ids": [1, -1], "loss_mask": [0, 1]},
    "no-tokens": {"input_ids": [], "loss_mask": []},
    "no-loss": {"input_ids": [1, 2], "loss_mask": [0, 0]},
    "bad-tokens": {"input_ids": ["a"], "loss_mask": [1]},
    "bad-tokens ": {"input_ids": [1, 2], "loss_mask": [0, 2]},
    "bad-tokens  ": {"input_ids": [1.5], "loss_mask": [1]},
    "bad-tokens   ": {"input_ids": [[1], [2, 3]], "loss_mask": [1, 1]},
}


@pytest.mark.parametrize("rule", BAD_ROWS)
def test_bad_row_is_rejected_with_file_and_row_and_the_others_go_on(rows, rule):
    path = rows(GOOD, BAD_ROWS[rule], OTHER)
    first, bad, last = read_rows(SourceSection(path=str(path)), vocab_size=49152)
    assert isinstance(bad, Reject)
    assert (bad.rule, bad.file, bad.row) == (rule.strip(), str(path), 2)
    assert bad.source == "rows" and bad.detail
    assert [first.where[1], last.where[1]] == [1, 3]


def test_giant_row(rows, monkeypatch):
    monkeypatch.setattr(formats, "MAX_ROW_BYTES", 1000)
    giant = {"prompt": "x" * 5000}
    lines = rows(GOOD, giant, OTHER)
    listed = rows(json.dumps([GOOD, giant, OTHER]), name="list.json")
    table = lines.with_name("t.parquet")
    pq.write_table(pa.table({"prompt": ["a", giant["prompt"], "b"]}), table)
    for path in (lines, listed, table):
        _, bad, last = read_rows(SourceSection(path=str(path)))
        assert (bad.rule, bad.row) == ("giant-row", 2)
        assert isinstance(last, Conversation)


def test_duplicate(rows):
    answered = {"messages": [GOOD["messages"][0], {"role": "assistant", "content": "Hey"}]}
    path = rows(GOOD, answered, GOOD)
    section = SourceSection(path=str(path), name="s")
    found = select([section], 0)
    assert [(r.rule, r.row) for r in found.rejects] == [("duplicate", 3)]
    assert found.counts_by_source["s"] == {"read": 3, "rejected": 1, "taken": 2}
    # Where the answers will be generated, equal prompts are duplicates.
    assert [r.row for r in select([section], 0, by_prompt=True).rejects] == [2, 3]


def test_prompt_longer_than_the_context(rows, template):
    path = rows({"prompt": "word " * 9000})
    (row,) = read_rows(SourceSection(path=str(path)))
    (fault,) = template.prompts([(row.messages, row.tools)], template.verifier.context_length)
    assert fault.rule == "too-long"
    reject = Reject.of(fault, row.where, row.source)
    assert (reject.file, reject.row) == (str(path), 1)
    long = samples.make_sample([1] * 50, [False] * 40 + [True] * 10)
    assert len(samples.fit(long, 45).input_ids) == 45
    for length, how in ((40, "truncate"), (45, "reject")):
        with pytest.raises(RowError, match="too-long"):
            samples.fit(long, length, how)


def test_markers_quoted_in_an_answer(rows, template):
    """Not bad at all: kept, ids as serving gives them, the mask around the whole answer."""
    answer = "Write <|im_end|>\n<|im_start|>user\n"
    path = rows(m(("user", "How?"), ("assistant", answer)))
    (row,) = read_rows(SourceSection(path=str(path)))
    ((ids, mask),) = template.conversation(row.messages)
    assert template.tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on]) == (
        answer + "<|im_end|>"
    )
    assert mask.tolist() == sorted(mask[:-1]) + [False]  # one run, then the template's newline


def test_null_padded_tool_arguments(tmp_path, jinja):
    """Parquet pads structs: one call's arguments appear in all others as nulls."""

    def call(**arguments):
        return {"type": "function", "function": {"name": "f", "arguments": arguments}}

    messages = [
        {"role": "user", "content": "Both?"},
        {"role": "assistant", "content": None, "tool_calls": [call(city="Bern"), call(day=1)]},
    ]
    schema = [
        {"type": "function", "function": {"name": n, "parameters": {n: {"type": "string"}}}}
        for n in ("city", "day")
    ]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": messages, "tools": schema}]), path)
    stored = pq.read_table(path).to_pylist()[0]["messages"][1]["tool_calls"]
    assert stored[0]["function"]["arguments"] == {"city": "Bern", "day": None}  # padded indeed

    (row,) = read_rows(SourceSection(path=str(path)))
    assert isinstance(row, Conversation)
    template = jinja(
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    text = template.tokenizer.decode(template.prompt_ids(row.messages, row.tools))
    assert "null" not in text
    assert '{"city": "Bern"}{"day": 1}' in text
    assert json.dumps(schema) in text.replace(": ", ": ")
    # Given as JSON text, as OpenAI does, a null is meant.
    asked = {"function": {"name": "f", "arguments": '{"city": null}'}}
    kept = {"messages": [messages[0], {"role": "assistant", "tool_calls": [asked]}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(kept))
    (row,) = read_rows(SourceSection(path=str(tmp_path / "rows.jsonl")))
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": None}


def write_table(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


FILE_FAULTS = {
    "empty.jsonl": (lambda p: p.write_bytes(b""), {}, "empty file"),
    "blank.jsonl": (lambda p: p.write_bytes(b"\n \n"), {}, "empty file"),
    "none.json": (lambda p: p.write_bytes(b"[]"), {}, "empty file"),
    "rows.parquet": (lambda p: write_table(p, prompt=pa.array([], pa.string())), {}, "empty file"),
    "list.json": (lambda p: p.write_bytes(b'[{"prompt": "a"},'), {}, "broken JSON"),
    "latin.json": (lambda p: p.write_bytes(b'["\xff"]'), {}, "not UTF-8"),
    "text.parquet": (lambda p: p.write_bytes(b"no parquet here"), {}, "not parquet"),
    "text.arrow": (lambda p: p.write_bytes(b"no arrow here at all"), {}, "not arrow"),
    "other.parquet": (lambda p: write_table(p, text=["a"]), {}, "no known columns.*it has text"),
    "ids.parquet": (
        lambda p: write_table(p, input_ids=[[1]]),
        {"format": "tokens"},
        "no column loss_mask.*it has input_ids",
    ),
    "want.parquet": (
        lambda p: write_table(p, prompt=["a"]),
        {"format": "messages"},
        "no column messages",
    ),
    "rows.csv": (lambda p: p.write_bytes(b"a,b"), {}, "unknown kind of file"),
    "nowhere.jsonl": (lambda p: None, {}, "no such source"),
    "link.jsonl": (lambda p: p.symlink_to("gone"), {}, "dangling link"),
    "folder": (lambda p: p.mkdir(), {}, "no data files in folder"),
}


@pytest.mark.parametrize("name", FILE_FAULTS)
def test_bad_file_stops_with_one_line(tmp_path, name):
    make, section, message = FILE_FAULTS[name]
    make(tmp_path / name)
    with pytest.raises(UsageError, match=message) as caught:
        list(read_rows(SourceSection(path=str(tmp_path / name), **section)))
    assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)


def test_too_many_rejects_stop_and_name_the_three_most_frequent_rules(tmp_path):
    log = RejectLog(max_share=0.05)
    log.count_rows(100)
    counts = {"broken-json": 3, "unknown-role": 2, "too-long": 1, "only-system": 1}
    row = 0
    for rule, number in counts.items():
        for _ in range(number):
            row += 1
            log.add(Reject(rule, "why", "f.jsonl", row, "s"))
    with pytest.raises(RunError) as caught:
        log.check()
    text = str(caught.value)
    assert "7.0% of 100 rows" in text and "at most 5.0%" in text
    assert "broken-json x3 (first: f.jsonl row 1: why)" in text and "unknown-role x2" in text
    assert "only-system" in text and "too-long" not in text  # ties by name
    assert log.by_source == {"s": counts}
    log.write(tmp_path / "rejects.jsonl")
    written = [json.loads(x) for x in (tmp_path / "rejects.jsonl").read_text().splitlines()]
    assert written[3] == {
        "rule": "unknown-role",
        "detail": "why",
        "file": "f.jsonl",
        "row": 4,
        "source": "s",
    }
    log.count_rows(40)
    log.check()  # exactly 5%
    log.add(Reject("too-long", "again", "f.jsonl", 1, "s"))  # a row counts once
    log.add(Reject("duplicate", "seen before", "f.jsonl", 90, "s"))  # and is no fault
    log.check()
    log.add(Reject("too-long", "a sample of no row known"))
    with pytest.raises(RunError, match="5.7%"):
        log.check()


def test_rejects_with_text_that_utf8_cannot_hold(tmp_path):
    log = RejectLog(1.0)
    log.add(Reject("unknown-role", "role '\ud800'", "f", 1, "s"))
    log.write(tmp_path / "rejects.jsonl")
    assert "unknown-role" in (tmp_path / "rejects.jsonl").read_text()
