"""submit on a real Slurm: once and not twice, whatever happens in between; nothing left behind.

The jobs here may not start before an hour has passed (`--begin`), so that what is looked at is the
queue and the book. Their work is looked at elsewhere in this room.
"""

# ruff: noqa: F811  (fixtures of queue_only are arguments of the same name)
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kimi_eagle import files
from kimi_eagle import recipe as recipes
from kimi_eagle.ledger import Ledger, Unit
from kimi_eagle.rundir import RunDir
from kimi_eagle.stages.context import recipe_digest

sys.path.insert(0, str(Path(__file__).parent))
from queue_only import RECIPE, SITE, names, site, submit, wrapped  # noqa: E402, F401


def test_whole_run_is_queued_once(testbed, submit, tmp_path: Path):
    """Five calls of sbatch for 13 jobs; a second submit adds none."""
    env = wrapped(tmp_path / "bin", "sbatch", f'echo x >>{tmp_path}/calls; exec "$REAL" "$@"')
    first = submit(env=env)
    assert [(e["stages"][0], e["role"], e["tasks"]) for e in first["submitted"]] == [
        ("regenerate", "canary", 1),
        ("regenerate", "workers", 3),
        ("extract", "canary", 1),
        ("extract", "workers", 3),
        ("train", "single", 1),
    ]
    assert len((tmp_path / "calls").read_text().splitlines()) == 5
    canary, others, *_, last = first["submitted"]
    assert others["after"] == [canary["job_id"]]
    assert last["after"] == [e["job_id"] for e in first["submitted"][:4]]
    listed = testbed.run("squeue", "--noheader", "-o", "%.8j %E").splitlines()
    assert [x.split()[0] for x in sorted(listed)] == ["ext-tiny"] * 2 + ["reg-tiny"] * 2 + [
        "trn-tiny"
    ]
    assert not [x for x in listed if "afterok" in x]
    second = submit()
    assert second["submitted"] == [] and len(second["adopted"]) == 5
    assert len(names(testbed)) == 5


def test_submit_killed_right_after_sbatch(testbed, submit, tmp_path: Path):
    """The job is in the queue, nobody wrote down its id: the next submit adopts it."""
    env = wrapped(tmp_path / "bin", "sbatch", '"$REAL" "$@" >/dev/null; kill -9 $PPID')
    dead = submit(env=env, ok=False)
    assert dead.returncode == -9
    assert len(names(testbed)) == 1
    found = submit()
    (canary,) = found["adopted"]
    assert canary["role"] == "canary"
    assert len(names(testbed)) == 5
    others = found["submitted"][0]
    assert (others["role"], others["tasks"], others["after"]) == (
        "workers", 3, [canary["job_id"]],
    )  # fmt: skip
    told = tmp_path / f"run/slurm/jobs/{canary['suffix']}.others"
    assert told.read_text().split() == [others["job_id"]]


def test_submit_killed_while_its_sbatch_is_on_the_way(testbed, submit, site, tmp_path: Path):
    """The next submit waits for that sbatch, and adopts its job."""
    env = {**os.environ, **wrapped(tmp_path / "bin", "sbatch", 'sleep 5; exec "$REAL" "$@"')}
    argv = [sys.executable, "-m", "kimi_eagle", "submit", RECIPE, "--site", str(site)]
    front = subprocess.Popen([*argv, "--run", str(tmp_path / "run")], env=env)
    while not list((tmp_path / "run/slurm/jobs").glob("*.json")):
        time.sleep(0.05)
    time.sleep(0.5)
    front.kill()
    front.wait()
    found = submit()
    assert len(found["adopted"]) == 1 and len(names(testbed)) == 5


def test_lost_connection_takes_back_what_was_queued(testbed, submit, site, tmp_path: Path):
    body = f'echo x >>{tmp_path}/calls; "$REAL" "$@"; sleep 2'
    env = {**os.environ, **wrapped(tmp_path / "bin", "sbatch", body)}
    argv = [sys.executable, "-m", "kimi_eagle", "submit", RECIPE, "--site", str(site)]
    front = subprocess.Popen([*argv, "--run", str(tmp_path / "run")], env=env)
    while not (tmp_path / "calls").exists() or len((tmp_path / "calls").read_text()) < 4:
        time.sleep(0.05)
    front.send_signal(signal.SIGHUP)
    assert front.wait(30) == 130
    submit()
    assert len(names(testbed)) == 5


def test_only_without_what_it_reads_is_refused(submit):
    done = submit("--only", "train", ok=False)
    assert done.returncode == 2 and "train reads extract, vocab" in done.stderr
    done = submit("--more", 2, "--only", "train", ok=False)
    assert done.returncode == 2 and "more workers" in done.stderr


def test_max_jobs_counts_what_is_queued(testbed, submit, site: Path):
    site.write_text("max_jobs = 9\n" + SITE)
    assert sum(e["tasks"] for e in submit()["submitted"]) == 9
    done = submit("--more", 1, ok=False)
    assert done.returncode == 2 and "max_jobs = 9" in done.stderr


def test_submits_of_two_machines(testbed, submit, tmp_path: Path):
    """A lock held on another login node is waited for, not broken."""
    run = RunDir(tmp_path / "run")
    run.slurm.make()
    other = {"host": "login2", "boot": "x", "pid_namespace": "y", "pid": 1, "pid_started": "1"}
    run.slurm.lock.write_text(json.dumps(other))
    argv = [sys.executable, "-m", "kimi_eagle", "status", str(run.path)]
    assert subprocess.run(argv, capture_output=True).returncode == 2  # no run yet, and no harm
    words = ["submit", RECIPE, "--site", "testbed", "--run", str(run.path)]
    waiting = subprocess.Popen([sys.executable, "-m", "kimi_eagle", *words])
    time.sleep(8)
    assert waiting.poll() is None and names(testbed) == []
    assert json.loads(run.slurm.lock.read_text()) == other
    waiting.terminate()
    waiting.wait()
    assert json.loads(run.slurm.lock.read_text()) == other


def test_damaged_book(testbed, submit, eagle, tmp_path: Path):
    """A cut entry stops submit, with its name; cancel still finds the job by its suffix."""
    first = submit()["submitted"]
    path = tmp_path / f"run/slurm/jobs/{first[0]['suffix']}.json"
    path.write_text(path.read_text()[:40])
    done = submit(ok=False)
    assert done.returncode == 1 and str(path) in done.stderr and "squeue" in done.stderr
    assert eagle("status", tmp_path / "run").returncode == 0
    assert eagle("cancel", tmp_path / "run").returncode == 0
    testbed.wait(lambda: names(testbed), [])


def test_removed_book(testbed, submit, tmp_path: Path):
    first = submit()["submitted"]
    shutil.rmtree(tmp_path / "run/slurm")
    done = submit(ok=False)
    assert done.returncode == 1 and f"job {first[0]['job_id']}" in done.stderr
    assert len(names(testbed)) == 5


def test_copied_run_has_no_jobs(testbed, submit, eagle, site, tmp_path: Path):
    submit()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert eagle("cancel", tmp_path / "copy").returncode == 0
    assert len(names(testbed)) == 5
    done = eagle("submit", RECIPE, "--site", site, "--run", tmp_path / "copy", "--json")
    assert len(json.loads(done.stdout)["submitted"]) == 5


def test_commands_that_follow_another_recipe(submit, eagle, site, tmp_path: Path):
    """run, --emit and --here give the run a recipe, too: not while jobs work by another."""
    submit()
    other = tmp_path / "other.toml"
    text = (Path(RECIPE)).read_text().replace("../../jobs", str(Path("jobs").resolve()))
    other.write_text(text.replace("seed = 7", "seed = 8"))
    words = ("submit", other, "--site", site, "--run", tmp_path / "run")
    before = (tmp_path / "run/run.json").read_bytes()
    here = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "127.0.1.1"}
    for done in (
        eagle(*words, "--emit", tmp_path / "out"),
        eagle(*words, "--here", env=here),
        eagle("run", other, "--run", tmp_path / "run"),
    ):
        assert done.returncode == 1 and "earlier recipe" in done.stderr, done.stderr
    assert (tmp_path / "run/run.json").read_bytes() == before


@pytest.mark.parametrize("option", ["--emit", "--only", "--run", "--site"])
def test_an_unset_variable_is_refused(eagle, site, option: str, tmp_path: Path):
    done = eagle("submit", RECIPE, "--site", site, "--run", tmp_path / "run", option, "")
    assert done.returncode == 2


def test_machine_readable_alone_on_stdout(eagle, site, tmp_path: Path):
    words = ("submit", RECIPE, "--site", site, "--run", tmp_path / "run", "--json")
    assert len(json.loads(eagle(*words, "--dry-run").stdout)) == 5
    assert len(json.loads(eagle(*words, "--emit", tmp_path / "out").stdout)["files"]) == 7


def test_sbatch_times_out_though_the_job_was_taken(testbed, submit, tmp_path: Path):
    says = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    body = f'"$REAL" "$@" >/dev/null; echo "{says}" >&2; exit 1'
    found = submit(env=wrapped(tmp_path / "bin", "sbatch", body))
    assert len(found["submitted"]) == len(names(testbed)) == 5
    queued = set(testbed.run("squeue", "--noheader", "-o", "%A").split())
    assert {e["job_id"] for e in found["submitted"]} == queued


def test_two_submits_at_once(testbed, site: Path, tmp_path: Path, submit):
    argv = [sys.executable, "-m", "kimi_eagle", "submit", RECIPE, "--site", str(site)]
    argv += ["--run", str(tmp_path / "run"), "--json"]
    both = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = [json.loads(p.communicate(timeout=120)[0]) for p in both]
    assert sorted(len(f["submitted"]) for f in found) == [0, 5]
    assert len(names(testbed)) == 5


def test_refusal_takes_back_what_was_queued(testbed, submit, site: Path, tmp_path: Path):
    site.write_text(SITE + 'times = { train = "3-00:00:00" }\n[cpu]\npartition = "nowhere"\n')
    recipe = tmp_path / "cpu.toml"
    text = (Path(RECIPE)).read_text().replace("../../jobs", str(Path("jobs").resolve()))
    groups = 'groups = [["regenerate","prepare"],["extract"],["vocab"],["train","benchmark"]]'
    recipe.write_text(text + groups + '\ncpu_stages = ["vocab"]\n')
    done = submit(recipe=recipe, ok=False)
    assert done.returncode == 1
    assert "invalid partition" in done.stderr and "partition" in done.stderr.split("fix:")[1]
    assert names(testbed) == []


def test_another_recipe_while_jobs_live(testbed, submit, tmp_path: Path):
    submit()
    recipe = tmp_path / "other.toml"
    text = (Path(RECIPE)).read_text().replace("../../jobs", str(Path("jobs").resolve()))
    recipe.write_text(text.replace("seed = 7", "seed = 8"))
    done = submit(recipe=recipe, ok=False)
    assert done.returncode == 1 and "earlier recipe" in done.stderr
    # How many workers there are is no other recipe.
    recipe.write_text(text.replace("workers = 4", "workers = 2"))
    assert submit(recipe=recipe)["submitted"] == []


def test_held_run_is_refused(submit, tmp_path: Path, eagle):
    submit()
    held = RunDir(tmp_path / "run").stage("extract").make().held
    held.write_text("died 3 times before any unit on n1: no CUDA\n")
    done = submit(ok=False)
    assert done.returncode == 1 and "no CUDA" in done.stderr and "retry" in done.stderr
    assert eagle("retry", tmp_path / "run").returncode == 0
    submit()


def test_environment_of_an_enclosing_job_is_left_out(testbed, submit, tmp_path: Path):
    """sbatch would refuse SLURM_MEM_PER_CPU together with --mem, and obey SBATCH_PARTITION."""
    outer = {"SBATCH_PARTITION": "nowhere", "SLURM_MEM_PER_CPU": "1", "SLURM_MEM_PER_NODE": "2"}
    outer |= {"SQUEUE_FORMAT": "%i", "SLURM_GPUS_PER_NODE": "64", "SBATCH_REQUEUE": "0"}
    assert len(submit(env=outer)["submitted"]) == 5


def test_thousand_units_are_two_calls(testbed, submit, tmp_path: Path):
    """Workers are jobs, units are not: 1,000 units and 4 workers are a canary and one array."""
    recipe = recipes.load(RECIPE)
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.spec.write_text("{}")
    for stage, count in (("regenerate", 1), ("prepare", 1), ("extract", 1000)):
        ledger = Ledger(run.stage(stage).make(), recipe_digest(recipe))
        units = [Unit(f"{n:05d}", {"n": n}) for n in range(count)]
        ledger.write_plan(units)
        for unit in units if stage != "extract" else []:
            ledger.create_record(unit, {"unit": unit.name, "key": unit.key, "state": "done",
                                        "files": [], "counts": {}})  # fmt: skip
    env = wrapped(tmp_path / "bin", "sbatch", f'echo x >>{tmp_path}/calls; exec "$REAL" "$@"')
    start = time.monotonic()
    found = submit("--only", "extract", env=env)
    spent = time.monotonic() - start
    assert [(e["role"], e["tasks"]) for e in found["submitted"]] == [("canary", 1), ("workers", 3)]
    assert len((tmp_path / "calls").read_text().splitlines()) == 2
    assert found["done"] == ["prepare", "regenerate"]
    assert spent < 20  # a hang, not a benchmark: that is tests/bench/bench_submit.py


@pytest.mark.parametrize("name", ["a b", "ünï", "-dash", "a,b", "a:b", "a=b", "a;touch x", "a&b"])
def test_odd_run_directories_reach_slurm_intact(testbed, eagle, site, tmp_path: Path, name: str):
    run = tmp_path / name
    done = eagle("submit", RECIPE, "--site", site, "--run", run, "--only", "regenerate", "--json")
    assert done.returncode == 0, done.stderr
    entry, others = json.loads(done.stdout)["submitted"]
    shown = testbed.run("scontrol", "show", "job", entry["job_id"])
    assert f"StdOut={run}/slurm/log/{entry['job_id']}_0_log.out" in shown
    assert not (Path.cwd() / "x").exists()
    testbed.run("scancel", entry["job_id"], others["job_id"])


@pytest.mark.parametrize("name", ["$(touch x)", "`touch x`", "a'b", 'a"b', "a\nb", "a%jb", "a\\b"])
def test_hostile_run_directories_are_refused(eagle, site, tmp_path: Path, name: str):
    done = eagle("submit", RECIPE, "--site", site, "--run", tmp_path / name, cwd=Path.cwd())
    assert done.returncode == 2 and "choose another with --run DIR" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (Path.cwd() / "x").exists()


def test_no_slurm_here(eagle, site, tmp_path: Path):
    done = eagle("submit", RECIPE, "--site", site, "--run", tmp_path / "run",
                 env={"PATH": "/nonexistent"})  # fmt: skip
    assert done.returncode == 1 and "squeue is not on this machine" in done.stderr


def test_book_is_whole_json(submit, tmp_path: Path):
    submit()
    entries = [files.read_json(p) for p in (tmp_path / "run/slurm/jobs").glob("*.json")]
    assert len(entries) == 5 and all(e["job_id"] and e["submitted"] for e in entries)
