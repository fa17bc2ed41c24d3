"""logs, cancel and accept, on a real Slurm without accounting, with real jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from small_jobs import ROOT, at_work, clean, looker, make_run, submit, wait  # noqa: E402

from kimi_eagle.errors import RunError  # noqa: E402
from kimi_eagle.ledger import Unit  # noqa: E402
from kimi_eagle.recipe import STAGES  # noqa: E402
from kimi_eagle.rundir import RunDir  # noqa: E402
from kimi_eagle.worker import Worker  # noqa: E402


@pytest.fixture
def bed(bare_testbed: Any) -> Iterator[Any]:
    yield from clean(bare_testbed)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


@pytest.fixture
def look(bed: Any, eagle: Callable) -> Callable[..., dict[str, Any]]:
    return looker(bed, eagle)


ODD = "a run 'of' \"mine\" [bold]é $(touch oops)"


def test_logs_of_an_oddly_named_run_are_followed_to_the_end(
    bed: Any, tmp_path: Path, eagle
) -> None:
    run = make_run(tmp_path / ODD, allow_rejected=0.5)
    done = eagle("logs", run.path, env=bed.env)
    assert done.returncode == 1 and "no log of the run yet" in done.stderr
    entry = submit(bed, run)
    wait(at_work(run))
    done = eagle("logs", run.path, "extract", env=bed.env)
    assert done.returncode == 0 and "unit 00000" in done.stdout, done.stderr
    assert eagle("logs", run.path, "-n", "0", env=bed.env).stdout == ""
    listed = eagle("logs", run.path, "--list", "--job", entry["job_id"], env=bed.env).stdout
    assert len(listed.splitlines()) == 1 and "/extract/log/" in listed
    assert eagle("logs", run.path, "--job", "999", env=bed.env).returncode == 1
    assert eagle("logs", run.path, "nostage", env=bed.env).returncode == 2
    assert "[bold]" in eagle("status", run.path, env=bed.env).stdout
    follower = subprocess.Popen(
        [sys.executable, "-m", "kimi_eagle", "logs", str(run.path), "-f"],
        env={**os.environ, **bed.env}, cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert follower.stdout.readline() == "unit 00000\n"
    (run.path / "go-00000").touch()
    assert follower.stdout.readline() == "unit 00001\n"
    (run.path / "extract/log/later.out").write_text("another worker\n")
    assert follower.stdout.readline() == "another worker\n"
    (run.path / "go").touch()
    assert follower.wait(timeout=60) == 0
    assert not list(tmp_path.rglob("oops")) and not (ROOT / "oops").exists()


def test_cancel_ends_only_the_jobs_of_the_run(bed: Any, run: RunDir, tmp_path: Path, eagle):
    other = make_run(tmp_path / "other")
    theirs = submit(bed, other, "--hold")["job_id"]
    mine = submit(bed, run, "--hold")["job_id"]
    array = submit(bed, run, "--hold", tasks=3)["job_id"]
    done = eagle("cancel", run.path, "--job", theirs, env=bed.env)
    assert done.returncode == 2 and "not of this run" in done.stderr
    done = eagle("cancel", run.path, "--job", f"{array}_1", "--json", env=bed.env)
    assert json.loads(done.stdout)["cancelled"] == [f"{array}_1"], done.stderr
    wait(lambda: bed.run("squeue", "--noheader", "--array", "-j", array).count("\n") == 1)
    done = eagle("cancel", run.path, env=bed.env)
    assert done.returncode == 0 and f"job {mine} cancelled" in done.stdout
    wait(lambda: bed.run("squeue", "--noheader", "-o", "%A") == theirs)
    done = eagle("cancel", run.path, env=bed.env)
    assert done.returncode == 0 and "nothing to cancel" in done.stdout


def test_cancel_after_unit_throws_no_work_away(bed: Any, run: RunDir, eagle, look) -> None:
    running = submit(bed, run, units=3)
    wait(at_work(run))
    waiting = submit(bed, run, "--hold")
    done = eagle("cancel", run.path, "--after-unit", env=bed.env)
    assert f"job {running['job_id']} asked to leave after the unit" in done.stdout, done.stderr
    assert f"job {waiting['job_id']} cancelled" in done.stdout
    assert bed.squeue(running["job_id"]) == "RUNNING"
    (run.path / "go").touch()
    wait(lambda: bed.run("squeue", "--noheader") == "")
    assert look(run)["extract"]["done"] == 1


# -- accept ------------------------------------------------------------------------------------


@pytest.fixture
def lossy(run: RunDir) -> RunDir:
    """3 units of extract: one done with 2 of 10 samples rejected, one failed, one done."""
    units = [Unit(f"{i:05d}", {"i": i}, tokens=10, samples=10) for i in range(3)]
    with Worker(run.stage("extract")) as worker:
        worker.ledger.write_plan(units)
        for attempt in worker.attempts(units):
            with attempt:
                if attempt.unit.name == "00001":
                    raise ValueError("no good")
                rejected = 2 if attempt.unit.name == "00000" else 0
                attempt.commit([], counts={"samples": 10 - rejected, "rejected": rejected})
    return run


def test_accept_opens_the_gate_and_is_shown(lossy: RunDir, eagle, monkeypatch) -> None:
    from kimi_eagle.recipe import Recipe
    from kimi_eagle.stages.context import Context, GateShut

    found = json.loads(eagle("status", lossy.path, "--json").stdout)[str(lossy.path)]
    extract = next(s for s in found["stages"] if s["name"] == "extract")
    assert extract["state"] == "failed" and (extract["lost"], extract["rejected"]) == (12, 2)
    assert f"accept {lossy.path} extract --share 0.4 --reason" in extract["why"]

    units = [Unit(f"{i:05d}", {"i": i}, tokens=10, samples=10) for i in range(3)]
    ctx = Context(lossy, Recipe.model_construct(allow_rejected=0.0, name="tiny"))
    monkeypatch.setattr(ctx, "plan", lambda stage: units)
    with pytest.raises(GateShut, match="no good.*--share 0.4"):
        ctx.gate("extract")
    said = eagle("accept", lossy.path, "extract", "--share", "0.3", "--reason", "too small")
    assert said.returncode == 0 and "stays shut" in said.stdout
    with pytest.raises(GateShut):
        ctx.gate("extract")
    said = eagle("accept", lossy.path, "extract", "--share", "0.4", "--reason", "one\nbad 'node'")
    assert said.returncode == 0 and "opens" in said.stdout, said.stderr
    assert len(ctx.gate("extract")) == 2
    found = json.loads(eagle("status", lossy.path, "--json").stdout)[str(lossy.path)]
    assert [e["reason"] for e in found["accepted"]] == ["too small", "one bad 'node'"]
    last = found["accepted"][1]
    assert last["user"] and last["host"] and last["time"] > 0 and last["share"] == 0.4
    assert next(s for s in found["stages"] if s["name"] == "extract")["state"] == "done"
    with open(lossy.path / "accepted.jsonl", "a") as f:
        f.write('{"stage":"extract","sha')  # the disk was full
    assert len(ctx.gate("extract")) == 2
    eagle("accept", lossy.path, "extract", "--share", "0", "--reason", "taken back")
    with pytest.raises(RunError):
        ctx.gate("extract")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("extract", "--share", "1.5", "--reason", "x"), "from 0 to 1"),
        (("extract", "--share", "nan", "--reason", "x"), "from 0 to 1"),
        (("extract", "--share", "-0.1", "--reason", "x"), "from 0 to 1"),
        (("extract", "--share", "0.1", "--reason", " \n"), "--reason is empty"),
        (("prepare", "--share", "0.1", "--reason", "x"), "has lost nothing"),
        (("nostage", "--share", "0.1", "--reason", "x"), STAGES[0]),
    ],
)
def test_accept_refuses(lossy: RunDir, eagle, args: tuple[str, ...], words: str) -> None:
    done = eagle("accept", lossy.path, *args)
    assert done.returncode == 2 and words in done.stderr
    assert not (lossy.path / "accepted.jsonl").exists()
