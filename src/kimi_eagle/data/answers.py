"""Generated answers on disk: what regenerate hands to prepare.

One Parquet file a unit, one row a conversation: its turns as token ids (prompt as rendered, answer
as generated, with the end-of-turn token where it was reached) and its messages as text, for people.
Token ids are the data; the text is never tokenised again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_eagle import files
from kimi_eagle.data.rows import Conversation, open_turns
from kimi_eagle.errors import RunError

FORMAT = "answers/1"


@dataclass
class Answered:
    """A conversation while it is being answered, and afterwards.

    turns: dicts with prompt_ids, answer_ids (lists of int) and finish_reason ("stop", "length").
    """

    id: str
    source: str
    tools: list[dict[str, Any]] | None
    asked: list[list[dict[str, Any]]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    closed: bool = False

    @classmethod
    def begin(cls, conversation: Conversation) -> Answered:
        """Nothing answered yet."""
        return cls(
            conversation.id, conversation.source, conversation.tools, open_turns(conversation)
        )

    @property
    def waiting(self) -> bool:
        """Is there a turn to answer?"""
        return not self.closed and len(self.turns) < len(self.asked)

    def ask(self) -> list[dict[str, Any]]:
        """The messages up to the next answer: what was said, what was answered, what is asked."""
        return [*self.messages, *self.asked[len(self.turns)]]

    def answer(
        self, prompt_ids: list[int], answer_ids: list[int], finish_reason: str, text: str
    ) -> None:
        """Add an answer; one that was cut off ends the conversation (a server's user would not
        go on from half a sentence)."""
        self.messages = [*self.ask(), {"role": "assistant", "content": text}]
        self.turns.append(
            {"prompt_ids": prompt_ids, "answer_ids": answer_ids, "finish_reason": finish_reason}
        )
        self.closed = finish_reason != "stop"


def write_answers(path: Path, answered: Sequence[Answered]) -> None:
    """Write one unit's answers atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    ids = pa.list_(pa.int32())
    turn = pa.struct([("prompt_ids", ids), ("answer_ids", ids), ("finish_reason", pa.string())])
    schema = pa.schema(
        [
            ("conversation_id", pa.string()),
            ("source", pa.string()),
            ("messages", pa.string()),
            ("tools", pa.string()),
            ("turns", pa.list_(turn)),
        ],
        metadata={"kimi_eagle.format": FORMAT},
    )
    rows = [
        {
            "conversation_id": a.id,
            "source": a.source,
            "messages": json.dumps(a.messages, ensure_ascii=False),
            "tools": json.dumps(a.tools, ensure_ascii=False) if a.tools else None,
            "turns": a.turns,
        }
        for a in answered
    ]
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema), buffer, compression="zstd")
    files.write_atomic(path, buffer.getvalue().to_pybytes())


def read_answers(path: Path) -> list[dict[str, Any]]:
    """Rows as written: conversation_id, source, messages (JSON text), tools, turns."""
    import pyarrow.parquet as pq

    table = pq.read_table(path, partitioning=None)
    if (table.schema.metadata or {}).get(b"kimi_eagle.format") != FORMAT.encode():
        raise RunError("not a file of answers", where=path, expected=f"format {FORMAT}")
    return table.to_pylist()
