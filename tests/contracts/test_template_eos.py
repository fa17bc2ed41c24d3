"""What the rule on the template's text passes over: it must not stop a run that is right."""

from __future__ import annotations

import pytest
from cases_template import by_variable, no_generation_config, template
from cases_tokenizer import settings
from place import EOS, TEMPLATE, TURN, Place

from kimi_eagle.contracts import judge, rules


def state(place: Place) -> str:
    found = {v.rule.id: v.state for v in judge(place.facts(), rules().values())}
    return found["template-writes-eos"]


def plain(place: Place) -> None:
    """No special token at all, as for a base model."""
    no_generation_config(place)
    template(place, "{% for m in messages %}{{ m.content }}\n{% endfor %}{{ thinking }}")


def without_names(place: Place) -> None:
    """An eos that the tokenizer's files do not name."""
    place.change_text(eos_token_id=300)
    place.write_config(place.config() | {"eos_token_id": 300})
    (place.model / "generation_config.json").unlink()
    settings(place, eos_token=None)


@pytest.mark.parametrize("change", [by_variable, plain, without_names])
def test_what_the_text_does_not_say_is_passed_over(place: Place, change):
    change(place)
    assert state(place) == "not concerned"


@pytest.mark.parametrize("ids", [TURN, [EOS, TURN]])
def test_one_of_several_that_end_an_answer_is_enough(place: Place, ids):
    no_generation_config(place)
    assert state(place) == "problem"
    place.change_text(eos_token_id=ids)
    assert state(place) == "ok"


def test_the_tokenizer_s_own_eos_is_one_that_the_engine_stops_at(place: Place):
    """generation_config.json names another; config.json and the tokenizer this one."""
    place.change_text(eos_token_id=EOS)
    settings(place, eos_token="[EOS]")
    template(place, TEMPLATE.replace("<|im_end|>", "[EOS]"))
    assert state(place) == "ok"
