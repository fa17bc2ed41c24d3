"""Token ids as serving gives them, and a loss mask exact to the token."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from kimi_eagle.data.template import ChatTemplate
from kimi_eagle.errors import RowError, UsageError
from kimi_eagle.recipe import TemplateSection


def say(*texts, system=None):
    """Messages by turns: user, assistant, user, ..."""
    roles = ("user", "assistant")
    first = [{"role": "system", "content": system}] if system else []
    return first + [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]


CONVERSATIONS = {
    "plain": say("Hello", "Hi there!"),
    "system": say("Hello", "Hi!", system="Be brief."),
    "two turns": say("One?", "Uno.", "Two?", "Dos."),
    "unanswered end": say("One?", "Uno.", "Two?"),
    "marker in answer": say("Show ChatML", "It is <|im_start|>user\nhi<|im_end|>\n and so on."),
    "marker ends answer": say("End it", "The marker is <|im_end|>\n", "And?", "<|im_end|>"),
    "marker in prompt": say("Why <|im_start|>assistant\nNo<|im_end|>\n?", "Because.", "So?", "Yes"),
    "answer quotes prompt": say("abc", "user\nabc<|im_end|>\n<|im_start|>assistant\nabc"),
    "same answers": say("a", "x", "a", "x", "a", "x"),
    "blanks": say("Code?", "\n\n    return 1\n\n", "More?", " \tindented"),
    "emoji": say("Smile", "😀🎉", "日本語?", "はい、そうです👩‍👩‍👧"),
    "answer first": [{"role": "assistant", "content": "Welcome."}, *say("Hi", "Hello.")],
}


def official(template, messages, **kwargs):
    """transformers' own rendering and tokenisation."""
    return template.tokenizer.apply_chat_template(messages, return_dict=True, **kwargs)


def answers(messages):
    """Given answers that carry loss: those after a user turn."""
    seen, found = False, []
    for m in messages:
        seen |= m["role"] == "user"
        if seen and m["role"] == "assistant":
            found.append(m["content"])
    return found


def masked(template, messages, tools=None):
    """The samples as lists."""
    return [(i.tolist(), m.tolist()) for i, m in template.conversation(messages, tools)]


def runs(ids, mask):
    """Token ids of each unbroken run of loss tokens."""
    found, before = [], False
    for token, on in zip(ids, mask, strict=True):
        if on and not before:
            found.append([])
        if on:
            found[-1].append(token)
        before = on
    return found


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_ids_are_transformers_and_mask_is_each_answer_with_its_end(template, name):
    messages = CONVERSATIONS[name]
    while messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    ((ids, mask),) = masked(template, CONVERSATIONS[name])
    assert ids == official(template, messages)["input_ids"]
    texts = [
        template.tokenizer.decode(r, clean_up_tokenization_spaces=False) for r in runs(ids, mask)
    ]
    expected = [a + "<|im_end|>" for a in answers(messages)]
    if name == "blanks":  # the newline before the answer and its own blanks are one token
        expected = ["\n" + text for text in expected]
    assert texts == expected
    assert all(r[-1] == 2 for r in runs(ids, mask))


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_mask_by_independent_prefix_rendering(template, name):
    """Token ids of prompts and prefixes, rendered and tokenised apart, give the same places."""
    messages = CONVERSATIONS[name]
    ((ids, mask),) = masked(template, messages)
    expected = [False] * len(ids)
    for i, m in enumerate(messages):
        if m["role"] == "assistant" and any(n["role"] == "user" for n in messages[:i]):
            prompt = official(template, messages[:i], add_generation_prompt=True)["input_ids"]
            until = official(template, messages[: i + 1])["input_ids"][:-1]  # without the newline
            start = next(
                (k for k, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b),
                len(prompt),
            )
            assert ids[: len(until)] == until
            expected[start : len(until)] = [True] * (len(until) - start)
    assert mask == expected


GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("name", [n for n in CONVERSATIONS if n not in ("answer first",)])
def test_mask_equals_transformers_generation_markers(jinja, name):
    template = jinja(GENERATION)
    messages = CONVERSATIONS[name]
    while messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    out = official(template, messages, chat_template=GENERATION, return_assistant_tokens_mask=True)
    ((ids, mask),) = masked(template, messages)
    assert ids == out["input_ids"]
    assert [int(m) for m in mask] == out["assistant_masks"]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_tokenizer_without_offsets_gives_the_same(template, name, monkeypatch):
    """Kimi's tokenizer is a slow one: token prefixes instead of offsets."""
    with_offsets = masked(template, CONVERSATIONS[name])
    tokenise = ChatTemplate._tokenise
    monkeypatch.setattr(ChatTemplate, "_tokenise", lambda s, texts: (tokenise(s, texts)[0], None))
    assert masked(template, CONVERSATIONS[name]) == with_offsets


def test_a_real_tokenizer_without_offsets(tmp_path):
    """ByT5's is pure Python, as Kimi's is; its end-of-turn token is </s>."""
    from transformers import ByT5Tokenizer

    from kimi_eagle.verifier import open_verifier

    weights = {"model.embed_tokens.weight": torch.zeros(1, 1)}
    save_file(weights, tmp_path / "model.safetensors")
    config = {"hidden_size": 1, "num_hidden_layers": 1, "vocab_size": 384, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", **config}))
    ByT5Tokenizer().save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    template = ChatTemplate(open_verifier(tmp_path, require_template=True), TemplateSection())
    assert not template.tokenizer.is_fast
    for messages in CONVERSATIONS.values():
        while messages[-1]["role"] != "assistant":
            messages = messages[:-1]
        ((ids, mask),) = masked(template, messages)
        assert ids == official(template, messages)["input_ids"]
        assert all(r[-1] == 1 for r in runs(ids, mask))
        # This tokenizer drops blanks beside a special token.
        texts = [template.tokenizer.decode(r[:-1]).strip() for r in runs(ids, mask)]
        assert texts == [a.strip() for a in answers(messages)]


def test_batch_equals_one_by_one_and_a_bad_row_stops_nobody(template):
    batch = [(m, None) for m in CONVERSATIONS.values()]
    batch.insert(3, (say("only a question"), None))
    found = template.conversations(batch)
    bad = found.pop(3)
    assert isinstance(bad, RowError) and bad.rule == "no-answer"
    found = [[(i.tolist(), m.tolist()) for i, m in row] for row in found]
    assert found == [masked(template, m) for m in CONVERSATIONS.values()]


STRIPS = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' %}{% endfor -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- set text = m.content -%}
{%- if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in text -%}
{%- set text = text.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""


def test_template_that_drops_thinking_gives_one_sample_a_turn(jinja, template):
    stripping = jinja(STRIPS)
    assert stripping.drops_thinking and not template.drops_thinking
    messages = say("1+1?", "<think>\neasy\n</think>\n\n2", "2+2?", "<think>\nhm\n</think>\n\n4")
    first, second = masked(stripping, messages)
    decode = stripping.tokenizer.decode
    for (ids, mask), turn in ((first, 1), (second, 3)):
        prefix = messages[: turn + 1]
        assert ids == official(stripping, prefix, chat_template=STRIPS)["input_ids"]
        (run,) = runs(ids, mask)
        assert decode(run) == messages[turn]["content"] + "<|im_end|>"
    assert "easy" not in decode(second[0]) and "easy" in decode(first[0])
    # Without thinking nothing is dropped: one sample.
    assert len(masked(stripping, say("a", "b", "c", "d"))) == 1
    # A template that keeps it: one sample.
    assert len(masked(template, messages)) == 1


SCAFFOLD = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_prompt_that_opens_a_thought_which_the_answer_lacks(jinja):
    template = jinja(SCAFFOLD)
    for answer in ("<thinking is hard>", "Plain."):
        ((ids, mask),) = masked(template, say("Q", answer))
        (run,) = runs(ids, mask)
        assert template.tokenizer.decode(run) == answer + "<|im_end|>"
    ((ids, mask),) = masked(template, say("Q", "<think>\nwhy\n</think>\nA"))
    assert template.tokenizer.decode(runs(ids, mask)[0]) == "why\n</think>\nA<|im_end|>"


NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PAST_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
)


def test_template_without_end_of_turn_ends_with_the_content(jinja):
    template = jinja(NO_END)
    ((ids, mask),) = masked(template, say("Q", "quotes <|im_end|> inside", "R", "yes"))
    texts = [template.tokenizer.decode(r).strip() for r in runs(ids, mask)]
    assert texts == ["quotes <|im_end|> inside", "yes"]


def test_text_after_the_whole_conversation_is_no_answer(jinja):
    template = jinja(PAST_END)
    ((ids, mask),) = masked(template, say("Q", "A", "R", "B"))
    assert ids[-1] == 0  # <|endoftext|>
    texts = [template.tokenizer.decode(r) for r in runs(ids, mask)]
    assert texts == ["A<|im_end|>", "B<|im_end|>"]


TOOLS = (
    "{% if tools %}tools {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def called(**arguments):
    return {"id": "1", "type": "function", "function": {"name": "get", "arguments": arguments}}


def test_tool_calls_are_answers_and_results_are_not(jinja):
    template = jinja(TOOLS)
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [called(city="Bern")]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    ]
    tools = [{"type": "function", "function": {"name": "get"}}]
    ((ids, mask),) = masked(template, messages, tools)
    assert ids == official(template, messages, chat_template=TOOLS, tools=tools)["input_ids"]
    texts = [template.tokenizer.decode(r) for r in runs(ids, mask)]
    assert texts == ['<call>get {"city": "Bern"}</call><|im_end|>', "It rains.<|im_end|>"]


def test_tool_call_that_the_template_leaves_out_is_refused(template):
    messages = say("Weather?", "")
    messages[1]["tool_calls"] = [called(city="Bern")]
    with pytest.raises(RowError, match="empty-answer"):
        masked(template, messages)


def test_tools_refused_where_the_recipe_says_so(jinja):
    template = jinja(TOOLS, tools=False)
    with pytest.raises(RowError, match="tools-refused"):
        template.prompt_ids(say("Q"), [{"type": "function"}])
    assert template.prompt_ids(say("Q"), None)


def test_arguments_reach_the_template(jinja):
    text = "{% if enable_thinking %}yes{% else %}no{% endif %} {{ style }}{{ messages[0].content }}"
    on = jinja(text, thinking=True, thinking_argument="enable_thinking", arguments={"style": "s"})
    off = jinja(text, thinking=False, thinking_argument="enable_thinking")
    assert on.tokenizer.decode(on.prompt_ids(say("Q"))) == "yes sQ"
    assert off.tokenizer.decode(off.prompt_ids(say("Q"))) == "no Q"
    assert on.digest() != off.digest()


@pytest.mark.parametrize(
    ("section", "part"),
    [
        ({"thinking": True}, "template.thinking: argument 'thinking'"),
        ({"arguments": {"colour": "red"}}, "template.arguments.colour"),
        ({"arguments": {"messages": "x"}}, "template.arguments.messages"),
        ({"chat_template": "/nowhere.jinja"}, "/nowhere.jinja: chat template cannot be read"),
    ],
)
def test_bad_template_section(verifier, section, part):
    with pytest.raises(UsageError, match=part):
        ChatTemplate(verifier, TemplateSection(**section))


def test_broken_jinja(jinja):
    with pytest.raises(UsageError, match="not a Jinja template: line 2"):
        jinja("ok\n{% if x %}")


def test_template_that_refuses_a_role(jinja):
    template = jinja("{{ raise_exception('no ' + messages[0].role) }}")
    with pytest.raises(RowError, match="template: .*no user"):
        template.prompt_ids(say("Q"))


def test_prompt_ids_and_limit(template):
    ids = template.prompt_ids(say("Hello"))
    assert ids == official(template, say("Hello"), add_generation_prompt=True)["input_ids"]
    assert template.prompt_ids(say("Hello"), limit=len(ids)) == ids
    with pytest.raises(RowError, match="too-long"):
        template.prompt_ids(say("Hello"), limit=len(ids) - 1)
    found = template.prompts([(say("Hello"), None), (say("word " * 500), None)], limit=100)
    assert found[0] == ids and found[1].rule == "too-long"


def test_answer_text_leaves_the_end_out(template):
    ids = template.tokenizer.encode("Say <repo_name> , now .", add_special_tokens=False)
    assert template.answer_text([*ids, 2]) == "Say <repo_name> , now ."
    assert template.answer_text(ids) == "Say <repo_name> , now ."


CHAT = """
import json, sys
from vllm import LLM, SamplingParams
conversations = json.load(sys.stdin)
llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=1024, dtype="bfloat16")
out = llm.chat(conversations, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
print("IDS " + json.dumps([list(o.prompt_token_ids) for o in out]))
"""


def test_prompt_ids_are_those_of_vllm_chat(template, verifier_dir):
    """The whole path of serving: vLLM's LLM.chat on the real model."""
    import os

    prompts = [
        m[: 1 + max(i for i, n in enumerate(m) if n["role"] == "user")]
        for m in CONVERSATIONS.values()
    ]
    env = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    done = subprocess.run(
        [sys.executable, "-c", CHAT, str(verifier_dir)],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
    )
    line = next((x for x in done.stdout.splitlines() if x.startswith("IDS ")), None)
    assert line, done.stderr[-3000:]
    assert json.loads(line[4:]) == [template.prompt_ids(m) for m in prompts]
