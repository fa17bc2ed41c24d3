"""Conversations to token ids through the verifier's chat template, exactly as serving does it.

Reads the tokenizer (through Verifier) and, if the recipe names one, a Jinja file. Writes nothing.

The ids are those of `tokenizer.apply_chat_template`, which are those of vLLM's `LLM.chat` (0.31.0):
the template is rendered to text and the whole text is tokenised. A marker such as <|im_end|> that a
message quotes therefore becomes the special token, in training as in serving; quoting does not hide
it. The mask is right all the same, since positions come from rendered prefixes (masks.py). The
price: n answers cost 2n renderings, of text only; each text is tokenised once, in batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kimi_eagle.data.masks import Spans, common_text, prefix_mask, token_mask
from kimi_eagle.errors import RowError, UsageError
from kimi_eagle.files import digest

if TYPE_CHECKING:
    from kimi_eagle.recipe import TemplateSection
    from kimi_eagle.verifier import Verifier

Messages = list[dict[str, Any]]
Request = tuple[Messages, list[dict[str, Any]] | None]
"""Messages and tools of one conversation."""
Masked = tuple[np.ndarray, np.ndarray]
"""input_ids int32 [T] and loss_mask bool [T] of one sample."""

PROBE = ("Alpha one", "Beta two")
"""Two contents without a common first or last character: what stays equal is the template's."""
BATCH_ROWS = 1024
"""Conversations tokenised together: enough for all cores, while a token's Python objects cost a
hundred bytes for the moment."""
OWN_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt", "documents"})
"""Names that this module or transformers sets itself."""


class ChatTemplate:
    """The chat template of a verifier with the recipe's `[template]` block applied."""

    def __init__(self, verifier: Verifier, section: TemplateSection):
        """UsageError: no chat template, a file that is none, an argument it never reads."""
        self.verifier = verifier
        self.section = section
        self.tokenizer = verifier.tokenizer()
        self._override = _read(Path(section.chat_template)) if section.chat_template else None
        self.arguments: dict[str, Any] = dict(section.arguments)
        if section.thinking is not None:
            self.arguments[section.thinking_argument] = section.thinking
        self.source = self._own_source() if self._override is None else self._override
        self._check_arguments()

    # -- prompts -------------------------------------------------------------------------------

    def prompt_ids(
        self, messages: Messages, tools: list | None = None, limit: int | None = None
    ) -> list[int]:
        """Token ids of the conversation so far and the start of the next answer.

        RowError: the template refuses the messages; `too-long`: more than `limit` tokens.
        """
        ids = self.prompts([(messages, tools)], limit)[0]
        if isinstance(ids, RowError):
            raise ids
        return ids

    def prompts(
        self, batch: Sequence[Request], limit: int | None = None
    ) -> list[list[int] | RowError]:
        """`prompt_ids` of many conversations, tokenised together; a bad one gives its RowError."""
        texts = [_or_fault(self._render, messages, tools, True) for messages, tools in batch]
        good = [t for t in texts if isinstance(t, str)]
        found = iter(self._tokenise(good)[0])
        result: list[list[int] | RowError] = []
        for text in texts:
            ids = text if isinstance(text, RowError) else next(found)
            if limit is not None and not isinstance(ids, RowError) and len(ids) > limit:
                detail = f"prompt has {len(ids)} tokens; expected at most {limit}"
                ids = RowError("too-long", detail)
            result.append(ids)
        return result

    def answer_text(self, answer_ids: Sequence[int]) -> str:
        """Text of a generated answer, without its end-of-turn token, to go on a conversation with.

        Other special tokens (thinking, tool calls) stay in the text.
        """
        ids = list(answer_ids)
        ends = {*self.verifier.eos_ids, self.tokenizer.eos_token_id}
        while ids and ids[-1] in ends:
            ids.pop()
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    # -- given answers -------------------------------------------------------------------------

    def conversation(self, messages: Messages, tools: list | None = None) -> list[Masked]:
        """Samples of one conversation with given answers; see `conversations`."""
        found = self.conversations([(messages, tools)])[0]
        if isinstance(found, RowError):
            raise found
        return found

    def conversations(self, batch: Sequence[Request]) -> list[list[Masked] | RowError]:
        """Ids and loss masks of conversations with given answers, tokenised together.

        One sample a conversation when every prefix of it renders to a prefix of the whole, else
        (a template that drops earlier thinking) one an assistant turn: the text the target would
        have seen, with loss on that turn alone. The mask starts with the first answer token and
        ends with the end-of-turn token; a template without one: with the last content token.
        Messages after the last answer are dropped, an assistant turn before the first user turn is
        context. A bad conversation gives its RowError: `no-answer`, `empty-answer` (the template
        renders nothing of the turn), `template` (it refuses the messages), `unstable-template`.
        """
        found: list[list[Masked] | RowError] = []
        for at in range(0, len(batch), BATCH_ROWS):
            found += self._masked(batch[at : at + BATCH_ROWS])
        return found

    def _masked(self, batch: Sequence[Request]) -> list[list[Masked] | RowError]:
        laid_out = [_or_fault(self._lay_out, messages, tools) for messages, tools in batch]
        good = [sample for row in laid_out if not isinstance(row, RowError) for sample in row]
        ids, offsets = self._tokenise([text for text, _ in good])
        masked = []
        for i, (text, spans) in enumerate(good):
            if offsets is not None:
                mask = token_mask(offsets[i], spans)
            else:
                parts = self._tokenise([text[:at] for span in spans for at in span])[0]
                mask = prefix_mask(ids[i], list(zip(parts[::2], parts[1::2], strict=True)))
            masked.append((np.array(ids[i], np.int32), np.array(mask, bool)))
        rest = iter(masked)
        return [row if isinstance(row, RowError) else [next(rest) for _ in row] for row in laid_out]

    def _lay_out(self, messages: Messages, tools: list | None) -> list[tuple[str, Spans]]:
        """Texts to tokenise with the character ranges of their answers."""
        turns = [
            i
            for i, m in enumerate(messages)
            if m["role"] == "assistant" and any(n["role"] == "user" for n in messages[:i])
        ]
        if not turns:
            raise RowError("no-answer", "no assistant turn after a user turn")
        texts, spans = [], []
        for turn in turns:
            text = self._render(messages[: turn + 1], tools, False)
            start = self._answer_start(messages, tools, turn, text)
            end = self._answer_end(text, start)
            texts.append(text)
            spans.append((start, end))
        whole = texts[-1]
        # Each prompt lies within the text up to its answer's end: one check does for both.
        if all(whole.startswith(t[:end]) for t, (_, end) in zip(texts, spans, strict=True)):
            return [(whole, spans)]
        return [(text, [span]) for text, span in zip(texts, spans, strict=True)]

    def _answer_start(self, messages: Messages, tools: list | None, turn: int, text: str) -> int:
        """Character at which the answer begins: after the prompt that serving would render.

        A prompt may end in a scaffold that the given answer lacks (an opened <think>): then the
        answer begins where two different contents would make the first difference.
        """
        prompt = self._render(messages[:turn], tools, True)
        if text.startswith(prompt):
            return len(prompt)
        probes = [
            self._render([*messages[:turn], {"role": "assistant", "content": c}], tools, False)
            for c in PROBE
        ]
        start = common_text(*probes)
        if not text.startswith(probes[0][:start]):
            start = common_text(text, probes[0])
        history = self._render(messages[:turn], tools, False)
        if start < common_text(history, prompt) or not text.startswith(prompt[: len(history)]):
            raise RowError(
                "unstable-template", f"message {turn + 1}: prompt and conversation render apart"
            )
        return start

    def _answer_end(self, text: str, start: int) -> int:
        """Character after the end-of-turn token of the answer that ends `text`."""
        closing, token_end = self._closing
        if text.endswith(closing):
            end = len(text) - len(closing)
            if end <= start:
                raise RowError("empty-answer", "the template renders nothing of an assistant turn")
            return end + token_end
        # Another closing than usual, such as after a tool call: its last end-of-turn token.
        for end in range(len(text), start, -1):
            if text[end:].strip():
                break
            tail = self._tokenise([text[start:end]])[0][0]
            if tail and tail[-1] in self._ends and len(tail) > 1:
                return end
        return len(text)

    @cached_property
    def _closing(self) -> tuple[str, int]:
        """What the template writes after an answer, and the length of it that is answer: up to its
        first end-of-turn token (by the model's eos ids, else by the tokenizer's special tokens)."""
        question = {"role": "user", "content": "Question"}
        try:
            a, b = (
                self._render([question, {"role": "assistant", "content": c}], None, False)
                for c in PROBE
            )
        except RowError:
            return "", 0
        closing = a[len(a) - common_text(a[::-1], b[::-1]) :]
        ids = self._tokenise([closing])[0][0]
        for ends in (set(self.verifier.eos_ids), self._ends):
            at = next((i for i, token in enumerate(ids) if token in ends), None)
            if at is not None:
                for length in range(1, len(closing) + 1):
                    if self._tokenise([closing[:length]])[0][0] == ids[: at + 1]:
                        return closing, length
        return closing, 0

    @property
    def closing_ids(self) -> list[int]:
        """Ids of what the template writes after an answer, end-of-turn token and all; [] where it
        cannot be told."""
        closing = self._closing[0]
        return list(self._tokenise([closing])[0][0]) if closing else []

    @cached_property
    def _ends(self) -> set[int]:
        """Ids that may end a turn: the model's eos ids and all added tokens."""
        return {*self.verifier.eos_ids, *self.tokenizer.added_tokens_decoder}

    @cached_property
    def drops_thinking(self) -> bool:
        """Whether earlier answers lose their thinking when the conversation goes on."""
        thought = {"reasoning": "Because", "reasoning_content": "Because"}
        try:
            for answer in (
                {"role": "assistant", "content": "<think>\nBecause\n</think>\n\nYes"},
                {"role": "assistant", "content": "Yes", **thought},
            ):
                messages = [{"role": "user", "content": "Question"}, answer]
                more = [*messages, {"role": "user", "content": "More"}]
                once = "Because" in self._render(messages, None, False)
                if once and "Because" not in self._render(more, None, True):
                    return True
        except RowError:
            pass
        return False

    def digest(self) -> str:
        """32 hex digits of the template's text and its arguments."""
        return digest([self.source, self.arguments, self.section.tools])

    # -- inside --------------------------------------------------------------------------------

    def _render(self, messages: Messages, tools: list | None, add_generation_prompt: bool) -> str:
        if tools and not self.section.tools:
            raise RowError("tools-refused", "the row carries tools, [template] tools = false")
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._override,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self.arguments,
            )
        except Exception as e:  # templates raise what they like; each means: not this row
            reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            raise RowError("template", f"the chat template refuses it: {reason}") from None

    def _tokenise(self, texts: list[str]) -> tuple[list[list[int]], list[Any] | None]:
        """Token ids of each text and, from a fast tokenizer, each token's character range."""
        if not texts:
            return [], None
        out = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        offsets = [e.offsets for e in out.encodings] if self.tokenizer.is_fast else None
        return out["input_ids"], offsets

    def _own_source(self) -> str:
        try:
            return self.tokenizer.get_chat_template()
        except ValueError:
            raise UsageError(
                "model directory without chat template",
                where=self.verifier.path,
                expected="chat_template.jinja or chat_template in tokenizer_config.json",
                fix="set [template] chat_template to a Jinja file",
            ) from None

    def _check_arguments(self) -> None:
        """UsageError for an argument that neither the template nor the tokenizer ever reads."""
        read = template_variables(self.source, self.section.chat_template or self.verifier.path)
        read |= set(inspect.signature(type(self.tokenizer).apply_chat_template).parameters)
        for name in self.arguments:
            if name in OWN_ARGUMENTS or name not in read:
                thinking = self.section.thinking is not None
                of = name == self.section.thinking_argument and thinking
                known = ", ".join(sorted(template_variables(self.source, "") - OWN_ARGUMENTS))
                raise UsageError(
                    f"argument {name!r} is set here or never read by the chat template",
                    where="template.thinking" if of else f"template.arguments.{name}",
                    expected=f"one of {known}" if known else "none: it reads no arguments",
                    fix="set template.thinking_argument" if of else "remove it",
                )


def template_variables(source: str, where: object) -> set[str]:
    """Names that a chat template reads from outside; UsageError where it is not Jinja.

    Knows transformers' `{% generation %}` blocks and loop controls.
    """
    from jinja2 import Environment, TemplateSyntaxError, meta, nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = Environment(extensions=[Generation, "jinja2.ext.loopcontrols"])
    try:
        return set(meta.find_undeclared_variables(environment.parse(source)))
    except TemplateSyntaxError as e:
        fault = f"line {e.lineno}: {e.message}"
        raise UsageError(f"not a Jinja template: {fault}", where=where) from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(
            f"chat template cannot be read: {getattr(e, 'strerror', None) or e}", where=path
        ) from None


def _or_fault(function: Any, *args: Any) -> Any:
    """The function's result, or the RowError it raised: one bad row must not stop a batch."""
    try:
        return function(*args)
    except RowError as e:
        return e
