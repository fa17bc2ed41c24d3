"""What the rules of layers, engine and machine compute, on Kimi-K2.5's own numbers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kimi_eagle import recipe as recipes
from kimi_eagle.capture import footprint
from kimi_eagle.contracts import Facts, engine, layers, libraries, machine, vllm_source
from kimi_eagle.contracts.rule import Note, Problem
from kimi_eagle.recipe import Recipe
from kimi_eagle.site import Site

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """The shipped recipe, on the hollow stand-in of the published checkpoint."""
    spec = importlib.util.spec_from_file_location("standin", ROOT / "tests/kimi/standin.py")
    standin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(standin)
    folder = tmp_path_factory.mktemp("kimi") / "model"
    standin.build(folder)
    recipe = recipes.load(ROOT / "jobs/kimi-k2.5.toml")
    section = recipe.verifier.model_copy(update={"path": str(folder)})
    return recipe.model_copy(update={"verifier": section})


@pytest.fixture(scope="module")
def facts(kimi: Recipe) -> Facts:
    return Facts(kimi, site=Site(name="here", gpu_memory_gib=79.6))


def judged(facts: Facts, rule, **site) -> list[Problem | Note]:
    """A rule's words at another site; the weights are counted once."""
    given = {"verifier": facts.verifier, "weights": facts.weights}
    return list(rule(Facts(facts.recipe, site=Site(name="here", **site), **given)))


def test_sglang_counts_the_layer_that_a_state_leaves():
    assert layers.sglang_ids([2, 30, 58]) == [1, 29, 57]
    assert layers.from_sglang([2, 30, 58]) == [3, 31, 59]
    assert layers.from_sglang(layers.sglang_ids([2, 30, 58])) == [2, 30, 58]
    with pytest.raises(ValueError, match="layer 0"):
        layers.sglang_ids([0, 2])


def test_ids_in_the_other_convention_are_recognised(facts: Facts):
    section = facts.recipe.extract.model_copy(update={"layers": (1, 29, 57, 60)})
    other = facts.recipe.model_copy(update={"extract": section})
    (problem,) = layers.last(Facts(other, verifier=facts.verifier))
    assert "write [2, 30, 58, 61]" in problem.fix


def test_weights_are_the_published_bytes_and_the_ranks_share_them(facts: Facts):
    found = facts.weights
    assert found.total == pytest.approx(595.15e9, rel=1e-3)
    assert found.a_gpu(1) == pytest.approx(found.total, abs=1)
    # What no rank shares: q_a, kv_a, gates and norms of 61 layers, 2.2 GB.
    assert 8 * found.a_gpu(8) - found.total == pytest.approx(7 * 2.2e9, rel=0.03)
    assert found.a_gpu(8, pp=2) < 0.55 * found.a_gpu(8)


def test_cache_of_latent_attention_is_one_row_a_layer_on_every_rank(facts: Facts):
    verifier = facts.verifier
    assert footprint.cache_bytes(verifier, tp=1) == 61 * (512 + 64) * 2
    assert footprint.cache_bytes(verifier, tp=8) == footprint.cache_bytes(verifier, tp=1)
    assert footprint.states_bytes(verifier, 4) == 4 * 7168 * 2


def test_cache_of_other_attention_is_split_by_head(place):
    place.change_text(kv_lora_rank=None, num_key_value_heads=2, head_dim=16)
    verifier = place.facts().verifier
    assert footprint.cache_bytes(verifier, tp=1) == 4 * 2 * 2 * 16 * 2
    assert footprint.cache_bytes(verifier, tp=4) == 4 * 2 * 1 * 16 * 2


def test_eight_gpus_of_80_gb_do_not_hold_kimi_and_what_would_is_said(facts: Facts):
    problems = [p for p in machine.memory(facts) if isinstance(p, Problem)]
    assert len(problems) == 2  # answering, and extracting with its states
    for problem in problems:
        assert "71.1 GiB of weights" in problem.what
        assert "at most 71.6 GiB" in problem.expected
        assert "tp 16, pp 1 over 2 nodes of 8 GPUs" in problem.fix
        assert "pp 2" not in problem.fix  # both engines hand out states
        assert "GPUs of at least 8" in problem.fix


@pytest.mark.parametrize("gpu", ["h200", "rtx_pro_6000", "b200"])
def test_larger_gpus_hold_kimi(facts: Facts, gpu: str):
    said = judged(facts, machine.memory, gpu_type=gpu)
    assert said and all(isinstance(x, Note) for x in said)
    assert gpu in said[0].text


def test_what_is_offered_does_hold_it(facts: Facts):
    offered = [p.fix for p in machine.memory(facts) if isinstance(p, Problem)]
    sizes = [float(text.split("at least ")[1].split(" GiB")[0]) for text in offered]
    assert not [x for x in judged(facts, machine.memory, gpu_memory_gib=max(sizes)) if
                isinstance(x, Problem)]  # fmt: skip
    assert [x for x in judged(facts, machine.memory, gpu_memory_gib=max(sizes) - 2) if
            isinstance(x, Problem)]  # fmt: skip


def test_pipeline_stages_are_offered_to_an_engine_that_only_answers(facts: Facts):
    recipe = facts.recipe
    section = recipe.regenerate.engine.model_copy(update={"max_num_seqs": 64})
    changed = recipe.regenerate.model_copy(update={"engine": section})
    own = Facts(
        recipe.model_copy(update={"regenerate": changed}),
        site=facts.site,
        verifier=facts.verifier,
        weights=facts.weights,
    )
    answers = next(p for p in machine.memory(own) if "[regenerate]" in p.where)
    assert "tp 16, pp 1 over 2 nodes" in answers.fix and "tp 8, pp 2 over 2 nodes" in answers.fix


def test_a_load_is_bytes_over_speed(facts: Facts):
    # 554.3 GiB at half a GiB a second: 18.5 minutes, three of them 55.4.
    slow = {"load_gib_per_second": 0.5}
    assert not [x for x in judged(facts, machine.load_time, time="56", **slow)]
    problems = judged(facts, machine.load_time, time="55", **slow)
    assert {type(p) for p in problems} == {Problem} and "18 minutes" in problems[0].expected
    (note,) = judged(facts, machine.load_time, load_gib_per_second=0.25)
    assert "engine_load_minutes says 15" in note.text


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("h200", 140.4),
        ("nvidia_h100_80gb_hbm3", 80.0),
        ("H100-SXM", 79.6),
        ("h20", 95.6),
        ("nvidia_rtx_pro_6000_blackwell_server_edition", 95.6),
        ("nvidia_h100_nvl", 93.6),
        ("gh200", None),
        ("nvidia_gh200_480gb", None),
        ("nvidia_gh200_96gb_hbm3", 96.0),
        ("a100", None),
        ("a100_40gb", 40.0),
        ("3g.40gb", 40.0),
        ("l4", None),
        ("tesla", None),
    ],
)
def test_memory_of_a_gpu_type(name: str, gib: float | None):
    assert machine.gpu_gib(name) == gib


@pytest.mark.parametrize(
    ("driver", "cuda", "fine"),
    [
        ("580.65.06", "13.0", True),
        ("590.10", "13.2", True),
        ("575.57.08", "13.0", False),
        ("535.104", "12.9", True),
        ("470.1", "12.4", False),
        ("470.1", "99.0", True),  # a CUDA of which we know nothing
        ("", "13.0", True),  # nothing known is no fault
        ("unknown", "13.0", True),
        ("580.65.06", "", True),
    ],
)
def test_drivers(driver: str, cuda: str, fine: bool):
    assert (machine.driver_fault(driver, cuda) is None) == fine


@pytest.mark.parametrize(
    ("capability", "built", "says"),
    [
        ((12, 0), ["sm_90", "sm_120"], None),  # RTX PRO 6000
        ((12, 1), ["sm_90", "sm_120"], None),  # a later minor version
        ((12, 0), ["sm_90", "sm_100"], "no code for sm_120"),
        ((12, 0), ["sm_90", "compute_90"], None),  # compiled on arrival
        ((12, 0), ["sm_90a", "sm_120a"], None),
        ((8, 0), ["sm_86"], "no code for sm_80"),
        ((7, 5), ["sm_75"], "no bfloat16"),
    ],
)
def test_architectures(capability: tuple[int, int], built: list[str], says: str | None):
    fault = machine.architecture_fault(capability, built)
    assert fault is None if says is None else says in fault


def test_gpus_are_what_nvidia_smi_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '97887, 12.0\\n143771, 9.0\\n[N/A], 9.0\\n'\n")
    smi.chmod(0o755)
    recipe = recipes.load(ROOT / "jobs/smollm2.toml")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert Facts(recipe).gpus == [(97887 / 1024, (12, 0)), (143771 / 1024, (9, 0))]
    assert not Facts(recipe).lacks("gpu")
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert Facts(recipe).gpus == [] and Facts(recipe).lacks("gpu")


def test_kimi_divides_by_8_and_not_by_3(facts: Facts):
    assert engine.undivided(facts, 8) == engine.undivided(facts, 64) == []
    assert engine.undivided(facts, 3)
    # 2,048 / 128 ranks = 16 values, half of an INT4 group of 32.
    assert "the experts' 64 groups of 32" in engine.undivided(facts, 128)


@pytest.mark.parametrize("torch", ["2.13.0", "2.13.0+cpu", "2.13.0+cu130"])
def test_builds_of_the_pinned_torch_are_all_it(torch: str):
    recipe = recipes.load(ROOT / "jobs/smollm2.toml")
    found = Facts(recipe, versions=Facts(recipe).versions | {"torch": torch})
    assert [*libraries.agree(found), *libraries.pinned(found)] == []


def test_the_installed_vllm_gives_the_last_state_of_what_we_run():
    source = Facts(recipes.load(ROOT / "jobs/smollm2.toml")).vllm_source
    for name in ("DeepseekV3ForCausalLM", "LlamaForCausalLM"):
        assert vllm_source.gives_last_state(vllm_source.model_text(source, name)) is True
    assert vllm_source.model_text(source, "KimiK3ForConditionalGeneration")  # a package
    assert vllm_source.model_text(source, "NoSuchModel") is None
