"""Where everything of a run lies: the only place that knows path names.

    RUN/
      recipe.toml         the recipe as it was typed last (for people)
      run.json            the recipe resolved (absolute paths), where it came from
      <stage>/
        plan.json         the units of the stage, as its workers counted them
        records/          UNIT.KEY.json: one a finished unit; never replaced
        rejected/         UNIT.KEY.COUNT: records with rejected samples, as links
        claims/           UNIT: who works on it now
        attempts/         UNIT.KEY.N.json: every try, with its reason where it failed
        damaged/          UNIT.KEY.json: bytes that are not the recorded ones any more
        freed.json        the units (UNIT.KEY.aN) whose states `clean --hidden` deleted
        workers/          WORKER.json: heartbeat, progress, times
        files/            UNIT.aN.*: what records name; nothing else in here is data
        log/              standard output and error of every worker
        stop              asks the stage's workers to leave after their unit
        held              why no worker may start here (too many deaths); `retry` removes it
      held                the same for the whole run
      draft/              the exported draft model
      bench/results.json  what the benchmark found
      run.lock.json       what the run was made from: image, inputs, keys, versions, site
      image.json          the image that jobs have to run in; no file: the host's own Python
      start.sh            starts kimi-eagle in that image, on any node
      image.proven        image files whose digest was computed, as nodes see them
      accepted.jsonl      losses and images that a person accepted, with reasons
      rejects.jsonl       input rows that were left out, with reasons
      report.html
      slurm/              only where jobs were submitted
        host.sh           the supervisor of every job, copied at submit
        jobs/             SUFFIX.json: the book, one entry a submitted job or array
        log/              what host.sh and Slurm say, and the sbatch files as submitted
        starts/ use/      SUFFIX.TASK...: starts and GPU hours of every worker slot
        stop/ beacon/     SUFFIX.TASK: asks one job to leave; how far it is, for squeue
        submit.lock       one submit at a time

A run stays when its recipe changes: records carry keys, so old results are simply not current.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kimi_eagle import files
from kimi_eagle.errors import UsageError
from kimi_eagle.recipe import STAGES, Recipe, parse


@dataclass(frozen=True)
class StageDir:
    """The folder of one stage of a run."""

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def stop(self) -> Path:
        return self.path / "stop"

    @property
    def held(self) -> Path:
        return self.path / "held"

    @cached_property
    def records(self) -> Path:
        return self.path / "records"

    @property
    def rejected(self) -> Path:
        return self.path / "rejected"

    @property
    def claims(self) -> Path:
        return self.path / "claims"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def damaged(self) -> Path:
        return self.path / "damaged"

    @property
    def freed(self) -> Path:
        return self.path / "freed.json"

    @property
    def workers(self) -> Path:
        return self.path / "workers"

    @cached_property
    def files(self) -> Path:
        return self.path / "files"

    @property
    def log(self) -> Path:
        return self.path / "log"

    def make(self) -> StageDir:
        """Create the folders; returns itself."""
        for folder in (self.records, self.claims, self.attempts, self.workers, self.files):
            folder.mkdir(parents=True, exist_ok=True)
        self.log.mkdir(exist_ok=True)
        return self


@dataclass(frozen=True)
class SlurmDir:
    """What belongs to the jobs of a run."""

    path: Path

    @property
    def host(self) -> Path:
        return self.path / "host.sh"

    @property
    def jobs(self) -> Path:
        return self.path / "jobs"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def starts(self) -> Path:
        return self.path / "starts"

    @property
    def use(self) -> Path:
        return self.path / "use"

    @property
    def stop(self) -> Path:
        return self.path / "stop"

    @property
    def beacon(self) -> Path:
        return self.path / "beacon"

    @property
    def ended(self) -> Path:
        """A folder that is there when the end of the run was told; see host.sh."""
        return self.path / "ended"

    @property
    def lock(self) -> Path:
        return self.path / "submit.lock"

    def make(self) -> SlurmDir:
        """Create the folders; returns itself."""
        for folder in (self.jobs, self.log, self.starts, self.use, self.stop, self.beacon):
            folder.mkdir(parents=True, exist_ok=True)
        return self


@dataclass(frozen=True)
class RunDir:
    """One run: `open_run` or `create_run` give one."""

    path: Path

    @property
    def spec(self) -> Path:
        return self.path / "run.json"

    @property
    def driver(self) -> Path:
        """Who is running this run's stages now (`kimi-eagle run`)."""
        return self.path / "driver.json"

    @property
    def held(self) -> Path:
        return self.path / "held"

    @property
    def slurm(self) -> SlurmDir:
        return SlurmDir(self.path / "slurm")

    @property
    def draft(self) -> Path:
        return self.path / "draft"

    @property
    def bench(self) -> Path:
        return self.path / "bench"

    @property
    def lock(self) -> Path:
        return self.path / "run.lock.json"

    @property
    def image(self) -> Path:
        return self.path / "image.json"

    @property
    def proven(self) -> Path:
        return self.path / "image.proven"

    @property
    def start(self) -> Path:
        return self.path / "start.sh"

    @property
    def accepted(self) -> Path:
        return self.path / "accepted.jsonl"

    @property
    def rejects(self) -> Path:
        return self.path / "rejects.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def stage(self, name: str) -> StageDir:
        """The folder of a stage; UsageError for a name that is none."""
        if name not in STAGES:
            raise UsageError(f"unknown stage {name!r}", expected=f"one of {', '.join(STAGES)}")
        return StageDir(self.path / name)

    def recipe(self) -> Recipe:
        """The resolved recipe that this run follows."""
        spec = files.read_json(self.spec)
        if not isinstance(spec, dict) or not isinstance(spec.get("recipe"), dict):
            raise UsageError("not a run directory (no whole run.json)", where=self.path)
        return parse(spec["recipe"], where=self.spec, base=self.path)

    def recipe_path(self) -> Path | None:
        """The recipe file that the run was started from."""
        spec = files.read_json(self.spec) or {}
        return Path(spec["recipe_path"]) if spec.get("recipe_path") else None


def open_run(path: str | Path) -> RunDir:
    """An existing run; UsageError where there is none."""
    run = RunDir(Path(path).resolve())
    if not run.spec.is_file():
        raise UsageError(
            "no run here (no run.json)", where=path, fix="kimi-eagle run RECIPE --run DIR makes one"
        )
    return run


def create_run(path: Path) -> RunDir:
    """Make a run directory, or open the one that is there.

    UsageError where it cannot be written, or holds files of something else.
    """
    run = RunDir(path.resolve())
    if path.exists() and not path.is_dir():
        raise UsageError("the run directory is a file", where=path)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        known = (run.spec, run.driver, run.slurm.path, run.image)
        others = (p for p in run.path.iterdir() if not p.name.startswith(files.TEMPORARY))
        ours = any(p.exists() for p in known) or not any(others)
        probe = files.temporary_name(run.path / "writable")
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise UsageError(
            f"the run directory cannot be written: {e.strerror}",
            where=path,
            fix="choose another with --run DIR",
        ) from None
    if not ours:
        raise UsageError(
            "the folder holds files but no run",
            where=path,
            expected="an empty folder or a run directory",
            fix="choose another with --run DIR",
        )
    return run


def follow(run: RunDir, recipe: Recipe, recipe_path: Path) -> None:
    """Make the run follow this recipe from now on (run.json for stages, recipe.toml for people)."""
    spec = {
        "format": "run/1",
        "recipe": recipe.model_dump(mode="json", exclude_none=True),
        "recipe_path": str(Path(recipe_path).resolve()),
    }
    text = Path(recipe_path).read_text(encoding="utf-8")
    files.write_atomic(run.path / "recipe.toml", text)
    files.write_atomic(run.spec, json.dumps(spec, indent=1, sort_keys=True) + "\n")
