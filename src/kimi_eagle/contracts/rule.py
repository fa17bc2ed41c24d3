"""What a rule is, and the register of all of them.

A rule is one sentence that must hold at a boundary between parts, with the reason it is there. Its
`check` reads `Facts` and yields what is wrong. The same function answers `kimi-eagle check` on a
login node and opens the stages inside the container: there is no second list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kimi_eagle.recipe import STAGES

if TYPE_CHECKING:
    from kimi_eagle.contracts.facts import Facts

NEEDS = {
    "torch": "PyTorch",
    "transformers": "transformers",
    "vllm": "vLLM",
    "speculators": "speculators",
    "installed": "the libraries of the pipeline",
    "gpu": "a GPU",
    "site": "a site file",
    "run": "a run that was begun",
    "samples": "prepared samples",
    "states": "extracted states",
    "mapping": "the vocabulary mapping",
    "draft": "a draft directory",
}
"""What a rule may need besides the recipe and the verifier's directory."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong; the words are those of `errors.KimiEagleError`. fix "": the rule's
    own."""

    what: str
    where: str = ""
    expected: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Note:
    """Something worth saying though all is well."""

    text: str


class NotConcerned(Exception):
    """Raised by a check: the rule has nothing to say about this verifier or recipe, and why."""


Check = Callable[["Facts"], "Iterator[Problem | Note]"]


@dataclass(frozen=True)
class Rule:
    """One rule.

    id: `boundary-words`, stable: recipes may name it. what: the sentence that holds. why: library,
    version and symptom of a breach. how: how it is verified. fix: what to type or change.
    needs: keys of NEEDS. stages: where it is verified again when the stage opens, upstream first.
    after: ids of rules without which this one cannot be judged.
    """

    id: str
    what: str
    why: str
    how: str
    fix: str
    check: Check = field(repr=False)
    needs: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def boundary(self) -> str:
        """The file that holds it, such as `verifier`."""
        return self.check.__module__.rpartition(".")[2]


RULES: dict[str, Rule] = {}
"""Every rule by id, in the order in which the files were imported: `contracts.rules()` has all, in
their own order."""


def rule(
    id: str,  # noqa: A002  the word that users see
    *,
    what: str,
    why: str,
    how: str,
    fix: str,
    needs: tuple[str, ...] = (),
    stages: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
) -> Callable[[Check], Check]:
    """Register the decorated check as a rule; it stays callable for tests and for the stages.

    A check yields Problems and Notes. A KimiEagleError that it raises counts as one problem (so
    that a rule may use the very function that would fail later), NotConcerned as "not for this".
    """
    assert set(needs) <= NEEDS.keys(), id
    assert set(stages) <= set(STAGES), id

    def register(check: Check) -> Check:
        assert id not in RULES, id
        RULES[id] = Rule(id, what, why, how, fix, check, needs, stages, after)
        return check

    return register
