"""Writes RULES.md beside itself: `python -m kimi_eagle.contracts`."""

from pathlib import Path

from kimi_eagle.contracts import BOUNDARIES, rules
from kimi_eagle.contracts.facts import LIBRARIES
from kimi_eagle.contracts.rule import NEEDS, Rule
from kimi_eagle.files import write_atomic

HEAD = """# The rules

What must hold between the parts of a run, why, and what to do where it does not. Made from
`src/kimi_eagle/contracts/*.py` by `python -m kimi_eagle.contracts`; do not edit.

`kimi-eagle check RECIPE` judges every rule that can be judged where it is typed. Each stage judges
its own again when it opens, against the libraries of its image. A rule that you know to be broken
on purpose: `[contracts] accepted = ["ID"]` in the recipe.
"""


def text() -> str:
    """The whole file."""
    parts = [HEAD]
    for boundary in BOUNDARIES:
        parts.append(f"## {boundary}\n")
        parts += [_section(r) for r in rules().values() if r.boundary == boundary]
    return "\n".join(parts)


def _section(rule: Rule) -> str:
    judged = ["kimi-eagle check --full" if set(rule.needs) & set(LIBRARIES) else "kimi-eagle check"]
    judged += [f"the opening of {', '.join(rule.stages)}"] if rule.stages else []
    needs = f" Needs {', '.join(NEEDS[n] for n in rule.needs)}." if rule.needs else ""
    return (
        f"### {rule.id}\n\n{rule.what}\n\n- Why: {rule.why}\n- How: {rule.how}\n"
        f"- Fix: {rule.fix}\n- Judged by: {' and '.join(judged)}.{needs}\n"
    )


if __name__ == "__main__":
    write_atomic(Path(__file__).with_name("RULES.md"), text())
