"""What the rules share: accepted problems, rules that fail themselves, many records."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from cases_drift import begun
from place import Place

from kimi_eagle import contracts
from kimi_eagle.contracts.judging import judge
from kimi_eagle.contracts.rule import Note, Problem, Rule
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.ledger import Ledger, Unit


def rule_of(name: str, check, after: tuple[str, ...] = ()) -> Rule:
    return Rule(name, "what", "why", "how", "the rule's fix", check, after=after)


def broken(facts) -> Iterator[Problem]:
    yield Problem("is broken")


def holds(facts) -> Iterator[Note]:
    yield Note("seen")


def states(place: Place, *rules: Rule) -> dict[str, str]:
    return {v.rule.id: v.state for v in judge(place.facts(), rules)}


def test_what_stands_on_a_problem_is_later_and_all_that_stands_on_that(place: Place):
    rules = rule_of("a", broken), rule_of("b", holds, ("a",)), rule_of("c", holds, ("b",))
    assert states(place, *rules) == {"a": "problem", "b": "later", "c": "later"}


def test_what_stands_on_an_accepted_problem_is_judged(place: Place):
    name = "verifier-directory"
    place.recipe["contracts"] = {"accepted": [name]}
    assert states(place, rule_of(name, broken), rule_of("b", broken, (name,))) == {
        name: "accepted",
        "b": "problem",
    }


def test_accepted_rules_must_exist(place: Place):
    place.recipe["contracts"] = {"accepted": ["no-such-rule"]}
    with pytest.raises(UsageError, match="no-such-rule"):
        judge(place.facts(), [])


@pytest.mark.parametrize("error", [KeyError("hidden"), TypeError("odd"), PermissionError(13, "No")])
def test_a_rule_that_fails_is_its_own_problem_alone(place: Place, error: Exception):
    def fails(facts) -> Iterator[Problem]:
        raise error
        yield

    assert states(place, rule_of("a", fails), rule_of("b", holds)) == {"a": "problem", "b": "ok"}
    with pytest.raises(RunError, match="a: cannot be"):
        contracts.enforce(place.facts(), [rule_of("a", fails)])


def test_of_several_records_of_a_unit_the_newest_counts(place: Place):
    begun(place)
    ledger = Ledger(place.given["run"].stage("extract"))
    for key, ended in (("old", 5), ("new", 9)):
        unit = Unit("00007", {"is": key})
        data = {"unit": unit.name, "key": unit.key, "state": "done", "parts": unit.parts}
        data |= {"ended": ended, "attempt": 1, "files": [], "counts": {}, "info": {}}
        assert ledger.create_record(unit, data)
    found = {r.unit: r.data["parts"] for r in place.facts().records("extract")}
    assert found["00007"] == {"is": "new"}
    assert set(found) == {"00000", "00007"}


def test_thousands_of_records_are_read_once(place: Place, monkeypatch: pytest.MonkeyPatch):
    begun(place)
    ledger = Ledger(place.given["run"].stage("extract"))
    for i in range(300):
        unit = Unit(f"{i + 1:05d}", {"i": i})
        data = {"unit": unit.name, "key": unit.key, "state": "done", "parts": unit.parts}
        data |= {"ended": 1, "attempt": 1, "files": [], "counts": {}, "info": {}}
        assert ledger.create_record(unit, data)
    reads = []
    from kimi_eagle import files

    real = files.read_json
    monkeypatch.setattr(files, "read_json", lambda path: reads.append(path) or real(path))
    facts = place.facts()
    start = time.monotonic()
    for _ in range(20):
        assert len(facts.records("extract")) == 301
    assert len(reads) == 301, time.monotonic() - start
