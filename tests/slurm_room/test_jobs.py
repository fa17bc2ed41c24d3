"""Which jobs a recipe becomes on a site: no Slurm is asked here."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_eagle import recipe as recipes
from kimi_eagle.errors import UsageError
from kimi_eagle.recipe import Recipe
from kimi_eagle.site import Site
from kimi_eagle.slurm.jobs import Job, more_workers, whole_group, whole_run
from kimi_eagle.slurm.names import SUFFIX, new_suffix, run_digits, waiting_name

ROOT = Path(__file__).resolve().parents[2]


def recipe_with(**slurm: object) -> Recipe:
    data = recipes.load(ROOT / "tests/recipes/tiny.toml").model_dump(exclude_none=True)
    data["slurm"] |= slurm
    return recipes.parse(data, where="test", base=ROOT)


def flat(recipe: Recipe, site: Site, **options: object) -> list[Job]:
    return [job for jobs in whole_run(recipe, site, **options) for job in jobs]


def shape(jobs: list[Job]) -> list[tuple[str, str, int, int]]:
    return [(job.stages[0], job.role, job.tasks, job.link) for job in jobs]


def test_canary_then_others_in_one_array():
    assert shape(flat(recipe_with(workers=4), Site(name="s"))) == [
        ("regenerate", "canary", 1, 0),
        ("regenerate", "workers", 3, 0),
        ("extract", "canary", 1, 0),
        ("extract", "workers", 3, 0),
        ("train", "single", 1, 0),
    ]


def test_one_worker_needs_no_canary():
    assert {job.role for job in flat(recipe_with(workers=1), Site(name="s"))} == {"single"}


def test_array_of_one_is_a_plain_job():
    jobs = flat(recipe_with(workers=2), Site(name="s"))
    assert [job.tasks for job in jobs] == [1] * 5


def test_arrays_are_split_by_max_array():
    """MaxArraySize 10 means indices 0 to 9."""
    jobs = flat(recipe_with(workers=26), Site(name="s", max_array=10))
    assert [j.tasks for j in jobs if j.stages[0] == "extract"] == [1, 10, 10, 5]


def test_workers_are_lowered_to_max_jobs():
    jobs = flat(recipe_with(workers=100), Site(name="s", max_jobs=22))
    assert sum(job.tasks for job in jobs) == 21
    with pytest.raises(UsageError, match="max_jobs"):
        flat(recipe_with(workers=4), Site(name="s", max_jobs=2))


def test_chained_jobs_follow_each_worker():
    jobs = flat(recipe_with(workers=3), Site(name="s", chain=2, requeue=False))
    assert shape(jobs)[:4] == [
        ("regenerate", "canary", 1, 0),
        ("regenerate", "workers", 2, 0),
        ("regenerate", "workers", 3, 1),
        ("regenerate", "workers", 3, 2),
    ]
    assert [(job.role, job.link) for job in jobs[-3:]] == [("single", n) for n in range(3)]


def test_a_proven_group_needs_no_canary():
    stages = ("extract", "vocab")
    jobs = whole_group(recipe_with(workers=4), Site(name="s"), 1, stages, proven=True)
    assert shape(jobs) == [("extract", "workers", 4, 0)]


def test_only_and_more():
    recipe, site = recipe_with(workers=4), Site(name="s")
    (jobs,) = whole_run(recipe, site, only="vocab")
    assert [(job.stages, job.role) for job in jobs] == [(("vocab",), "single")]
    more = more_workers(recipe, site, 1, ("extract", "vocab"), 5)
    assert shape(more) == [("extract", "workers", 5, 0)]


def test_time_limit_of_a_group_is_its_longest():
    site = Site(name="s", time="2:00:00", times={"benchmark": "5:00:00"})
    assert [j.minutes for j in flat(recipe_with(workers=1), site)] == [120, 120, 300]


def test_too_little_time_for_three_loads_is_refused():
    site = Site(name="s", time="0:40:00")
    with pytest.raises(UsageError, match="3 engine loads"):
        flat(recipe_with(workers=1, engine_load_minutes=15.0), site)
    flat(recipe_with(workers=1, engine_load_minutes=13.0), site)


def test_jobs_shorter_than_the_grace_time():
    """USR2 comes at a quarter of the time before the end at the latest."""
    jobs = flat(recipe_with(workers=1), Site(name="s", time="00:04:00", grace_seconds=300))
    assert {job.grace for job in jobs} == {60}


def test_nodes_only_for_train_alone():
    groups = [["regenerate", "prepare"], ["extract", "vocab"], ["train"], ["benchmark"]]
    jobs = flat(recipe_with(workers=1, groups=groups, nodes={"train": 2}), Site(name="s"))
    assert [job.nodes for job in jobs] == [1, 1, 2, 1]
    assert [job.final for job in jobs] == [False, False, False, True]
    with pytest.raises(UsageError, match="group of its own"):
        recipe_with(nodes={"train": 2})
    with pytest.raises(UsageError, match="nodes"):
        recipe_with(groups=groups, nodes={"extract": 2})


def test_cpu_stages_ask_for_no_gpu():
    groups = [["regenerate", "prepare"], ["extract"], ["vocab"], ["train", "benchmark"]]
    jobs = flat(recipe_with(workers=1, groups=groups, cpu_stages=["vocab"]), Site(name="s"))
    assert [job.gpus for job in jobs] == [8, 8, 0, 8]
    with pytest.raises(UsageError, match="mixes stages"):
        recipe_with(cpu_stages=["vocab"])


@pytest.mark.parametrize(
    "groups",
    [
        [["regenerate", "prepare"], ["extract", "vocab"], ["train"]],
        [["prepare", "regenerate"], ["extract", "vocab"], ["train", "benchmark"]],
        [["regenerate", "prepare", "extract"], ["extract", "vocab"], ["train", "benchmark"]],
    ],
)
def test_groups_name_each_stage_once_in_order(groups: list[list[str]]):
    with pytest.raises(UsageError, match=r"slurm\.groups"):
        recipe_with(groups=groups)


@pytest.mark.parametrize("name", ["kimi-k2.5", "a", "4", "Ünïcode", "x" * 64, "a b"])
def test_names_have_eight_characters(name: str):
    assert len(waiting_name("extract", name)) == 8
    assert waiting_name("extract", name).isascii()
    suffix = new_suffix(Path("/runs") / name)
    assert SUFFIX.match(suffix) and suffix != new_suffix(Path("/runs") / name)
    assert suffix[:6] == run_digits(Path("/runs") / name)
