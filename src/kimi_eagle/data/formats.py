"""One input row (a dict) becomes a Conversation or a TokenRow, or a RowError says why not.

Reads nothing from disk. Forms: OpenAI `messages`, ShareGPT `conversations` (from/value, or
role/content, a `system` text beside them), `prompt` (one text), pre-tokenised `input_ids` +
`loss_mask`; each with an optional `tools`. All end up as OpenAI messages in the shape that vLLM
0.31.0 hands to a chat template (vllm/entrypoints/chat_utils.py): content is a string, text parts
joined by a newline, arguments of tool calls are objects, thinking is in both `reasoning` and
`reasoning_content`.

Nulls: Arrow pads the fields of structs with null, so one tool call's arguments show up in all
others as nulls. Null keys are dropped from messages, arguments and tools. The price: an argument
that is really null is lost, unless the arguments are given as a JSON string, as OpenAI does.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from kimi_eagle.data.rows import Conversation, TokenRow
from kimi_eagle.errors import RowError

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
FORMATS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "tokens": ("input_ids", "loss_mask"),
    "prompt": ("prompt",),
}
"""Format -> the columns that it needs, in the order in which `auto` looks for them."""


MAX_ROW_BYTES = 64 << 20
"""A longer row is rejected: no text conversation is that long, a broken file is."""


def detect_format(columns: list[str]) -> str | None:
    """The first format whose columns are all there."""
    return next((f for f, need in FORMATS.items() if set(need) <= set(columns)), None)


def parse_row(
    row: Any,
    format: str,
    *,
    source: str = "",
    where: tuple[str, int] = ("", 0),
    vocab_size: int | None = None,
) -> Conversation | TokenRow:
    """Turn one row into a Conversation or TokenRow; RowError(rule, detail) where it is bad."""
    if not isinstance(row, dict):
        raise RowError("not-an-object", f"expected an object, got {type(row).__name__}")
    if format == "auto":
        format = detect_format([k for k, v in row.items() if v is not None]) or ""
        if not format:
            raise RowError(
                "missing-field",
                f"has {', '.join(map(str, row)) or 'no fields'}; expected one of "
                f"{', '.join('+'.join(need) for need in FORMATS.values())}",
            )
    for name in FORMATS[format]:
        if row.get(name) is None:
            raise RowError("missing-field", f"no {name}")
    if format == "tokens":
        ids, mask = _tokens(row["input_ids"], row["loss_mask"], vocab_size)
        return TokenRow(source, ids, mask, where)
    if format == "prompt":
        if not isinstance(row["prompt"], str):
            raise RowError("bad-content", f"prompt is {type(row['prompt']).__name__}, not text")
        given: Any = [{"role": "user", "content": row["prompt"]}]
    else:
        given = row[format]
        if format == "conversations" and isinstance(row.get("system"), str) and row["system"]:
            given = [{"role": "system", "content": row["system"]}, *_list(given)]
    messages = _messages(given)
    if sum(len(m["content"]) for m in messages) > MAX_ROW_BYTES:
        raise RowError("giant-row", f"longer than {MAX_ROW_BYTES >> 20} MiB")
    conversation = Conversation(source, messages, _tools(row.get("tools")), where)
    try:
        conversation.id  # noqa: B018  canonical JSON in UTF-8: fails on lone surrogates
    except UnicodeEncodeError as e:
        raise RowError("not-utf8", f"text that UTF-8 cannot hold: {e.reason}") from None
    return conversation


def _messages(given: Any) -> list[dict[str, Any]]:
    messages = [_message(m, i) for i, m in enumerate(_list(given), 1)]
    roles = {m["role"] for m in messages}
    if roles == {"system"}:
        raise RowError("only-system", "no user turn")
    if "user" not in roles:
        raise RowError("no-user", f"only {', '.join(sorted(roles))}")
    return messages


def _list(given: Any) -> list[Any]:
    if not isinstance(given, list) or not given:
        raise RowError("no-messages", "expected a list of at least one message")
    return given


def _message(given: Any, number: int) -> dict[str, Any]:
    """One message in OpenAI form; `number` (from 1) is for the reader of the reject."""
    if not isinstance(given, dict):
        raise RowError("bad-message", f"message {number}: expected an object")
    role = given.get("role", given.get("from"))
    if role is None:
        raise RowError("missing-role", f"message {number}: no role (or from)")
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(ROLES)
        raise RowError("unknown-role", f"message {number}: role {role!r}; expected one of {known}")
    role = ROLES[role]
    content = given.get("content")
    message = {
        "role": role,
        "content": _text(given.get("value") if content is None else content, number),
    }
    name = given.get("name")
    if isinstance(name, str):
        message["name"] = name
    if role == "tool" and given.get("tool_call_id") is not None:
        message["tool_call_id"] = given["tool_call_id"]
    if role == "assistant":
        calls = _tool_calls(given.get("tool_calls"), number)
        if calls:
            message["tool_calls"] = calls
        thinking = next(
            (given[k] for k in ("reasoning", "reasoning_content", "thinking") if given.get(k)), None
        )
        if thinking is not None:
            message["reasoning"] = message["reasoning_content"] = _text(thinking, number)
        if not (message["content"].strip() or calls or thinking):
            raise RowError("empty-assistant", f"message {number}: no content and no tool call")
    if role == "user" and not message["content"].strip():
        raise RowError("empty-user", f"message {number}: no content")
    return message


def _text(content: Any, number: int) -> str:
    """Content as one string; text parts are joined by a newline, as vLLM's string form does."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        kind = type(content).__name__
        raise RowError("bad-content", f"message {number}: content is {kind}, not text")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind != "text":
            raise RowError("not-text", f"message {number}: a part of type {kind!r}; only text")
        if not isinstance(text, str):
            raise RowError("bad-content", f"message {number}: a text part without text")
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(given: Any, number: int) -> list[dict[str, Any]]:
    given = _from_json(given, "bad-tool-call", f"message {number}: tool_calls")
    if not given:
        return []
    if not isinstance(given, list):
        raise RowError("bad-tool-call", f"message {number}: tool_calls is no list")
    calls = []
    for call in given:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError("bad-tool-call", f"message {number}: a tool call without function name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _from_json(
                arguments or "{}", "bad-tool-call", f"message {number}: arguments"
            )
        else:
            arguments = drop_nulls(arguments) if arguments is not None else {}
        if not isinstance(arguments, dict):
            raise RowError("bad-tool-call", f"message {number}: arguments are no object")
        rest = {k: v for k, v in drop_nulls(call).items() if k != "function"}
        rest.setdefault("type", "function")
        calls.append({**rest, "function": {"name": function["name"], "arguments": arguments}})
    return calls


def _tools(given: Any) -> list[dict[str, Any]] | None:
    given = _from_json(given, "bad-tools", "tools")
    if not given:
        return None
    if not isinstance(given, list):
        raise RowError("bad-tools", f"tools is {type(given).__name__}, not a list")
    tools = [_from_json(t, "bad-tools", "a tool") for t in given]
    if not all(isinstance(t, dict) for t in tools):
        raise RowError("bad-tools", "a tool that is no object")
    return drop_nulls(tools)


def _from_json(value: Any, rule: str, what: str) -> Any:
    """Parsed, if it is a JSON text (columns of nested data often are)."""
    if not isinstance(value, str) or not value.strip():
        return None if isinstance(value, str) else value
    try:
        return json.loads(value)
    except ValueError as e:
        raise RowError(rule, f"{what}: not JSON: {e}") from None


def drop_nulls(value: Any) -> Any:
    """The value without object keys that are null, at any depth; list items stay."""
    if isinstance(value, dict):
        return {k: drop_nulls(v) for k, v in value.items() if v is not None}
    return [drop_nulls(v) for v in value] if isinstance(value, list) else value


def _tokens(ids: Any, mask: Any, vocab_size: int | None) -> tuple[np.ndarray, np.ndarray]:
    try:
        ids, mask = np.asarray(ids), np.asarray(mask)
    except ValueError:
        raise RowError("bad-tokens", "input_ids or loss_mask is no flat list") from None
    if ids.ndim != 1 or mask.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise RowError("bad-tokens", "input_ids must be a flat list of integers")
    if not ids.size:
        raise RowError("no-tokens", "input_ids is empty")
    if mask.shape != ids.shape:
        raise RowError("mask-length", f"loss_mask has {mask.size} entries, input_ids {ids.size}")
    if mask.dtype.kind not in "biu" or not np.isin(mask, (0, 1)).all():
        raise RowError("bad-tokens", "loss_mask must hold only 0 and 1")
    top = np.iinfo(np.int32).max + 1 if vocab_size is None else vocab_size
    if ids.min() < 0 or ids.max() >= top:
        bad = int(ids[(ids < 0) | (ids >= top)][0])
        raise RowError("id-out-of-vocabulary", f"token id {bad}; expected 0 to {top - 1}")
    if not mask.any():
        raise RowError("no-loss", "loss_mask selects no token")
    return ids.astype(np.int32), mask.astype(bool)
