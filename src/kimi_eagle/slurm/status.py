"""How far a run is, from records, workers' files and squeue alone; works without accounting.

Order matters: workers' files, then squeue, then records. A worker that ends in between is seen as
ended, and a unit that its job finished is seen as done; the other way round a finished run could
look like one whose jobs are gone and whose work is left.
"""

from __future__ import annotations

import functools
import math
import os
import pwd
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kimi_eagle import accepted, files, liveness
from kimi_eagle.errors import KimiEagleError
from kimi_eagle.recipe import STAGES
from kimi_eagle.rundir import RunDir
from kimi_eagle.slurm import jobview, queue, use
from kimi_eagle.slurm.book import read_book
from kimi_eagle.slurm.names import SHORT, is_of_run
from kimi_eagle.stages import UPSTREAM
from kimi_eagle.survey import StageView, all_workers, rate_and_eta, view

SUBMIT_AGAIN = "no job in the queue and work is left: type the same submit again"
WORKING = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
"""States of jobs whose processes are there."""


@dataclass
class Look:
    """What one look at a run has found; `as_json` documents the parts."""

    run: RunDir
    state: str = ""
    why: str = ""
    stages: list[dict[str, Any]] = field(default_factory=list)
    views: list[StageView] = field(default_factory=list)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    slurm: str = "none"
    use: dict[str, dict[str, float]] = field(default_factory=dict)
    accepted: list[dict[str, Any]] = field(default_factory=list)
    held: str | None = None
    image: dict[str, str] | None = None
    result: dict[str, Any] | None = None

    @property
    def goes_on(self) -> bool:
        """Will something still happen without anybody typing anything?"""
        return self.state in ("running", "queued", "unseen")

    def news(self) -> list[tuple[Any, ...]]:
        """What a log file should tell at once; rates and shares can wait."""
        shown = ("name", "state", "why", "done", "failed", "error")
        stages = [tuple(s[k] for k in shown) for s in self.stages]
        return [(self.state, self.why), *stages, *((j["id"], j["state"]) for j in self.jobs)]

    def as_json(self) -> dict[str, Any]:
        """Stable keys:

        run, state (finished, running, queued, unseen: Slurm did not answer, held, failed, stopped,
        new), why (one line or empty), held (why the whole run is held, or null), result (headline
        of the benchmark, or null), image (name, sha256, path of the pinned one, or null), accepted
        (see accepted.py), use (see use.by_stage), slurm (ok; none: no job was ever submitted; else
        why squeue did not answer).
        stages: one object a stage with name, state (done, running, starting, queued, waiting, held,
        failed, stopped, open, skipped), why, units, done, running, failed, left, samples, rejected,
        lost (samples rejected or in failed units), damaged (units done and marked), tokens_total,
        tokens_done, tokens_per_second, eta_seconds, gpu_hours, waiting_s, wall_s, error (of the
        last worker), held, workers (files of the live ones; `sure` is false where only silence will
        tell whether one of another machine lives).
        jobs: one object a job or array task with id, name, suffix, task, group, role, stages, state
        (Slurm's word; ENDED; INTENT: not known whether it was submitted; WITHDRAWN: it was not;
        SUBMITTED and STARTED: by the records, while Slurm does not answer), reason (Slurm's word),
        words, node, stage, unit and fraction (what it works on), restarts, seen (last sign, Unix
        time), live, held.
        """
        shown = ("state", "why", "slurm", "use", "accepted", "held", "image", "result")
        shown += ("stages", "jobs")
        return {"run": str(self.run.path)} | {k: getattr(self, k) for k in shown}


def look(run: RunDir, watch: liveness.Watch | None = None) -> Look:
    """Look at a run once. watch: of a caller that looks again, to notice silent workers."""
    watch = watch or liveness.Watch()
    found = Look(run, held=_text(run.held), accepted=accepted.read(run), image=_image(run))
    workers = {name: all_workers(run.stage(name)) for name in STAGES}
    book = read_book(run)
    named = {e["suffix"] for e in book}
    # Jobs that a person submitted by hand are in no book, but their workers name them.
    working = {_job_of(w) for ws in workers.values() for w in ws if not w.get("ended")} - {""}
    jobs = _ask_slurm(run, named, working, found)
    starts = use.read_starts(run)
    judge = _Judge(watch, jobs, starts, workers)
    recipe = (files.read_json(run.spec) or {}).get("recipe") or {}
    for name in STAGES:
        seen = view(run, name, watch, every=workers[name], alive=judge)
        if name == "regenerate":
            seen.skipped = (recipe.get(name) or {}).get("enabled") is False
        seen.workers = [w | {"sure": judge(w) is True} for w in seen.workers]
        found.views.append(seen)
    at_work = {_job_of(w): (v.name, w) for v in found.views for w in v.workers}
    others = [j for j in jobs or () if j.suffix not in named]
    by_hand = {j.suffix: _entry_of(j, at_work.get(j.id, (None,))[0]) for j in others}
    entries = [*book, *by_hand.values()]
    words = functools.partial(_last_words, run)
    found.jobs = jobview.rows(entries, jobs, starts, at_work, words)
    found.use = use.by_stage(starts, book, workers)
    _explain(found, recipe, book)
    return found


def _image(run: RunDir) -> dict[str, str] | None:
    """What image.json says, for people: whoever starts jobs reads it with more care."""
    data = files.read_json(run.image)
    image = data.get("image") if isinstance(data, dict) else None
    if not isinstance(image, dict):
        return None
    return {k: str(image.get(k)) for k in ("name", "sha256", "path")}


def _text(path: Any) -> str | None:
    """The reason in a `held` file, on one line; None where there is none."""
    try:
        return " ".join(path.read_text(errors="replace").split()) or "no reason was written"
    except OSError:
        return None


def _job_of(worker: dict[str, Any]) -> str:
    """The id of a worker's job as squeue shows it: `123.1` is one of several within job 123."""
    return (worker.get("job") or "").partition(".")[0]


def _entry_of(job: queue.Queued, stage: str | None) -> dict[str, Any]:
    """What the book would say of a job that was submitted by hand."""
    stages = [stage] if stage else [s for s, short in SHORT.items() if job.name.startswith(short)]
    known = {"suffix": job.suffix, "name": job.name, "job_id": job.array, "stages": stages}
    return known | {"role": "by hand", "tasks": 0}


def _ask_slurm(
    run: RunDir, suffixes: set[str], working: set[str], found: Look
) -> list[queue.Queued] | None:
    """This run's jobs in the queue; None, with the reason in `found.slurm`, where that fails."""
    if not suffixes and not working and not run.slurm.path.exists():
        return []
    owner = (run.slurm.jobs if suffixes else run.path).stat().st_uid
    if owner != os.getuid():
        # squeue is asked for one's own jobs: an empty answer would say that all of them are over.
        found.slurm = f"the jobs are {_user(owner)}'s: only their own status can ask Slurm"
        return None
    try:
        jobs = queue.queued()
    except KimiEagleError as e:
        if not suffixes and not working:  # perhaps there never was a job
            return []
        found.slurm = f"{e.what}; shown is what the records say"
        return None
    found.slurm = "ok"
    return [
        j for j in jobs if j.suffix in suffixes or j.id in working or is_of_run(j.name, run.path)
    ]


def _last_words(run: RunDir, job_id: str) -> str:
    """The last line that a job wrote to its own output; empty where it wrote nothing."""
    try:
        lines = (run.slurm.log / f"{job_id}_0_log.out").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((x.strip() for x in reversed(lines) if x.strip()), "")[:300]


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


class _Judge:
    """Does a worker live? The process table, else Slurm's queue, else its heartbeat."""

    def __init__(
        self,
        watch: liveness.Watch,
        jobs: Sequence[queue.Queued] | None,
        starts: Sequence[use.Start],
        workers: dict[str, list[dict[str, Any]]],
    ):
        self._watch = watch
        self._jobs = None if jobs is None else {j.id: j for j in jobs}
        self._began: dict[str, float] = {}
        for start in starts:
            self._began[start.job] = max(start.start, self._began.get(start.job, 0.0))
        self._newest: dict[str, float] = {}
        for worker in (w for ws in workers.values() for w in ws if w.get("job")):
            job = worker["job"]
            self._newest[job] = max(worker["started"], self._newest.get(job, 0.0))

    def __call__(self, worker: dict[str, Any]) -> bool | None:
        here = liveness.is_alive_here(worker)
        if here is not None:
            return here
        job_id = worker.get("job")
        if not job_id or self._jobs is None:
            return self._watch.alive(worker["id"], worker)
        job = self._jobs.get(_job_of(worker))
        if job is None or job.state not in WORKING:
            return False
        # A requeued job keeps its id: workers of its earlier starts are dead, and of one start only
        # the newest can live. Both times are of nodes of one cluster, whose clocks munge keeps
        # together; the second is for rounding.
        if worker["started"] + 1 < max(self._newest[job_id], self._began.get(job_id, 0.0)):
            return False
        return True


# -- why ---------------------------------------------------------------------------------------


def _explain(found: Look, recipe: dict[str, Any], book: Sequence[dict[str, Any]]) -> None:
    """Fill in each stage's state and why, then the run's."""
    allowed = float(recipe.get("allow_rejected") or 0.0)
    states: dict[str, str] = {}
    for seen in found.views:
        share = seen.lost / max(1, seen.samples)
        accepted_share = next(
            (e["share"] for e in reversed(found.accepted) if e.get("stage") == seen.name), 0.0
        )
        held = _text(found.run.stage(seen.name).held)
        if seen.skipped:
            state, why = "skipped", "nothing to do in this recipe"
        elif seen.complete and share <= max(allowed, accepted_share):
            state, why = "done", ""
        elif seen.complete:
            state, why = "failed", _lost(found.run, seen, share)
        else:
            state, why = _unfinished(found, seen, states, held)
        states[seen.name] = state
        rate, eta = rate_and_eta(seen)
        used = found.use.get(seen.name, {})
        found.stages.append(
            {
                "name": seen.name,
                "state": state,
                "why": why,
                **{k: getattr(seen, k) for k in _SHOWN},
                "tokens_per_second": round(rate, 1),
                "eta_seconds": None if eta is None or not seen.workers else round(eta),
                **{k: used.get(k) for k in ("gpu_hours", "waiting_s", "wall_s")},
                "held": held,
            }
        )
    found.state, found.why = _whole(found, states, book)


_SHOWN = (
    "units", "done", "running", "failed", "left", "samples", "rejected", "lost", "damaged",
    "tokens_total", "tokens_done", "error", "workers",
)  # fmt: skip


def _lost(run: RunDir, seen: StageView, share: float) -> str:
    path = shlex.quote(str(run.path))
    most = math.ceil(1e4 * share) / 1e4
    return (
        f"{seen.lost} of {seen.samples} samples rejected or in failed units: kimi-eagle retry "
        f"{path}, or kimi-eagle accept {path} {seen.name} --share {most:g} --reason TEXT"
    )


def _unfinished(
    found: Look, seen: StageView, states: dict[str, str], held: str | None
) -> tuple[str, str]:
    """State and reason of a stage that has work left."""
    jobs = [j for j in found.jobs if j["live"] and seen.name in j["stages"]]
    if seen.workers:
        asleep = [j for j in jobs if j["state"] == "SUSPENDED" and j["stage"] == seen.name]
        if asleep and len(asleep) == len(seen.workers):
            return "running", asleep[0]["words"]
        return "running", f"held, live workers end their units: {held}" if held else ""
    again = f"kimi-eagle retry {shlex.quote(str(found.run.path))} lets it go on"
    if held or found.held:
        return "held", f"{held or found.held}; {again}"
    for name in UPSTREAM[seen.name]:
        if states[name] not in ("done", "skipped"):
            shut = "the gate is shut: " if states[name] == "failed" else ""
            return "waiting", f"{shut}waits for {name}"
    active = [j for j in jobs if j["state"] in ("RUNNING", "COMPLETING", "CONFIGURING")]
    if here := [j for j in active if j["stage"] in (None, seen.name)]:
        return "starting", f"job {here[0]['id']} on {here[0]['node'] or 'its node'}"
    if active:
        return "queued", f"job {active[0]['id']} is at {active[0]['stage']}"
    if jobs:
        first = next((j for j in jobs if not j["held"]), jobs[0])
        return "queued", f"job {first['id']}: {first['words'] or first['state'].lower()}"
    last = f" (last worker: {seen.error})" if seen.error else ""
    if found.slurm == "none":
        idle = "" if seen.units else "not started yet"
        return ("stopped", seen.error) if seen.error else (seen.state, idle)
    if found.slurm != "ok":
        return "open", f"whether a job waits for it is not known now{last}"
    if any(j["state"] == "INTENT" for j in found.jobs):
        return "open", f"a submit did not end: type the same submit again{last}"
    return "stopped", SUBMIT_AGAIN + last


def _whole(found: Look, states: dict[str, str], book: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """State and reason of the run."""
    live = [j for j in found.jobs if j["live"]]
    if all(states[s] in ("done", "skipped") for s in STAGES):
        # The last stage's worker passed all gates, so its plan answers for those before it.
        last = found.views[-1]
        digest = last.planned_by and _recipe_digest(found.run)
        earlier = digest and digest != last.planned_by
        if not earlier:
            return "finished", ""
        if not live:
            path = shlex.quote(str(found.run.path))
            return "finished", f"by an earlier recipe: kimi-eagle explain {path} says what changed"
    able = [j for j in live if not j["held"] and j["reason"] != "DependencyNeverSatisfied"]
    failed = next((s for s in found.stages if s["state"] == "failed"), None)
    held = next((s for s in found.stages if s["state"] == "held"), None)
    trouble = next((f"{s['name']}: {s['why']}" for s in (failed, held) if s), "")
    driver = files.read_json(found.run.driver)
    driven = isinstance(driver, dict) and liveness.is_alive_here(driver) is not False
    if driven or any(s["state"] in ("running", "starting") for s in found.stages):
        return "running", trouble
    if able:
        busy = any(j["state"] != "PENDING" for j in able)
        words = trouble or ("" if busy else f"job {able[0]['id']}: {able[0]['words']}")
        return ("running" if busy else "queued"), words
    if found.slurm not in ("ok", "none"):
        return "unseen", found.slurm
    if trouble:
        return ("failed" if failed else "held"), trouble
    if live:
        return "held", f"job {live[0]['id']}: {live[0]['words']}"
    stopped = next((s for s in found.stages if s["state"] == "stopped"), None)
    if book and found.slurm == "ok":
        return "stopped", f"{SUBMIT_AGAIN}{_command(found.run, book)}"
    if stopped:
        return "stopped", f"{stopped['name']}: {stopped['why']}"
    begun = any(v.units for v in found.views)
    return ("stopped", "nothing works on it now: type the same run again") if begun else ("new", "")


def _recipe_digest(run: RunDir) -> str:
    """Digest of the recipe that the run follows now; empty where it cannot be read."""
    from kimi_eagle.stages.context import recipe_digest

    try:
        return recipe_digest(run.recipe())
    except KimiEagleError:
        return ""


def _command(run: RunDir, book: Sequence[dict[str, Any]]) -> str:
    """`: kimi-eagle submit ...` as far as it is known."""
    recipe, site = run.recipe_path(), book[-1].get("site")
    words = ["kimi-eagle", "submit", str(recipe or "RECIPE"), "--site", str(site or "SITE")]
    return f": {shlex.join([*words, '--run', str(run.path)])}"
