"""The draft in `train.from`, judged as an exported draft is: by the very same checks."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_eagle.contracts import draft, draft_values, draft_weights  # noqa: F401  registers
from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import RULES, Note, Problem, rule
from kimi_eagle.contracts.training import DEEP

LOADS = (
    "speculators 0.9.0 starts from what it finds (model.py, from_pretrained): what is missing or "
    "named otherwise is made anew by chance, with a line in the log, and the numbers of the "
    "config are kept for good. As of any draft: "
)
AGAIN = "name another draft in train.from, or write this one again from the run that made it"
TRAINED_SO = (
    "correct the draft's config.json; where it was trained so, repeat it in [train.draft] rope, "
    "or name this rule in [contracts] accepted"
)
SHORT = "train from a draft with more positions, or lower prepare.max_length and max_model_len"


def _same(name: str, *, fix: str = AGAIN, after: tuple[str, ...] = ()) -> None:
    """The rule `draft-NAME` on the draft in train.from, as `training-from-NAME`."""
    own = RULES[f"draft-{name}"]
    register = rule(
        f"training-from-{name}",
        what=f"The draft in train.from, as any draft: {own.what[0].lower()}{own.what[1:]}",
        why=f"{LOADS}{own.why}",
        how=own.how,
        fix=fix,
        stages=("vocab", "train"),
        after=(*DEEP, "training-from-verifier", *after),
    )

    def check(facts: Facts) -> Iterator[Problem | Note]:
        return own.check(draft.at_start(facts))

    register(check)


_same("activation")
_same("parallel", fix=RULES["draft-parallel"].fix)
_same("rope-layouts", fix=RULES["draft-rope-layouts"].fix)
_same("rope-theta", fix=TRAINED_SO, after=("training-from-rope-layouts", "training-from-shape"))
_same("yarn", fix=TRAINED_SO, after=("training-from-rope-layouts", "training-from-shape"))
_same("positions", fix=SHORT)
_same("tensors")
_same("tensor-shapes", after=("training-from-tensors",))
_same("dtype")
_same("d2t-present", after=("training-from-tensor-shapes", "training-from-mapping"))
