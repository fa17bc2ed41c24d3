"""submit beside jobs that are queued already: what is missing is added, the order is made good."""

# ruff: noqa: F811  (fixtures of queue_only are arguments of the same name)
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from queue_only import RECIPE, SITE, names, site, submit, wrapped  # noqa: E402, F401


def test_missing_workers_are_added(testbed, submit, tmp_path: Path):
    """Two of three workers and the last job are cancelled; the same submit brings them back."""
    first = submit()["submitted"]
    testbed.run("scancel", f"{first[3]['job_id']}_0", f"{first[3]['job_id']}_1")
    testbed.run("scancel", first[4]["job_id"])
    again = submit()
    assert [(e["stages"][0], e["role"], e["tasks"]) for e in again["submitted"]] == [
        ("extract", "workers", 2),
        ("train", "single", 1),
    ]
    assert again["submitted"][0]["after"] == [first[2]["job_id"]]
    told = tmp_path / f"run/slurm/jobs/{first[2]['suffix']}.others"
    assert told.read_text().split() == [first[3]["job_id"], again["submitted"][0]["job_id"]]
    assert submit()["submitted"] == []


def test_jobs_queued_before_wait_for_new_ones_ahead(testbed, submit):
    """All of extract is cancelled and submitted again: train waits for the new jobs too."""
    first = submit()["submitted"]
    testbed.run("scancel", first[2]["job_id"], first[3]["job_id"])
    again = submit()["submitted"]
    assert [e["stages"][0] for e in again] == ["extract", "extract"]
    waits = testbed.squeue(first[4]["job_id"], "%E")
    assert all(e["job_id"] in waits for e in again), waits
    more = submit("--more", 2, "--only", "regenerate")["submitted"]
    assert more[0]["after"] == [first[0]["job_id"]]  # behind the canary, like the others
    assert more[0]["job_id"] in testbed.squeue(first[4]["job_id"], "%E")
    assert more[0]["job_id"] in testbed.squeue(again[0]["job_id"], "%E")


def test_only_then_everything(testbed, submit):
    """Jobs of one stage do not stand for its group, nor are they doubled."""
    first = submit("--only", "regenerate")["submitted"]
    assert [e["stages"] for e in first] == [["regenerate"]] * 2
    rest = submit()["submitted"]
    assert [(e["stages"], e["role"]) for e in rest] == [
        (["prepare"], "single"),
        (["extract", "vocab"], "canary"),
        (["extract", "vocab"], "workers"),
        (["train", "benchmark"], "single"),
    ]
    assert rest[0]["after"] == [e["job_id"] for e in first]
    assert rest[1]["after"] == [e["job_id"] for e in (*first, rest[0])]


def test_killed_before_the_canary_was_told(testbed, submit, tmp_path: Path):
    """The canary's list of those it may let start is made good by the next submit."""
    body = f'echo x >>{tmp_path}/calls; "$REAL" "$@"; [ $(wc -l <{tmp_path}/calls) != 2 ] || '
    submit(env=wrapped(tmp_path / "bin", "sbatch", body + "kill -9 $PPID"), ok=False)
    found = submit()["adopted"]
    told = tmp_path / f"run/slurm/jobs/{found[0]['suffix']}.others"
    assert [e["role"] for e in found] == ["canary", "workers"]
    assert told.read_text().split() == [found[1]["job_id"]]


def test_order_is_made_good_by_the_next_submit(testbed, submit, tmp_path: Path):
    """scontrol fails once: said, and mended the next time."""
    first = submit()["submitted"]
    testbed.run("scancel", first[2]["job_id"], first[3]["job_id"])
    again = submit(env=wrapped(tmp_path / "bin", "scontrol", "echo no >&2; exit 1"))
    assert "could not be put behind" in again["warnings"][0]
    assert submit()["submitted"] == []
    waits = testbed.squeue(first[4]["job_id"], "%E")
    assert all(e["job_id"] in waits for e in again["submitted"]), waits


def test_silent_controller_is_no_answer(testbed, submit, tmp_path: Path):
    """squeue fails after an sbatch nobody heard of: the intent stays, and is adopted later."""
    env = wrapped(tmp_path / "bin", "sbatch", '"$REAL" "$@" >/dev/null; kill -9 $PPID')
    submit(env=env, ok=False)
    deaf = wrapped(tmp_path / "deaf", "squeue", "echo 'slurm_load_jobs error' >&2; exit 1")
    done = submit(env=deaf, ok=False)
    assert done.returncode == 1 and "it will be found" in done.stderr
    assert len(submit()["adopted"]) == 1 and len(names(testbed)) == 5


def test_job_that_appears_late(testbed, submit, tmp_path: Path):
    """sbatch times out and the controller takes the job 5 s later: found all the same."""
    says = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    body = f'cp "${{@: -1}}" {tmp_path}/$$; (sleep 5; cd; "$REAL" {tmp_path}/$$) >/dev/null 2>&1 &'
    body += f'\necho "{says}" >&2; exit 1'
    found = submit("--only", "regenerate", env=wrapped(tmp_path / "bin", "sbatch", body))
    assert len(found["submitted"]) == len(names(testbed)) == 2


def test_max_jobs_below_what_is_wanted(testbed, submit, site: Path):
    """Fewer workers, again and again; what a stage cannot do without finds its place."""
    site.write_text("max_jobs = 7\n" + SITE)
    first = submit()["submitted"]
    assert sum(e["tasks"] for e in first) == 7
    assert submit()["submitted"] == []
    testbed.run("scancel", first[-1]["job_id"])
    assert [e["stages"][0] for e in submit()["submitted"]] == ["train"]


def test_another_canary(testbed, submit, tmp_path: Path):
    """The canary is cancelled while it waits: a new one, and the workers wait for that."""
    first = submit()["submitted"]
    testbed.run("scancel", first[2]["job_id"])
    (canary,) = submit()["submitted"]
    assert canary["role"] == "canary" and canary["stages"] == ["extract", "vocab"]
    waits = testbed.squeue(first[3]["job_id"], "%E").splitlines()
    assert all(canary["job_id"] in line for line in waits), waits
    told = tmp_path / f"run/slurm/jobs/{canary['suffix']}.others"
    assert told.read_text().split() == [first[3]["job_id"]]


def test_follow_up_jobs_keep_their_place(testbed, submit, site: Path):
    """chain: those whose predecessors are gone wait for the stages before theirs."""
    site.write_text("chain = 1\nrequeue = false\n" + SITE)
    first = submit()["submitted"]
    by = {(e["stages"][0], e["role"], e["link"]): e["job_id"] for e in first}
    testbed.run("scancel", by["train", "single", 0], by["regenerate", "workers", 0])
    testbed.run("scancel", by["regenerate", "canary", 0])
    again = submit()["submitted"]
    waits = testbed.squeue(by["train", "single", 1], "%E")
    assert by["extract", "workers", 0] in waits and by["extract", "canary", 0] in waits, waits
    assert all(e["stages"][0] == "regenerate" for e in again)


def test_other_groups_while_jobs_live(testbed, submit, tmp_path: Path):
    """What counts is which stages a job does: nothing doubled, train behind all of them."""
    first = submit()["submitted"]
    recipe = tmp_path / "groups.toml"
    text = (Path(RECIPE)).read_text().replace("../../jobs", str(Path("jobs").resolve()))
    groups = 'groups = [["regenerate","prepare"],["extract"],["vocab"],["train","benchmark"]]'
    recipe.write_text(text + groups + "\n")
    assert submit(recipe=recipe)["submitted"] == []
    testbed.run("scancel", first[2]["job_id"], first[3]["job_id"])
    again = submit(recipe=recipe)["submitted"]
    assert [e["stages"] for e in again] == [["extract"], ["extract"], ["vocab"]]
    waits = testbed.squeue(first[4]["job_id"], "%E")
    assert all(e["job_id"] in waits for e in again), waits


def test_more_before_anything_is_refused(submit):
    done = submit("--more", 2, ok=False)
    assert done.returncode == 2 and "submit first" in done.stderr
