"""The chat template: there, read as the recipe asks, and closed by what ends an answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import NotConcerned, Note, Problem, rule
from kimi_eagle.contracts.tokenizer import added_tokens, code_text, eos_token
from kimi_eagle.errors import RowError, UsageError
from kimi_eagle.verifier import Verifier

USED = ("regenerate", "prepare", "benchmark")
PARAMETERS = frozenset(
    {"continue_final_message", "max_length", "padding", "tokenizer_kwargs", "truncation"}
)
"""Arguments that apply_chat_template itself takes (transformers 5.17.0,
tokenization_utils_base.py), of those that a recipe may set."""
ASKED = [{"role": "user", "content": "What is 2 and 2?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def source(facts: Facts) -> str:
    """The template's text as far as files tell: the recipe's, else the directory's; "" for none.

    UsageError where the recipe names a file that cannot be read.
    """
    section, folder = facts.recipe.template, facts.verifier.path
    if section.chat_template:
        try:
            return Path(section.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            reason = getattr(e, "strerror", None) or e
            where = section.chat_template
            raise UsageError(f"chat template cannot be read: {reason}", where=where) from None
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        told = facts.verifier.settings(name).get("chat_template")
        if isinstance(told, list):  # [{name, template}, ...]
            told = next((t["template"] for t in told if t.get("name") == "default"), "")
        if told:
            return told
    return ""


@rule(
    "template-present",
    what="There is a chat template.",
    why="Without one transformers 5.17.0 raises at the first conversation; a template of another "
    "model renders, and the draft learns prompts that no server sends.",
    how="[template] chat_template, else chat_template.jinja, chat_template.json or "
    "tokenizer_config.json of the directory.",
    fix="set [template] chat_template to a Jinja file",
    stages=USED,
    after=("verifier-settings",),
)
def present(facts: Facts) -> Iterator[Problem]:
    if not source(facts):
        yield Problem(
            "model directory without chat template",
            where=str(facts.verifier.path),
            expected="chat_template.jinja or chat_template in tokenizer_config.json",
        )


@rule(
    "template-arguments",
    what="The template reads every argument that the recipe gives it.",
    why="Jinja ignores names that it does not know: `thinking` under another name "
    "(enable_thinking) renders the default, without a word, in a million samples.",
    how="Names against the template's text and the tokenizer's own code; whether the text really "
    "reads them is seen where transformers is (template-renders).",
    fix="set template.thinking_argument to the name that the template reads, or remove it",
    stages=USED,
    after=("template-present",),
)
def arguments(facts: Facts) -> Iterator[Problem]:
    section, text = facts.recipe.template, source(facts)
    asked = dict.fromkeys(section.arguments, "template.arguments")
    if section.thinking is not None:
        asked[section.thinking_argument] = "template.thinking"
    if not asked:
        raise NotConcerned("the recipe gives no arguments")
    known = text + code_text(facts.verifier)
    for name, where in asked.items():
        if name not in PARAMETERS and not re.search(rf"\b{re.escape(name)}\b", known):
            yield Problem(f"argument {name!r} is never read by the chat template", where=where)


@rule(
    "template-tools-own-code",
    what="Tools are written as the model was trained on them.",
    why="Kimi-K2.5's template writes `tools_ts_str`, which its tokenizer's own code makes of the "
    "tools (tokenization_kimi.py). Through any other tokenizer, a converted tokenizer.json for "
    "one, the name is undefined and the template falls back to JSON, which the model was not "
    "trained on.",
    how="A template that reads tools_ts_str, beside code that sets it and that trust_remote_code "
    "lets run.",
    fix="use the checkpoint's own tokenizer code (trust_remote_code = true), or set "
    "[template] tools = false",
    stages=USED,
    after=("template-present", "tokenizer-own-code", "tokenizer-code-present"),
)
def tools_own_code(facts: Facts) -> Iterator[Problem]:
    if "tools_ts_str" not in source(facts):
        raise NotConcerned("the template reads no text that the tokenizer's code makes")
    if not facts.recipe.template.tools:
        raise NotConcerned("[template] tools = false")
    if "tools_ts_str" not in code_text(facts.verifier):
        yield Problem(
            "the template reads tools_ts_str, which no code sets",
            where=str(facts.verifier.path),
            expected="the tokenizer's own code, run by trust_remote_code",
        )


@rule(
    "template-writes-eos",
    what="The template writes a token at which the engine stops.",
    why="vLLM 0.31.0 stops at the tokenizer's eos and those of generation_config.json, else of "
    "config.json. Kimi-K2.5 names [EOS] in config.json, which its template never writes, and "
    "<|im_end|> in generation_config.json: without that file every answer runs to max_tokens, "
    "counts as truncated, and prepare leaves all of it out.",
    how="Texts of the eos tokens, by the tokenizer's files, in the template's text; a template "
    "that reads eos_token or writes no special token at all is passed over. What really ends an "
    "answer is seen where transformers is (template-ends-turn).",
    fix="put back the checkpoint's generation_config.json: its eos_token_id names the end of turn",
    stages=USED,
    after=("template-present", "tokenizer-eos"),
)
def writes_eos(facts: Facts) -> Iterator[Problem]:
    verifier, text = facts.verifier, source(facts)
    if re.search(r"\beos_token\b", text):
        raise NotConcerned("the template writes the tokenizer's eos_token")
    texts = {i: token for token, i in added_tokens(verifier).items() if token}
    written = [token for token in texts.values() if token in text]
    own = eos_token(verifier)
    stops = [texts.get(i) for i in sorted(stop_ids(verifier) if own else verifier.eos_ids)]
    stops += [own] if own and own not in stops else []
    if not written or None in stops:
        raise NotConcerned("no special tokens in the template, or an eos without a name")
    if not any(token in text for token in stops):
        yield Problem(
            f"the template never writes {' or '.join(stops)}, at which the engine stops",
            where=_where(facts),
            expected=f"the one that ends its turns, of {', '.join(written[:8])}",
        )


# -- rendered ------------------------------------------------------------------------------------


@rule(
    "template-renders",
    what="The template opens with the recipe's arguments and renders a conversation.",
    why="What it refuses, it refuses row by row: a template that knows no system turn, or wants a "
    "field that the rows lack, turns a source into rejects.",
    how="Opened as regenerate, prepare and benchmark open it; a user's turn, an answer, and a tool "
    "where tools are on.",
    fix="correct the template or the [template] block",
    needs=("transformers",),
    stages=USED,
    after=("template-arguments", "tokenizer-opens"),
)
def renders(facts: Facts) -> Iterator[Problem | Note]:
    template = facts.template
    try:
        template.prompt_ids(ASKED)
        template.conversation([*ASKED, {"role": "assistant", "content": "4"}])
        tools = [TOOL] if facts.recipe.template.tools else None
        with_tools = template.tokenizer.decode(template.prompt_ids(ASKED, tools))
    except RowError as e:
        yield Problem(f"the template renders no plain conversation: {e}", where=_where(facts))
        return
    if tools and "look_up_weather" not in with_tools:
        yield Note("the template writes no tools: rows with tools lose them")
    if template.drops_thinking:
        yield Note("earlier thinking is dropped: one sample an assistant turn")


def _where(facts: Facts) -> str:
    return facts.recipe.template.chat_template or str(facts.verifier.path)


@rule(
    "template-thinking",
    what="Thinking on and thinking off are two prompts.",
    why="A template that names the argument but does not act on it trains the draft on one mode "
    "and serves it in the other; acceptance falls and nothing says why.",
    how="The prompt with the recipe's value against the one with the opposite value.",
    fix="set template.thinking_argument to the name that switches it, or leave thinking unset",
    needs=("transformers",),
    stages=USED,
    after=("template-renders",),
)
def thinking(facts: Facts) -> Iterator[Problem]:
    section, template = facts.recipe.template, facts.template
    if section.thinking is None:
        raise NotConcerned("the recipe leaves thinking to the template")
    name = section.thinking_argument
    prompts = {
        value: template.tokenizer.apply_chat_template(
            ASKED,
            chat_template=template.source,
            add_generation_prompt=True,
            tokenize=False,
            **{**template.arguments, name: value},
        )
        for value in (True, False)
    }
    if prompts[True] == prompts[False]:
        yield Problem(f"{name} = true and false render the same prompt", where=_where(facts))


@rule(
    "template-ends-turn",
    what="An answer is closed by a token at which the engine stops.",
    why="vLLM 0.31.0 stops at the tokenizer's eos and those of generation_config.json. If the "
    "template closes a turn with another, every answer runs to max_tokens and counts as "
    "truncated: regenerate costs many times as much and prepare leaves all of it out.",
    how="What the template writes after two different answers: its first end-of-turn token.",
    fix="name that token in eos_token_id of generation_config.json",
    needs=("transformers",),
    stages=USED,
    after=("template-renders", "tokenizer-eos", "template-writes-eos"),
)
def ends_turn(facts: Facts) -> Iterator[Problem]:
    template = facts.template
    stops = stop_ids(facts.verifier) | {template.tokenizer.eos_token_id}
    closing = template.closing_ids
    if not stops & set(closing):
        written = template.tokenizer.decode(closing)
        yield Problem(
            f"an answer is closed by {written!r}, at which the engine does not stop",
            where=_where(facts),
            expected=f"one of {sorted(i for i in stops if i is not None)} in it",
        )


def stop_ids(verifier: Verifier) -> set[int]:
    """Ids at which vLLM stops besides the tokenizer's eos: generation_config.json's, else those of
    config.json (vLLM 0.31.0, transformers_utils/config.py, try_get_generation_config)."""
    told = verifier.settings("generation_config.json").get("eos_token_id")
    if told is None:
        return set(verifier.eos_ids)
    return set(told if isinstance(told, list) else [told])
