"""Chat templates that are missing, or do something else than the recipe asks."""

from __future__ import annotations

from cases_tokenizer import CODE, change_json, own_code, settings
from place import EOS, TEMPLATE, Case, Place

TOOLS_AS_TEXT = TEMPLATE.replace("{{ tools | tojson }}", "{{ tools_ts_str }}")


def template(place: Place, text: str) -> None:
    settings(place, chat_template=None)
    (place.model / "chat_template.jinja").write_text(text)


def none(place: Place) -> None:
    settings(place, chat_template=None)


def file_gone(place: Place) -> None:
    place.recipe["template"]["chat_template"] = "gone.jinja"


def other_name(place: Place) -> None:
    place.recipe["template"]["thinking_argument"] = "enable_thinking"


def further(place: Place) -> None:
    place.recipe["template"]["arguments"] = {"today": "Monday"}


def read_further(place: Place) -> None:
    further(place)
    template(place, "{{ today }}" + TEMPLATE)


def converted(place: Place) -> None:
    """Kimi's template beside a tokenizer.json that somebody converted."""
    template(place, TOOLS_AS_TEXT)


def with_own_code(place: Place) -> None:
    own_code(place, trusted=True, text=CODE + "    # sets tools_ts_str\n")
    template(place, TOOLS_AS_TEXT)


def refuses(place: Place) -> None:
    template(place, TEMPLATE + "{{ raise_exception('no such role: ' ~ messages[0].role) }}")


def not_read(place: Place) -> None:
    """The name stands in the text, in a comment: seen only by parsing it."""
    other_name(place)
    template(place, TEMPLATE + "{# enable_thinking is not read #}")


def idle(place: Place) -> None:
    template(place, TEMPLATE.replace("<think></think>", "<think>"))


ANSWER = "{{ m.content }}<|im_end|>{%- else -%}"


def other_end(place: Place) -> None:
    """After an answer alone: elsewhere the text still names the end of turn."""
    assert ANSWER in TEMPLATE.replace("\n", "")
    template(place, TEMPLATE.replace(ANSWER, ANSWER.replace("<|im_end|>", "</think>")))


def no_generation_config(place: Place) -> None:
    """As Kimi-K2.5 without it: [EOS] alone is left."""
    eos_in_generation_alone(place)
    (place.model / "generation_config.json").unlink()
    settings(place, eos_token="[EOS]")


def by_variable(place: Place) -> None:
    """The template writes eos_token, by whatever name: nothing to say of its text."""
    no_generation_config(place)
    template(place, TEMPLATE.replace("<|im_end|>", "{{ eos_token }}"))


def code_missing(place: Place) -> None:
    """The fault is the missing file, which tokenizer-code-present tells."""
    with_own_code(place)
    (place.model / "tokenization_own.py").unlink()


def eos_in_generation_alone(place: Place) -> None:
    place.change_text(eos_token_id=EOS)
    place.write_config(place.config() | {"eos_token_id": EOS})


def end_not_stopped_at(place: Place) -> None:
    """The end of turn in config.json, which vLLM does not read where generation_config.json is."""
    change_json(place, "generation_config.json", eos_token_id=EOS)
    settings(place, eos_token="[EOS]")
    template(place, "[EOS]" + TEMPLATE)


CASES = [
    Case("template-present", none, "without chat template"),
    Case("template-present", file_gone, "chat template cannot be read"),
    Case("template-arguments", other_name, "'enable_thinking' is never read"),
    Case("template-arguments", further, "'today' is never read", good=read_further),
    Case("template-tools-own-code", converted, "tools_ts_str, which no code sets", with_own_code),
    Case("tokenizer-code-present", code_missing, "lacks tokenization_own.py", good=with_own_code),
    Case("template-writes-eos", no_generation_config, "never writes [EOS]"),
    Case("template-renders", refuses, "no such role", heavy=True),
    Case("template-renders", not_read, "never read", heavy=True),
    Case("template-thinking", idle, "render the same prompt", heavy=True),
    Case("template-ends-turn", other_end, "closed by '</think>'", heavy=True),
    Case(
        "template-ends-turn",
        end_not_stopped_at,
        "the engine does not stop",
        good=eos_in_generation_alone,
        heavy=True,
    ),
]
