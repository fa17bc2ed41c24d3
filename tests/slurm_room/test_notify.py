"""[notify]: a job that fails tells by Slurm's mail and by the recipe's own command."""

from __future__ import annotations

import json
from pathlib import Path

from kimi_eagle import recipe as recipes
from kimi_eagle.ledger import Ledger, Unit
from kimi_eagle.recipe import Recipe
from kimi_eagle.rundir import RunDir
from kimi_eagle.stages.context import recipe_digest

ROOT = Path(__file__).resolve().parents[2]


def pretend_done(run: RunDir, recipe: Recipe, *stages: str) -> None:
    """Records that submit believes, of keys that no stage knows."""
    run.path.mkdir()
    run.spec.write_text("{}")
    for stage in stages:
        ledger, unit = Ledger(run.stage(stage).make(), recipe_digest(recipe)), Unit("0", {})
        ledger.write_plan([unit])
        record = {"unit": unit.name, "key": unit.key, "state": "done", "files": [], "counts": {}}
        ledger.create_record(unit, record)


def test_failure_is_told(testbed, eagle, verifier_dir, tmp_path: Path):
    """vocab alone, and what it reads is not what it seems: its gate is shut for good."""
    text = (ROOT / "tests/recipes/tiny.toml").read_text().replace("../../", f"{ROOT}/")
    tell = tmp_path / "tell it.sh"
    tell.write_text(f"#!/bin/sh\nprintf '%s|' \"$@\" >>'{tmp_path}/told'\n")
    tell.chmod(0o755)
    recipe = tmp_path / "tiny.toml"
    command = json.dumps([str(tell), "$(id) 'quoted'"])
    recipe.write_text(f'{text}\n[notify]\nmail = "me@example.org"\ncommand = {command}\n')
    run = tmp_path / "run"
    pretend_done(RunDir(run), recipes.load(recipe), "regenerate", "prepare")
    words = ("submit", recipe, "--site", "testbed", "--run", run, "--only", "vocab", "--json")
    done = eagle(*words)
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)["submitted"]
    testbed.wait_state(entry["job_id"], "FAILED", seconds=90)
    kind, event, where, why = (tmp_path / "told").read_text().split("|")[:4]
    assert (kind, event, where) == ("$(id) 'quoted'", "failure", str(run))
    assert "nobody works on them" in why
    mails = testbed.dir / "log/mail"
    testbed.wait(lambda: mails.exists() and entry["name"][-10:] in mails.read_text(), True)
    assert "me@example.org" in mails.read_text()
