"""What submit believes to be done, without tokenizer or torch.

A worker's plan.json names the recipe it was made by. Stages whose planned units all have records
are done when the plan is of this recipe; anything else counts as not done, and then a job looks
closer: one with nothing to do is over in seconds.
"""

from __future__ import annotations

from kimi_eagle import files
from kimi_eagle.ledger import Ledger
from kimi_eagle.recipe import STAGES, Recipe
from kimi_eagle.rundir import RunDir
from kimi_eagle.stages import UPSTREAM
from kimi_eagle.stages.context import recipe_digest


def done_stages(run: RunDir, recipe: Recipe) -> set[str]:
    """Stages with nothing left to do, and whose upstream stages have nothing left either."""
    done: set[str] = set()
    for stage in STAGES:
        counted = _counted(run, recipe, stage)
        if counted is not None and counted[0] == counted[1] and set(UPSTREAM[stage]) <= done:
            done.add(stage)
    return done


def proven(run: RunDir, recipe: Recipe) -> frozenset[int]:
    """Groups whose stage of many units has a first unit done, by this recipe."""
    found = set()
    for number, group in enumerate(recipe.slurm.groups):
        counts = [_counted(run, recipe, s) for s in group if s in ("regenerate", "extract")]
        if counts and all(c is not None and c[0] > 0 for c in counts):
            found.add(number)
    return frozenset(found)


def _counted(run: RunDir, recipe: Recipe, stage: str) -> tuple[int, int] | None:
    """(units with a record, units) by the plan of this recipe, None without such a plan."""
    folder = run.stage(stage)
    plan = files.read_json(folder.plan)
    if not isinstance(plan, dict) or plan.get("recipe") != recipe_digest(recipe):
        return None
    tally = Ledger(folder).tally()
    units = [f"{u['name']}.{u['key']}" for u in plan["units"]]
    return sum(u in tally.inodes and u not in tally.failed for u in units), len(units)
