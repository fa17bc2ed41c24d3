"""Applying the rules: all of them for `check`, those of one stage when it opens.

A rule that stands on another (`after`) is not judged where that one is broken, so that one fault
gives one problem. What cannot be judged here and now is never passed over: it is listed with the
stage that will judge it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import NEEDS, NotConcerned, Note, Problem, Rule
from kimi_eagle.errors import KimiEagleError, RunError, UsageError

OK, PROBLEM, LATER, ACCEPTED, NONE = "ok", "problem", "later", "accepted", "not concerned"

ODD = (
    "look at the files that this rule reads (RULES.md); where they are right this is a fault of"
    " kimi-eagle, and the rule can be accepted"
)


@dataclass(frozen=True)
class Verdict:
    """What one rule says. state: ok, problem, later, accepted (a problem that the recipe takes
    upon itself) or not concerned. text: notes, or why it is later or not concerned."""

    rule: Rule
    state: str
    problems: tuple[Problem, ...] = ()
    text: str = ""
    stands_on: str = ""
    """The broken rule without which this one was not judged."""

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rule": self.rule.id,
            "state": self.state,
            "text": self.text,
            "stages": list(self.rule.stages),
            "problems": [vars(p) for p in self.problems],
        }


def judge(facts: Facts, rules: Iterable[Rule]) -> list[Verdict]:
    """The verdict of each rule, in order. The rules that one stands on must come before it.

    UsageError where the recipe accepts a rule that does not exist.
    """
    from kimi_eagle.contracts import rules as all_rules

    rules, found = list(rules), {}
    accepted = set(facts.recipe.contracts.accepted)
    if unknown := accepted - all_rules().keys():
        raise UsageError(
            f"contracts.accepted names {min(unknown)!r}",
            where=facts.recipe.name,
            expected="ids of rules, as kimi-eagle check prints them",
        )
    for rule in rules:
        verdict = _verdict(rule, facts, found)
        if verdict.state == PROBLEM and rule.id in accepted:
            verdict = Verdict(rule, ACCEPTED, verdict.problems, verdict.text)
        found[rule.id] = verdict
    return [found[r.id] for r in rules]


def enforce(facts: Facts, rules: Iterable[Rule], error: type[KimiEagleError] = RunError) -> None:
    """An `error` for the first problem; its text begins with the rule's id."""
    for verdict in judge(facts, rules):
        if verdict.state == PROBLEM:
            raise as_error(verdict, error)


def as_error(verdict: Verdict, error: type[KimiEagleError] = RunError) -> KimiEagleError:
    """The first problem of a broken rule as an error; how many more there are is said."""
    first, *others = verdict.problems
    more = f" (and {len(others)} more)" if others else ""
    return error(
        f"{verdict.rule.id}: {first.what}{more}",
        where=first.where,
        expected=first.expected,
        fix=first.fix or verdict.rule.fix,
    )


def _verdict(rule: Rule, facts: Facts, before: dict[str, Verdict]) -> Verdict:
    for name in rule.after:
        if name not in before:
            continue
        # What stands on an accepted problem is judged all the same: only that one was accepted.
        broken = name if before[name].state == PROBLEM else before[name].stands_on
        if broken:
            return Verdict(rule, LATER, text=f"stands on {broken}", stands_on=broken)
    try:
        if lacking := [need for need in rule.needs if facts.lacks(need)]:
            stage = f", in {rule.stages[0]}" if rule.stages else ""
            words = " and ".join(NEEDS[need] for need in lacking)
            return Verdict(rule, LATER, text=f"needs {words}{stage}")
        said = list(rule.check(facts) or ())
    except NotConcerned as e:
        return Verdict(rule, NONE, text=str(e))
    except KimiEagleError as e:
        return Verdict(rule, PROBLEM, (Problem(e.what, e.where, e.expected, e.fix),))
    except OSError as e:
        problem = Problem(f"cannot be read: {e.strerror or e}", str(e.filename or ""))
        return Verdict(rule, PROBLEM, (problem,))
    except Exception as e:  # a file of a form that nobody thought of must not hide the other rules
        problem = Problem(f"cannot be judged: {type(e).__name__}: {e}", fix=ODD)
        return Verdict(rule, PROBLEM, (problem,))
    problems = tuple(s for s in said if isinstance(s, Problem))
    notes = "; ".join(s.text for s in said if isinstance(s, Note))
    return Verdict(rule, PROBLEM if problems else OK, problems, notes)
