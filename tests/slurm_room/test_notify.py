"""[notify]: a job that fails tells by Slurm's mail and by the recipe's own command."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_failure_is_told(testbed, eagle, verifier_dir, tmp_path: Path):
    """vocab alone, where nothing upstream was done: its gate is shut, nobody can open it."""
    text = (ROOT / "tests/recipes/tiny.toml").read_text().replace("../../", f"{ROOT}/")
    tell = tmp_path / "tell it.sh"
    tell.write_text(f"#!/bin/sh\nprintf '%s|' \"$@\" >>'{tmp_path}/told'\n")
    tell.chmod(0o755)
    recipe = tmp_path / "tiny.toml"
    command = json.dumps([str(tell), "$(id) 'quoted'"])
    recipe.write_text(f'{text}\n[notify]\nmail = "me@example.org"\ncommand = {command}\n')
    run = tmp_path / "run"
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
