"""Each rule has a world that breaks exactly it, and holds in one that does not."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from place import Case, Place

from kimi_eagle import contracts
from kimi_eagle.contracts import __main__ as rules_file
from kimi_eagle.contracts.judging import PROBLEM, as_error, judge

HERE = Path(__file__).parent


def _cases() -> list[Case]:
    sys.path.insert(0, str(HERE))
    names = [p.stem for p in sorted(HERE.glob("cases_*.py"))]
    return [case for name in names for case in importlib.import_module(name).CASES]


CASES = _cases()
IDS = [f"{c.rule}-{i}" for i, c in enumerate(CASES)]


def problems(place: Place, heavy: bool) -> dict[str, str]:
    """Rule id -> line of its first problem."""
    verdicts = judge(place.facts(heavy=heavy), contracts.rules().values())
    return {v.rule.id: as_error(v).line() for v in verdicts if v.state == PROBLEM}


def state_of(place: Place, rule: str, heavy: bool) -> str:
    verdicts = judge(place.facts(heavy=heavy), contracts.rules().values())
    return next(v.state for v in verdicts if v.rule.id == rule)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_broken_world_breaks_exactly_one_rule(case: Case, place: Place):
    case.broken(place)
    found = problems(place, case.heavy)
    assert set(found) == {case.rule}, found
    assert case.says in found[case.rule]
    assert f"{case.rule}: " in found[case.rule]
    assert "; fix: " in found[case.rule]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_in_a_good_world_the_rule_is_judged_and_holds(case: Case, place: Place):
    if case.good is not None:
        case.good(place)
    assert problems(place, case.heavy) == {}
    assert state_of(place, case.rule, case.heavy) == "ok"


def test_every_rule_has_a_case():
    assert {c.rule for c in CASES} == set(contracts.rules())


def test_rules_stand_only_on_rules_before_them():
    seen: set[str] = set()
    for rule in contracts.rules().values():
        assert set(rule.after) <= seen, rule.id
        assert rule.what and rule.why and rule.how and rule.fix, rule.id
        seen.add(rule.id)


def test_the_file_of_rules_is_current():
    written = (Path(contracts.__file__).parent / "RULES.md").read_text()
    assert written == rules_file.text(), "python -m kimi_eagle.contracts"
