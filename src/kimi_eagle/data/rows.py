"""What a source's row becomes: a conversation or a pre-tokenised sample, known by its content.

Ids are content hashes, never places: shuffles and libraries that reorder rows cannot mix rows up.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kimi_eagle.files import digest


@dataclass
class Conversation:
    """Messages in OpenAI form; where = (file, row from 1)."""

    source: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    where: tuple[str, int] = ("", 0)

    @cached_property
    def id(self) -> str:
        """Content hash: equal for equal messages and tools, wherever they come from."""
        return digest([self.messages, self.tools])

    @cached_property
    def prompt_id(self) -> str:
        """Content hash of what is asked, given answers left out (see `open_turns`)."""
        return digest([open_turns(self), self.tools])


@dataclass
class TokenRow:
    """A pre-tokenised row of a source: input_ids int32 [T], loss_mask bool [T]; where = (file,
    row from 1)."""

    source: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    where: tuple[str, int] = ("", 0)
    finish_reason: str = "given"

    @cached_property
    def id(self) -> str:
        """The sample_id of the sample made of it."""
        return sample_id(self.input_ids, self.loss_mask)


def open_turns(conversation: Conversation) -> list[list[dict[str, Any]]]:
    """The user's side of a conversation: element k is what is said before answer k.

    To answer a conversation, append element 0, generate, append the generated answer, append
    element 1, and so on. Given assistant turns are dropped. Where tool results occur the given
    calls are kept and only the last open turn is answered (one element): a result belongs to the
    call that it answers, and the target might have called something else.
    """
    messages = conversation.messages
    if any(m["role"] == "tool" for m in messages):
        last = max(i for i, m in enumerate(messages) if m["role"] in ("user", "tool"))
        return [messages[: last + 1]]
    turns: list[list[dict[str, Any]]] = []
    said: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "assistant":
            said.append(message)
        elif any(m["role"] == "user" for m in said):
            turns.append(said)
            said = []
    if any(m["role"] == "user" for m in said):
        turns.append(said)
    return turns


def sample_id(input_ids: Any, loss_mask: Any) -> str:
    """blake2b-128 hex of the ids as int32 little-endian bytes followed by one mask byte each."""
    h = hashlib.blake2b(np.ascontiguousarray(input_ids, "<i4"), digest_size=16)
    h.update(np.ascontiguousarray(loss_mask, "u1"))
    return h.hexdigest()
