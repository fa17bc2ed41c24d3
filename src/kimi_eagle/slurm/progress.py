"""What submit believes to be done, without tokenizer or torch.

A worker's plan.json names the recipe it was made by. A stage whose planned units all have records
is done when the plan is of this recipe and no more was lost than its gate lets pass. Anything else
counts as not done, and then a job looks closer: one with nothing to do is over in seconds.
"""

from __future__ import annotations

from kimi_eagle import accepted
from kimi_eagle.recipe import STAGES, Recipe
from kimi_eagle.rundir import RunDir
from kimi_eagle.slurm.jobs import SHARED_STAGES
from kimi_eagle.stages import UPSTREAM
from kimi_eagle.stages.context import recipe_digest
from kimi_eagle.survey import StageView, view


def done_stages(run: RunDir, recipe: Recipe) -> set[str]:
    """Stages with nothing left to do, and whose upstream stages have nothing left either."""
    done: set[str] = set()
    for stage in STAGES:
        if stage == "regenerate" and not recipe.regenerate.enabled:
            done.add(stage)
        elif set(UPSTREAM[stage]) <= done and (seen := _of_recipe(run, recipe, stage)):
            most = max(recipe.allow_rejected, accepted.share_of(run, stage))
            if seen.complete and seen.lost <= most * max(1, seen.samples):
                done.add(stage)
    return done


def proven(run: RunDir, recipe: Recipe, stages: tuple[str, ...]) -> bool:
    """Whether each stage of many units among these has a first unit done, by this recipe."""
    shared = [s for s in stages if s in SHARED_STAGES]
    seen = [_of_recipe(run, recipe, s) for s in shared]
    return bool(seen) and all(v is not None and v.done > 0 for v in seen)


def _of_recipe(run: RunDir, recipe: Recipe, stage: str) -> StageView | None:
    """The stage as its plan of this recipe shows it, None without such a plan."""
    seen = view(run, stage, every=[])
    return seen if seen.units and seen.planned_by == recipe_digest(recipe) else None
