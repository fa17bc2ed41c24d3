"""What the fault tests share: runs of the tiny recipe on a testbed, and what holds after any fault:
one record a unit, the bytes of a run that nobody disturbed, nothing left over, nothing queued.

A case begins as a copy of one local run whose extract units are partly open again, so that most
faults need one engine load of some 8 s a worker. Workers are held in the middle of a unit by
KIMI_EAGLE_TEST_HOLD until `Case.go`. As root each node gets a host name of its own, so that workers
know each other by heartbeat alone, as on a real cluster.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from places import Place

from kimi_eagle import files, liveness
from kimi_eagle import recipe as recipes
from kimi_eagle.stages.context import recipe_digest

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests/recipes/tiny.toml"
UNITS = 12
"""Units of extract in the tiny recipe."""
OWN_HOST = (
    '[ "$(hostname)" = "$SLURMD_NODENAME" ] || exec unshare --uts bash -c'
    ' \'hostname "$SLURMD_NODENAME" && exec bash "$0"\' "$0"'
)
"""A line of preamble: go on in a namespace where the machine's name is the node's (root only)."""


@functools.cache
def reference(folder: Path) -> Path:
    """A local run up to vocab, made once a session."""
    if ready := os.environ.get("KIMI_EAGLE_TEST_REFERENCE"):
        return Path(ready)
    run = folder / "tiny"
    eagle("run", TINY, "--run", run, "--until", "vocab")
    return run


def eagle(*args: object, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "kimi_eagle", *map(str, args)],
        cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stderr + done.stdout
    return done


def wait(look: Callable[[], Any], seconds: float = 60, what: str = "") -> Any:
    """Until `look()` gives something true."""
    deadline = time.monotonic() + seconds
    while not (got := look()):
        assert time.monotonic() < deadline, f"not seen in {seconds} s: {what or look}"
        time.sleep(0.2)
    return got


def digests(run: Path, *stages: str) -> dict[str, str]:
    """Digest of every recorded file by stage, unit and kind; the attempt's number left out."""
    found = {}
    for stage in stages:
        for record in records(run, stage):
            for entry in record["files"]:
                kind = entry["name"].split(".", 2)[2]
                path = run / stage / "files" / entry["name"]
                key = f"{stage}/{record['unit']}/{kind}"
                found[key] = files.file_digest(path)
    return found


def records(run: Path, stage: str) -> list[dict[str, Any]]:
    """Every record of a stage, by unit."""
    found = [json.loads(p.read_text()) for p in (run / stage / "records").glob("*.json")]
    return sorted(found, key=lambda r: r["unit"])


class Case:
    """One run under a fault."""

    def __init__(self, bed: Any, origin: Path, folder: Path, place: Place) -> None:
        self.bed, self.origin, self.folder, self.place = bed, origin, folder, place
        self.run, self.go = folder / "run", folder / "go"
        self.recipe, self.site = folder / "tiny.toml", folder / "site.toml"
        self.env = {"KIMI_EAGLE_BEAT_SECONDS": "0.5"}
        self.configure()

    # -- before --------------------------------------------------------------------------------

    def configure(self, *slurm: str, site: dict[str, Any] | None = None) -> None:
        """Write recipe and site. slurm: lines of [slurm], such as `workers = 2`."""
        head, _, _ = TINY.read_text().partition("[slurm]")
        head = head.replace("../../jobs/data", str(self.place.data))
        if self.place.verifier:
            head = re.sub(r'(?m)^(\[verifier\]\npath = ).*', rf'\1"{self.place.verifier}"', head)
        self.recipe.write_text(head + "\n".join(["[slurm]", *slurm]) + "\n")
        keys = {"partition": "all", "cpus": 4, "memory": "4G", "time": "30", "grace_seconds": 30}
        keys |= {"preamble": [OWN_HOST] if os.getuid() == 0 and not self.place.ids else []}
        keys |= {"image": str(self.place.image)} if self.place.image else {}
        keys |= site or {}
        self.site.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in keys.items()))

    def open(self, *units: int) -> None:
        """Copy the reference; extract has these units to do, vocab is done."""
        shutil.copytree(self.origin, self.run, symlinks=True)
        for name in [f"{u:05d}" for u in units]:
            for folder in ("records", "files", "attempts"):
                for path in (self.run / "extract" / folder).glob(f"{name}.*"):
                    path.unlink()
        if len(units) == UNITS:
            shutil.rmtree(self.run / "extract")
        if self.place.verifier:
            self._follow_other_paths()
        self.place.own(self.folder)

    def _follow_other_paths(self) -> None:
        """The same inputs lie elsewhere: another recipe, with the keys that the plans hold."""
        digest = recipe_digest(recipes.load(self.recipe))
        for path in self.run.glob("*/plan.json"):
            path.write_text(json.dumps(json.loads(path.read_text()) | {"recipe": digest}))

    def eagle(
        self, *args: object, check: bool = True, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """The command line as the one who submits types it."""
        done = subprocess.run(
            [*self.place.program, *map(str, args)], cwd=self.folder, timeout=600,
            env={**self.place.env(), **env}, capture_output=True, text=True, **self.place.ids,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stderr + done.stdout
        return done

    def submit(self, *args: object, hold: bool | int = True, **env: str) -> list[dict[str, Any]]:
        """`kimi-eagle submit`; the jobs' entries in the book.

        hold: each worker's first unit waits for `release`, or until so many hold claims.
        """
        held = {"KIMI_EAGLE_TEST_HOLD": str(self.go if hold is True else hold)} if hold else {}
        command = ("submit", self.recipe, "--site", self.site, "--run", self.run, "--json", *args)
        done = self.eagle(*command, **{**self.env, **held, **env})
        return json.loads(done.stdout)["submitted"]

    def extract(self, *args: object, **env: Any) -> list[dict[str, Any]]:
        """Submit extract alone."""
        return self.submit("--only", "extract", *args, **env)

    def release(self) -> None:
        """Let the held workers go on."""
        self.go.touch()

    # -- meanwhile -----------------------------------------------------------------------------

    def claims(self, stage: str = "extract") -> dict[str, dict[str, Any]]:
        """Claimed unit -> the file of the worker that holds it."""
        found = {}
        for path in (self.run / stage / "claims").glob("[!.]*"):
            with contextlib.suppress(OSError):
                holder = path.read_text().partition(" ")[0].strip()
                found[path.name] = files.read_json(self.run / f"{stage}/workers/{holder}.json")
        return {unit: worker for unit, worker in found.items() if worker}

    def holder(self, unit: str) -> str:
        """The id of the worker that is in the middle of this unit, or nothing."""
        return self.midway().get(unit, {"id": ""})["id"]

    def midway(self) -> dict[str, dict[str, Any]]:
        """Those of `claims` whose worker has done a part of the unit."""
        return {u: w for u, w in self.claims().items() if w["unit"] == u and w["fraction"] > 0}

    def wait_claims(self, count: int, seconds: float = 120) -> dict[str, dict[str, Any]]:
        """Until so many workers are in the middle of a unit."""
        wait(lambda: len(self.midway()) == count, seconds, f"{count} claims")
        return self.midway()

    def jobs(self) -> dict[str, str]:
        """Job -> `STATE REASON` of what squeue shows of this run (other runs share the testbed)."""
        suffixes = {p.stem for p in (self.run / "slurm/jobs").glob("*.json")}
        found = {}
        for line in self.bed.run("squeue", "-h", "-r", "-o", "%i|%j|%T %r", check=False).split(
            "\n"
        ):
            ident, _, rest = line.partition("|")
            name, _, state = rest.partition("|")
            if name.rpartition("-")[2] in suffixes:
                found[ident] = state
        return found

    def state(self, job: str) -> str:
        """RUNNING, PENDING, ... of a job or array task; empty when it is over."""
        return self.jobs().get(job, "").partition(" ")[0]

    def wait_state(self, job: str, state: str, seconds: float = 60) -> None:
        wait(lambda: self.state(job) == state, seconds, f"{job} {state}: {self.jobs()}")

    def finish(self, seconds: float = 180) -> None:
        """Until no job of this run is queued; what Slurm holds back after a requeue starts now."""
        deadline = time.monotonic() + seconds
        while jobs := self.jobs():
            for job, state in jobs.items():
                if state == "PENDING BeginTime":
                    self.bed.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
            assert time.monotonic() < deadline, f"still queued after {seconds} s: {jobs}"
            time.sleep(0.3)

    def scontrol(self, *words: object) -> None:
        """`scontrol ...`, which has to succeed."""
        self.bed.run("scontrol", *words)

    def kill(self, worker: dict[str, Any]) -> None:
        """SIGKILL for the process of a worker."""
        os.kill(worker["pid"], signal.SIGKILL)

    def alive(self, worker: dict[str, Any]) -> bool:
        """Whether the process of a worker still runs (all nodes are on this machine)."""
        return liveness.process_start(worker["pid"]) == worker["pid_started"]

    def kill_host(self, entry: dict[str, Any]) -> None:
        """SIGKILL for host.sh of a job, and for nothing else."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_text().split("\0")
                if words[:2] == ["bash", str(self.run / "slurm/host.sh")]:
                    if entry["suffix"] in words:
                        os.kill(int(path.parent.name), signal.SIGKILL)

    # -- after ---------------------------------------------------------------------------------

    def log(self, entry: dict[str, Any]) -> str:
        """What host.sh said in a job that is no array."""
        return (self.run / f"slurm/log/{entry['job_id']}_0_log.out").read_text(errors="replace")

    def logs(self) -> str:
        """What every host.sh of the run said."""
        paths = sorted((self.run / "slurm/log").glob("*.out"))
        return "\n".join(p.read_text(errors="replace") for p in paths)

    def starts(self, stage: str = "extract") -> dict[str, int]:
        """Worker slot -> how often it was started on a stage."""
        return {
            p.stem: sum(x.endswith(f" {stage}") for x in p.read_text().splitlines())
            for p in (self.run / "slurm/starts").glob("*.txt")
        }

    def whole(self, *stages: str) -> None:
        """Every unit once, with the bytes of the reference, and nothing beside it."""
        stages = stages or ("extract",)
        self.nothing_left(*stages)
        assert digests(self.run, *stages) == digests(self.origin, *stages), self.logs()[-3000:]
        assert {r["state"] for s in stages for r in records(self.run, s)} == {"done"}

    def nothing_left(self, *stages: str) -> None:
        """No job, no claim, no doubled record; after `gc` no file that no record names."""
        assert self.jobs() == {}
        self.eagle("gc", self.run)
        for stage in stages:
            made = records(self.run, stage)
            assert len({r["unit"] for r in made}) == len(made)
            named = {f["name"].split("/")[0] for r in made for f in r["files"]}
            assert {p.name for p in (self.run / stage / "files").iterdir()} == named
            assert list((self.run / stage / "claims").iterdir()) == []
