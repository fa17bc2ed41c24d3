"""What a recipe asks of the benchmark, and what is counted before the first engine starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kimi_eagle import recipe as recipes
from kimi_eagle.bench import workload
from kimi_eagle.bench.draftdir import quick_digest
from kimi_eagle.bench.measure import Case
from kimi_eagle.bench.plan import as_data, make_loads, open_drafts, told
from kimi_eagle.bench.workload import make_workload
from kimi_eagle.cli.benchmark import default_out
from kimi_eagle.display import describe
from kimi_eagle.errors import UsageError
from kimi_eagle.lock.reproduce import toml_lines
from kimi_eagle.stages import benchmark
from kimi_eagle.stages.context import Context
from kimi_eagle.survey import StageView


def make(folder: Path, config: dict, weights: str = "model.safetensors") -> Path:
    """A directory that looks like a model's."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / weights).write_bytes(b"weights")
    return folder


def eagle3(**more: object) -> dict:
    layer = {"model_type": "llama", "hidden_size": 576, "vocab_size": 49152}
    return {"speculators_model_type": "eagle3", "transformer_layer_config": layer} | more


def recipe_of(folder: Path, **benchmark: object) -> recipes.Recipe:
    data = {
        "name": "plan",
        "verifier": {"path": "verifier"},
        "sources": [{"path": "unused.jsonl"}],
        "extract": {"layers": [2, 15, 27, 30]},
        "vocab": {"draft_vocab_size": 8},
        "benchmark": {"prompts": "held.jsonl", **benchmark},
    }
    return recipes.parse(data, where="plan.toml", base=folder)


@pytest.fixture
def verifier(tmp_path: Path) -> SimpleNamespace:
    config = {"vocab_size": 49152, "hidden_size": 576}
    path = make(tmp_path / "verifier", config)
    return SimpleNamespace(path=path, id=lambda: "vid", config=config)


@pytest.fixture
def drafts(tmp_path: Path) -> dict[str, Path]:
    return {name: make(tmp_path / name, eagle3(note=name)) for name in ("own", "one", "two")}


def loads_of(recipe: recipes.Recipe, verifier: SimpleNamespace, own: Path):
    workload = make_workload(["a", "b"], [[1], [2]], 4, recipe.benchmark.k)
    return make_loads(recipe, verifier, open_drafts(recipe, verifier, own), workload)


def test_by_default_two_loads_at_batch_1_and_16(tmp_path: Path, verifier, drafts) -> None:
    alone, own = loads_of(recipe_of(tmp_path), verifier, drafts["own"])
    assert (alone.draft, alone.spec.k, alone.spec.draft) == (None, None, None)
    assert (own.draft, own.spec.k, own.spec.draft) == ("draft", 3, str(drafts["own"]))
    assert alone.spec.cases == own.spec.cases == (Case(1), Case(16))
    assert alone.spec.engine["max_num_seqs"] == 16
    assert own.spec.machine == alone.spec.machine and own.spec.machine["cores"] >= 1
    assert told([alone, own]) == [
        "2 engine loads, 4 measurements of 2 prompts, at most 4 tokens an answer",
        "  verifier alone: batch 1; batch 16",
        "  draft k=3: batch 1; batch 16",
    ]


def test_the_two_of_the_headline_are_profiled(tmp_path: Path, verifier, drafts) -> None:
    recipe = recipe_of(tmp_path, sweep_k=[1], batch_sizes=[4, 1], profile=True)
    loads = loads_of(recipe, verifier, drafts["own"])
    assert [load.spec.profile for load in loads] == [Case(4), Case(4), None]
    plain = loads_of(recipe_of(tmp_path, batch_sizes=[4, 1]), verifier, drafts["own"])
    assert [a.spec.digest(Case(1)) for a in plain] == [a.spec.digest(Case(1)) for a in loads[:2]]
    assert told(loads)[2] == "  draft k=3: batch 4; batch 1; 64 steps profiled"
    assert [load["profiled"] for load in as_data(loads, tmp_path)["loads"]] == [True, True, False]


def test_sweeps_and_other_drafts_are_counted(tmp_path: Path, verifier, drafts) -> None:
    recipe = recipe_of(
        tmp_path,
        sweep_k=[1, 5],
        batch_sizes=[1, 64],
        sampling=[{"temperature": 0.7, "top_p": 0.9}],
        against=["one", {"path": "two", "name": "the best"}],
    )
    loads = loads_of(recipe, verifier, drafts["own"])
    assert list(map(str, loads)) == [
        "verifier alone", "draft k=3", "one k=3", "the best k=3", "draft k=1", "draft k=5",
    ]  # fmt: skip
    sampled = Case(1, 0.7, 0.9)
    assert loads[3].spec.cases == (Case(1), Case(64), sampled)
    assert loads[4].spec.cases == (Case(1), Case(64))
    lines = told(loads, tmp_path)
    assert lines[0].startswith("6 engine loads, 16 measurements of 2 prompts")
    assert lines[2] == "  draft k=3: batch 1; batch 64; batch 1, temperature 0.7, top-p 0.9"
    data = as_data(loads, tmp_path)
    assert (data["engine_loads"], data["measurements"]) == (6, 16)
    assert sum(len(load["cases"]) for load in data["loads"]) == 16
    assert not any(case["done"] for load in data["loads"] for case in load["cases"])
    digests = {load.spec.digest(case) for load in loads for case in load.spec.cases}
    assert len(digests) == 16


def test_sampling_in_several_processes_is_refused_on_cpus(
    tmp_path: Path, verifier, drafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"sampling": [{"temperature": 0.7}], "engine": {"tp": 2, "device": "cpu"}}
    with pytest.raises(UsageError, match="vLLM 0.31.0 loses the temperature"):
        loads_of(recipe_of(tmp_path, **more), verifier, drafts["own"])
    loads_of(recipe_of(tmp_path, engine=more["engine"]), verifier, drafts["own"])
    # Before the first stage, too, not after an hour's training.
    monkeypatch.setattr(workload, "load_workload", lambda *_: None)
    recipe = recipe_of(tmp_path, **more)
    ctx = SimpleNamespace(recipe=recipe, verifier=verifier, template=None, selection=None)
    with pytest.raises(UsageError, match="vLLM 0.31.0 loses the temperature"):
        Context.preflight(ctx)


def test_paths_and_names_of_other_drafts(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "hub")
    recipe = recipe_of(tmp_path, against=["runs/a/draft", "/models/b/", "link"])
    found = {a.name: a.path for a in recipe.benchmark.against}
    assert found == {
        "a": f"{tmp_path}/runs/a/draft", "b": "/models/b", "link": f"{tmp_path}/hub",
    }  # fmt: skip
    assert recipes.input_paths(recipe)["benchmark.against.a.path"] == f"{tmp_path}/runs/a/draft"
    (tmp_path / "again.toml").write_text("\n".join(toml_lines(recipe)))
    assert recipes.load(tmp_path / "again.toml") == recipe


@pytest.mark.parametrize(
    ("benchmark", "words"),
    [
        ({"against": ["a/x", "b/x"]}, ["against", "names must differ", "'x', 'x'", "set name"]),
        ({"against": [{"path": "a", "name": "draft"}]}, ["names must differ", "run's own draft"]),
        ({"against": "a"}, ["against"]),
        ({"against": [{"pth": "a"}]}, ["pth", "path"]),
        ({"sweep_k": [1, 3]}, ["sweep_k", "k = 3, which is measured anyway"]),
        ({"batch_sizes": [1, 1]}, ["batch_sizes", "each value once"]),
        ({"sampling": [{"temperature": 1.0}] * 2}, ["sampling", "each value once"]),
        ({"sampling": [{"temperature": 0.0}]}, ["temperature", "greater than 0"]),
        ({"sampling": [{"temperature": 1.0, "top_p": 2.0}]}, ["top_p", "less than"]),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, benchmark: dict, words: list[str]) -> None:
    with pytest.raises(UsageError) as e:
        recipe_of(tmp_path, **benchmark)
    for word in words:
        assert word in e.value.line()


def test_a_draft_for_another_verifier_is_refused(tmp_path: Path, verifier, drafts) -> None:
    config = eagle3(transformer_layer_config={"hidden_size": 8, "vocab_size": 9})
    make(tmp_path / "alien", config)
    with pytest.raises(UsageError, match="made for another verifier"):
        open_drafts(recipe_of(tmp_path, against=["alien"]), verifier, drafts["own"])


def test_the_key_of_another_draft_is_its_content(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    np = pytest.importorskip("numpy")
    digests = []
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        folder = make(tmp_path / name, eagle3())
        save_file({"fc.weight": np.full(4, value)}, folder / "model.safetensors")
        digests.append(quick_digest(folder))
    assert digests[0] == digests[1] != digests[2]
    pickled = make(tmp_path / "bin", eagle3(), "pytorch_model.bin")
    before = quick_digest(pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"others")
    assert quick_digest(pickled) != before


def test_the_command_counts_and_loads_nothing(tmp_path: Path, eagle, root: Path) -> None:
    out, draft = tmp_path / "out", make(tmp_path / "own", eagle3())
    recipe = root / "tests/recipes/tiny.toml"
    shown = eagle("benchmark", recipe, "--draft", draft, "--out", out, "--dry-run", "--json")
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert (found["engine_loads"], found["measurements"]) == (2, 4)
    assert not out.exists()


@pytest.mark.parametrize(
    ("draft", "out"),
    [("runs/a/draft", "bench-a"), ("runs/b/draft/", "bench-b"), ("/drafts/best", "bench-best")],
)
def test_drafts_of_several_runs_have_results_of_their_own(draft: str, out: str) -> None:
    assert default_out(draft) == out


def test_status_tells_how_much_there_is_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    noted: dict[str, str] = {}
    lines = ["2 engine loads, 4 measurements of 9 prompts", "  verifier alone: batch 1"]
    benchmark._tell(SimpleNamespace(note=noted.update), lines)
    assert capsys.readouterr().err.splitlines() == lines
    worker = {"phase": "work", "notes": noted, "tokens": 0, "fraction": 0.0}
    shown = describe(StageView("benchmark", units=1, workers=[worker]))
    assert shown.endswith("(2 engine loads, 4 measurements)")
