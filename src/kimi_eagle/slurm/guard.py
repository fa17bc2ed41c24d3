"""What has to be settled before a command changes what a run follows or what is queued for it."""

from __future__ import annotations

from kimi_eagle import files, liveness
from kimi_eagle.errors import RunError
from kimi_eagle.recipe import Recipe
from kimi_eagle.rundir import RunDir
from kimi_eagle.slurm import book, use
from kimi_eagle.slurm.live import Live, live_jobs
from kimi_eagle.stages.context import recipe_digest


def refuse_held(run: RunDir, recipe: Recipe, done: set[str]) -> None:
    """RunError where a person has to decide first: a hold, spent GPU hours, a `run` at work."""
    driver = files.read_json(run.driver)
    if isinstance(driver, dict) and liveness.is_alive_here(driver):
        raise RunError(
            f"a `kimi-eagle run` is working here (pid {driver['pid']})",
            where=run.path,
            fix="stop it first; what it has done stays",
        )
    stages = [s for group in recipe.slurm.groups for s in group if s not in done]
    for path in (run.held, *(run.stage(s).held for s in stages)):
        if path.is_file():
            raise RunError(
                f"held: {path.read_text(errors='replace').strip()}",
                where=path,
                fix=f"mend the cause, then kimi-eagle retry {run.path}, then submit",
            )
    most = recipe.slurm.max_gpu_hours
    spent = sum(s.gpu_hours for s in use.read_starts(run))
    if most is not None and spent >= most:
        raise RunError(
            f"its jobs have used {spent:.2f} GPU hours",
            where=run.path,
            expected=f"less than slurm.max_gpu_hours = {most:g}",
            fix="raise it in the recipe, then submit",
        )


def refuse_other_recipe(recipe: Recipe, live: list[Live]) -> None:
    """Live jobs would go on making what nobody wants any more, or make it wrongly."""
    digest = recipe_digest(recipe)
    for x in live:
        if x.entry["recipe"] != digest:
            raise RunError(
                f"job {x.job_id} works by an earlier recipe",
                where=x.entry["run"],
                fix="kimi-eagle cancel RUN, then type this again",
            )


def before_following(run: RunDir, recipe: Recipe) -> None:
    """For commands that submit nothing but give the run a recipe (run, --emit, --here)."""
    entries = [e for e in book.read_book(run) if e.get("job_id")]
    if entries:
        refuse_other_recipe(recipe, live_jobs(run, entries))
