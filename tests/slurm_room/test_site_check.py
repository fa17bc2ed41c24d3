"""`site init` and `site check` against a real Slurm: what init writes, check accepts."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kimi_eagle.cli.site import site as site_command
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.recipe import Recipe, load
from kimi_eagle.site import Site, load_site
from kimi_eagle.slurm import siteinit
from kimi_eagle.slurm.sitecheck import check_site, keys_for, one_of_each
from kimi_eagle.slurm.sitetools import Check
from kimi_eagle.typed_toml import validated

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _testbed(testbed: Any) -> None:
    """All of this needs Slurm."""


def cli(*args: object) -> Result:
    return CliRunner().invoke(site_command, [str(a) for a in args])


def checks(run: Path, recipe: Recipe | None = None, **keys: Any) -> list[Check]:
    site = validated(Site, {"name": "here", "partition": "all", "cpus": 4, **keys}, "here")
    return check_site(site, recipe, run)


def problems(run: Path, recipe: Recipe | None = None, **keys: Any) -> dict[str, str]:
    """What was refused, by the key to change."""
    found: dict[str, str] = {}
    for check in checks(run, recipe, **keys):
        if check.state == "problem":
            found[check.key] = found.get(check.key, "") + check.text + "\n"
    return found


def line(found: list[Check], name: str) -> Check:
    return next(c for c in found if c.name == name)


# -- init ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", [None, "all", "low", "high", "short"])
def test_check_accepts_what_init_writes(tmp_path: Path, partition: str | None) -> None:
    out = tmp_path / "new" / "mine.toml"
    options = ["--partition", partition] if partition else []
    done = cli("init", "--out", out, *options)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == f"now: kimi-eagle site check {out}"
    site = load_site(out)
    assert site.partition == (partition or "all")
    assert (site.gpu_request, site.cpus, site.memory) == ("gpus-per-node", 128, "0")
    assert site.max_array == 1001
    assert site.time == ("00:02:00" if partition == "short" else "24:00:00")
    text = out.read_text()
    assert "(Slurm 2" in text and "# gpu_type" in text and "also here" in text
    assert ("preemption: REQUEUE after GraceTime = 0" in text) == (partition == "low")

    done = cli("check", out, "--run", tmp_path / "run", "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["ok"], found
    jobs = [c for c in found["checks"] if c["name"].startswith("job ")]
    assert len(jobs) == 5 and all(c["state"] == "ok" for c in jobs)
    assert not (tmp_path / "run").exists()


def test_init_never_overwrites_unasked(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    out.write_text("precious")
    done = cli("init", "--out", out)
    assert isinstance(done.exception, UsageError) and "--force" in str(done.exception)
    assert out.read_text() == "precious"
    (tmp_path / "link.toml").symlink_to(tmp_path / "nowhere")
    assert isinstance(cli("init", "--out", tmp_path / "link.toml").exception, UsageError)
    assert cli("init", "--out", out, "--force").exit_code == 0
    assert load_site(out).partition == "all"


def test_init_without_a_path_writes_a_name_that_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = cli("init", "--json")
    assert done.exit_code == 0, done.output
    written = Path(json.loads(done.stdout)["site"])
    assert written == tmp_path / ".config/kimi-eagle/sites/testbed.toml"
    (tmp_path / "slurm/sites").mkdir(parents=True)
    assert cli("init").exit_code == 0
    assert load_site("testbed").cpus == 128  # the new one, not the shipped one


@pytest.mark.parametrize("name", ["nope", "$(id)", "-x", "a\nb"])
def test_init_with_an_unknown_partition(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no partition .*; expected one of .*all"):
        siteinit.write_site(tmp_path / "x.toml", name)
    assert not list(tmp_path.iterdir())


def test_what_slurm_prints_is_not_trusted() -> None:
    lines = [
        "gpu*|n1|96|1000000|7-00:00:00|gpu:h200:8(S:0-1),shard:16|h200,ib",
        "gpu*|n2|96|900000|7-00:00:00|gpu:h200:8(S:0-1),shard:16|h200,ib",
        "gpu*|n3|64+|500000+|7-00:00:00|gpu:a100:4|(null)",
        'evil"\nx = "|n4|1|1|1:00|(null)|(null)',
        "ev il|n4|1|1|1:00|(null)|(null)",
        "$(id)|n4|1|1|1:00|(null)|(null)",
        "too|few",
        "cpu|n5|?|?|infinite|(null)|$(id)",
    ]
    found = siteinit.partitions("\n".join(lines))
    assert [p.name for p in found] == ["gpu", "cpu"]
    best = found[0].best
    assert (best.count, best.gpus, best.gpu_type, best.memory_mb) == (2, 8, "h200", 900_000)
    assert found[0].default and found[0].max_minutes == 7 * 1440
    seen = siteinit.Cluster(
        config={"ClusterName": 'x"\n\x1b[2J', "MaxArraySize": "0", "JobRequeue": "0"},
        partitions=found,
        partition_settings={"PreemptMode": "CANCEL"},
        accounts=["a", "b"],
        unknown=["$(id)\nqos = 1"],
    )
    import tomllib

    site = validated(Site, {"name": "x", **tomllib.loads(siteinit.render(seen, "x y"))}, "x")
    assert (site.name, site.account, site.gpu_type) == ("mycluster", "a", "h200")
    assert (site.qos, site.max_array, site.chain) == (None, 1, 2)
    seen.partitions.reverse()
    text = siteinit.render(seen, "x")
    site = validated(Site, {"name": "x", **tomllib.loads(text)}, "x")
    assert (site.gpu_request, site.cpus, site.exclusive) == ("none", None, True)


# -- accounting ------------------------------------------------------------------------------------


@pytest.fixture
def association(testbed: Any) -> Iterator[None]:
    """An account of this user with a limit."""
    me = getpass.getuser()
    testbed.run("sacctmgr", "-i", "add", "account", "demo")
    testbed.run("sacctmgr", "-i", "add", "user", me, "account=demo", "MaxSubmitJobs=7")
    yield
    testbed.run("sacctmgr", "-i", "delete", "user", me, "account=demo")
    testbed.run("sacctmgr", "-i", "delete", "account", "demo")


@pytest.mark.usefixtures("association")
def test_accounts_and_limits_come_from_accounting(tmp_path: Path) -> None:
    _, seen = siteinit.write_site(tmp_path / "x.toml", None)
    assert "demo" in seen.accounts and seen.qos == ["normal"] and not seen.unknown
    assert load_site(tmp_path / "x.toml").max_jobs == 7
    assert line(checks(tmp_path, max_jobs=7), "jobs in the queue").state == "ok"
    for keys in ({"max_jobs": 8}, {}):
        found = line(checks(tmp_path, **keys), "jobs in the queue")
        assert (found.state, found.key) == ("problem", "max_jobs") and "7" in found.text


def test_no_accounting_still_works(
    tmp_path: Path, bare_testbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", bare_testbed.env["SLURM_CONF"])
    out = tmp_path / "x.toml"
    done = cli("init", "--out", out)
    assert done.exit_code == 0 and "not found out: accounts, QOS" in done.stdout
    assert "# Not found out: accounts" in out.read_text()
    found = check_site(load_site(out), None, tmp_path)
    assert line(found, "jobs in the queue").state == "unknown"
    assert not [c for c in found if c.state == "problem"], found


def test_a_missing_sacctmgr_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sinfo", "scontrol", "squeue", "sbatch", "bash"):
        (tools / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tools))
    _, seen = siteinit.write_site(tmp_path / "x.toml", None)
    assert "sacctmgr is not on this machine" in seen.unknown[0]
    assert line(checks(tmp_path), "jobs in the queue").state == "unknown"


# -- check -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "key", "words"),
    [
        ({"partition": "nope"}, "partition", "invalid partition specified: nope"),
        ({"gpu_type": "a100"}, "gpu_request or gpu_type", "node configuration is not available"),
        ({"cpus": 999}, "cpus", "processors"),
        ({"memory": "9T"}, "memory", "node configuration is not available"),
        ({"constraint": "nope"}, "constraint", "feature"),
        ({"reservation": "nope"}, "reservation", "reservation is invalid"),
        ({"partition": "short", "time": "10"}, "time", "time limit is invalid"),
        ({"extra": ["--frob=1"]}, "extra", "--frob=1"),
        ({"extra": ["--nodelist=nope"]}, "extra", "node name"),
        ({"preamble": ["if true; then"]}, "preamble", "not shell"),
        ({"cpu": {"partition": "nope"}}, "[cpu] partition", "invalid partition"),
        ({"cpu": {"partition": "all", "memory": "9T"}}, "[cpu] memory", "node configuration"),
        ({"max_array": 5000}, "max_array", "MaxArraySize is 1001"),
    ],
)
def test_a_refusal_names_the_key(
    tmp_path: Path, keys: dict[str, Any], key: str, words: str
) -> None:
    found = problems(tmp_path, **keys)
    fitting = {k: text for k, text in found.items() if k.startswith(key)}
    assert any(words.lower() in text.lower() for text in fitting.values()), found
    # Nothing but the fault is blamed.
    assert all(key.split(" or ")[0].removeprefix("[cpu] ") in k for k in found), found


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("Invalid account or account/partition combination specified", "account"),
        ("Invalid qos specification", "qos"),
        ("Job's QOS not permitted to use this partition (a allows b not c)", "qos"),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "max_jobs",
        ),
        ("User's group not permitted to use this partition", "partition"),
        ("Memory required by task is not available", "memory"),
        ("Invalid generic resource (gres) specification", "gpu_request"),
        ("Invalid Trackable RESource (TRES) specification", "gpu_request"),
    ],
)
def test_words_that_need_another_cluster(said: str, key: str) -> None:
    """Slurm's own (slurm_errno.c, 22.05); the testbed enforces no accounts."""
    assert keys_for(said)[0] == key


def test_too_many_gpus_are_the_recipes_matter(tmp_path: Path) -> None:
    recipe = one_of_each(validated(Site, {"name": "x"}, "x"))
    recipe = recipe.model_copy(update={"slurm": recipe.slurm.model_copy(update={"gpus": 9})})
    (key,) = problems(tmp_path, recipe)
    assert "gpu_request" in key and "[slurm] gpus in the recipe" in key


def test_too_many_nodes(tmp_path: Path) -> None:
    recipe = one_of_each(validated(Site, {"name": "x"}, "x"))
    groups = (("regenerate", "prepare"), ("extract", "vocab"), ("train",), ("benchmark",))
    slurm = recipe.slurm.model_copy(update={"nodes": {"train": 5}, "groups": groups})
    (key,) = problems(tmp_path, recipe.model_copy(update={"slurm": slurm}))
    assert "[slurm] nodes in the recipe" in key


def test_a_small_array_limit(tmp_path: Path, testbed: Any) -> None:
    testbed.up("--max-array-size", "50")
    try:
        assert "max_array is unset" in problems(tmp_path)["max_array"]
        siteinit.write_site(tmp_path / "x.toml", None)
        assert load_site(tmp_path / "x.toml").max_array == 50
        assert not problems(tmp_path, max_array=50)
    finally:
        testbed.up("--max-array-size", "1001")


def test_values_with_special_letters_reach_slurm_whole(tmp_path: Path, testbed: Any) -> None:
    odd = tmp_path / "a b (c) & d;e #f é"
    odd.mkdir()
    site = {
        "constraint": "[h200*1]",
        "extra": ["--exclude=127.0.1.[3-4]", "--gpu-bind=none"],
        "preamble": ['export A="it\'s $(date) `true` é"  # why'],
        "scratch": str(odd),
    }
    assert not problems(odd, **site)
    assert not problems(tmp_path, partition="all,high", gpu_request="gres", gpu_type="h200")


def test_beginnings_of_option_names_count_for_slurm(testbed: Any) -> None:
    """Why `extra` refuses them: sbatch takes --part for --partition."""
    with pytest.raises(AssertionError, match="invalid partition specified: evil"):
        testbed.run("sbatch", "--test-only", "--part=evil", "--wrap", "true")


def test_a_preempted_job_may_lose_its_unit(tmp_path: Path) -> None:
    found = line(checks(tmp_path, partition="low"), "preemption in low")
    assert found.state == "ok" and "REQUEUE, GraceTime 0 s" in found.text
    assert "a unit may be dropped" in found.text


def test_the_recipe_is_checked_with_its_own_jobs(tmp_path: Path) -> None:
    recipe = load(ROOT / "tests/recipes/tiny.toml")
    found = checks(tmp_path, recipe)
    stages = {c.name.split("-")[1].split(".")[0] for c in found if c.name.startswith("job ")}
    assert stages == {group[0] for group in recipe.slurm.groups}
    late = recipe.slurm.model_copy(update={"engine_load_minutes": 60.0})
    found = checks(tmp_path, recipe.model_copy(update={"slurm": late}), time="2:00:00")
    assert line(found, "jobs").state == "problem" and "time" in line(found, "jobs").text


def test_nothing_is_queued_or_written(tmp_path: Path, testbed: Any) -> None:
    before = testbed.run("squeue", "--noheader", "-o", "%A")
    checks(tmp_path / "run")
    assert testbed.run("squeue", "--noheader", "-o", "%A") == before
    assert not list(tmp_path.iterdir())


def test_room_is_looked_at_where_the_run_will_be(tmp_path: Path) -> None:
    found = checks(tmp_path / "not/yet", scratch="/nowhere/here", mounts=["/nowhere/data:/data"])
    assert line(found, "run directory").text.startswith(f"{tmp_path}: ")
    assert line(found, "scratch").state == "unknown"
    assert line(found, "mounts").state == "unknown"
    assert line(checks(tmp_path, scratch=str(tmp_path)), "scratch").state == "ok"
    assert line(checks(Path("/proc/x")), "run directory").state == "problem"
    assert line(found, "image").state == "unknown"  # jobs run this very Python


def test_the_image_is_looked_at(tmp_path: Path) -> None:
    """What pins.verified refuses is a problem of the site file; see tests/containers_room."""
    (tmp_path / "x.sif").write_text("no image")
    found = line(checks(tmp_path, image=f"{tmp_path}/x.sif"), "image")
    assert found.state == "problem" and found.key == "image" and "x.sif" in found.text


def test_the_table_and_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('partition = "nope"\n')
    done = cli("check", tmp_path / "x.toml", "--run", tmp_path)
    assert done.exit_code == 1
    assert "problem" in done.stdout and "partition" in done.stdout
    assert "job 3-train" in done.stdout
    assert cli("check", "testbed", "--run", tmp_path).exit_code == 0


def test_no_cluster_is_one_problem_and_the_rest_is_looked_at(tmp_path: Path) -> None:
    """In a process of its own: without PATH's Slurm, and with a configuration that is none."""
    code = (
        "import sys, pathlib; from kimi_eagle.site import load_site;"
        "from kimi_eagle.slurm.sitecheck import check_site;"
        "found = check_site(load_site('testbed'), None, pathlib.Path(sys.argv[1]));"
        "print([c.name for c in found if c.state == 'problem'], len(found))"
    )
    for extra in ({"PATH": "/nowhere"}, {"SLURM_CONF": "/nowhere/slurm.conf"}):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            env={**os.environ, **extra},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout.startswith("['Slurm answers'] "), done.stdout + done.stderr


def test_init_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    with pytest.raises(RunError, match="SLURM_CONF names /nowhere/slurm.conf"):
        siteinit.write_site(tmp_path / "x.toml", None)
    assert not list(tmp_path.iterdir())
