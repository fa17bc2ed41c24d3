"""Recipes: every shipped one loads and means what it says; a wrong one gets one line of help."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kimi_eagle import recipe as recipes
from kimi_eagle.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = sorted([*ROOT.glob("jobs/*.toml"), *ROOT.glob("tests/recipes/*.toml")])

SMALL = """
name = "small"
[verifier]
path = "model"
[[sources]]
path = "prompts.jsonl"
[engine]
max_model_len = 4096
[extract]
layers = [2, 4]
[vocab]
draft_vocab_size = 16
[benchmark]
prompts = "heldout.jsonl"
"""


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: str(p.relative_to(ROOT)))
def test_shipped_recipe_loads(path: Path) -> None:
    recipe = recipes.load(path)
    assert recipe.name == path.stem
    for stage in ("regenerate", "extract", "benchmark"):
        assert recipe.engine_for(stage).max_model_len >= 16
    # A recipe that names files of this repository names files that are there.
    for file in [s.path for s in recipe.sources] + [recipe.benchmark.prompts]:
        if ROOT in Path(file).parents:
            assert Path(file).is_file(), file


def test_shipped_recipes_are_all_found() -> None:
    kimi = {"kimi-k2.5.toml", "kimi-k2.5-smoke.toml"}
    assert {p.name for p in SHIPPED} >= {"smollm2.toml", "tiny.toml", *kimi}


def test_kimi_recipe_has_the_shape_of_the_draft() -> None:
    recipe = recipes.load(ROOT / "jobs/kimi-k2.5.toml")
    assert recipe.verifier.path == "/shared/kimi-k2.5-int4"
    assert recipe.extract.layers == (2, 30, 58, 61)
    assert recipe.vocab.draft_vocab_size == 32_000
    assert (recipe.engine.tp, recipe.train.seq_len, recipe.train.ttt_steps) == (8, 20_000, 4)

    from kimi_eagle.training.draft_config import decoder_config

    published = json.loads((ROOT / "tests/kimi/config.json").read_text())
    draft = decoder_config(recipe.train.draft, published)
    assert draft.hidden_size == 7168
    assert (draft.num_attention_heads, draft.head_dim, draft.num_hidden_layers) == (64, 128, 1)
    assert draft.intermediate_size == 12288
    rope = draft.rope_parameters
    assert (rope["rope_type"], rope["rope_theta"], rope["factor"]) == ("yarn", 50000.0, 64.0)
    assert rope["mscale"] == rope["mscale_all_dim"] == 1.0
    assert (draft.bos_token_id, draft.eos_token_id) == (163584, 163585)


def test_kimi_recipe_mixes_categories_by_share() -> None:
    sources = recipes.load(ROOT / "jobs/kimi-k2.5.toml").sources
    assert [s.name for s in sources] == ["chat", "code", "maths", "chinese", "tools", "long"]
    assert sum(s.weight for s in sources) == pytest.approx(1)
    assert sources[0].limit / sources[0].weight == pytest.approx(60_000)


def test_smoke_recipe_proves_the_settings_of_the_real_one() -> None:
    real = recipes.load(ROOT / "jobs/kimi-k2.5.toml")
    smoke = recipes.load(ROOT / "jobs/kimi-k2.5-smoke.toml")
    for stage in ("regenerate", "extract", "benchmark"):
        assert smoke.engine_for(stage) == real.engine_for(stage)
    for section in ("verifier", "template", "extract", "vocab"):
        assert getattr(smoke, section) == getattr(real, section), section
    for key in ("draft", "seq_len", "ttt_steps", "optimizer", "lr", "loss", "dtype"):
        assert getattr(smoke.train, key) == getattr(real.train, key), key
    assert [s.path for s in smoke.sources] == [s.path for s in real.sources]
    # Small: one job of one node, as many prompts as the comments count with.
    assert len(smoke.slurm.groups) == smoke.slurm.workers == 1
    assert sum(s.limit for s in smoke.sources) == 336
    assert smoke.train.max_steps == 20
    # Each GPU has samples to train on and to validate with, should all answers be kept.
    assert 336 * smoke.train.validation_share >= smoke.slurm.gpus


def test_heldout_prompts_are_enough_and_not_among_the_others() -> None:
    def read(name: str) -> list[str]:
        lines = (ROOT / "jobs/data" / name).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        return [r.get("prompt") or r["messages"][0]["content"] for r in rows]

    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    trained = [plain(p) for p in read("prompts.jsonl") + read("multiturn.jsonl")]
    held = [plain(p) for p in read("heldout.jsonl")]
    assert len(set(trained)) == len(trained) >= 250
    assert len(set(held)) == len(held) >= 16
    assert not set(trained) & set(held)


def test_long_recipe_trains_on_none_of_its_heldout_prompts() -> None:
    from kimi_eagle.bench.overlap import near_duplicates
    from kimi_eagle.data.sources import select

    recipe = recipes.load(ROOT / "jobs/smollm2-long.toml")
    chosen = select(recipe.sources, recipe.seed, by_prompt=True)
    assert len(chosen.rows) == 1499 and not chosen.rejects
    found = near_duplicates(recipe, chosen.rows)
    assert (found["prompts"], found["compared"]) == (0, 32)


def wrong(tmp_path: Path, text: str) -> str:
    """The one line that a recipe with this text gets."""
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        recipes.load(path)
    line = caught.value.line()
    assert "\n" not in line and line.startswith(str(path)), line
    assert caught.value.exit_code == 2
    return line


def test_small_recipe_is_right(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    recipe = recipes.load(path)
    assert recipe.verifier.path == str(tmp_path / "model")
    assert recipe.sources[0].path == str(tmp_path / "prompts.jsonl")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[vocab]", "[vokab]", ["vokab", "vocab"]),
        (
            "draft_vocab_size = 16",
            "draft_vocab_sise = 16",
            ["draft_vocab_sise", "draft_vocab_size"],
        ),
        ("[benchmark]", "[train]\nlerning_rate = 1\n[benchmark]", ["train.lerning_rate"]),
        ("[benchmark]", "[train.draft]\nhead_dims = 8\n[benchmark]", ["train.draft.head_dims"]),
        (
            "[benchmark]",
            "[extract.engine]\ntpp = 8\n[benchmark]",
            ["extract.engine.tpp", "'tp'"],
        ),
        ('path = "prompts.jsonl"', 'path = "p.jsonl"\nlimits = 3', ["limits", "'limit'"]),
        (
            "draft_vocab_size = 16",
            'draft_vocab_size = "16"',
            ["draft_vocab_size", "'16'", "integer"],
        ),
        ("layers = [2, 4]", "layers = [2, 4.5]", ["extract.layers", "4.5", "integer"]),
        ('path = "model"', "path = 7", ["verifier.path", "7", "string"]),
        ("draft_vocab_size = 16", "draft_vocab_size = 1", ["draft_vocab_size", "2"]),
        ("[benchmark]", "[train]\nlr = -1.0\n[benchmark]", ["train.lr", "-1.0", "greater than 0"]),
        ("[benchmark]", "[train]\nwarmup_ratio = 2.0\n[benchmark]", ["warmup_ratio", "less than"]),
        ("[benchmark]", '[train]\noptimizer = "sgd"\n[benchmark]', ["optimizer", "sgd", "adamw"]),
        ("layers = [2, 4]", "layers = [4, 2]", ["extract.layers", "ascending"]),
        ("layers = [2, 4]", "layers = [4]", ["extract.layers", "at least 2"]),
        ("layers = [2, 4]", "layers = [-1, 4]", ["extract.layers", ">= 0"]),
        ("layers = [2, 4]\n", "", ["missing", "extract.layers"]),
        ('[verifier]\npath = "model"\n', "", ["missing", "verifier"]),
        ('name = "small"', 'name = "../x"', ["name", "../x"]),
        (
            "[benchmark]",
            "[prepare]\nmax_length = 9999\n[benchmark]",
            ["max_length", "max_model_len"],
        ),
        ("[benchmark]", '[[sources]]\npath = "prompts.jsonl"\n[benchmark]', ["sources", "differ"]),
        ("[benchmark]", "[benchmark", ["not TOML"]),
    ],
)
def test_wrong_recipe_gets_one_line(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    assert SMALL.count(old) == 1
    line = wrong(tmp_path, SMALL.replace(old, new))
    for word in words:
        assert word in line, line


def test_rope_in_the_older_layout_is_read_as_transformers_does(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    for table, kind in (('type = "yarn"', "yarn"), ('type = "x"\nrope_type = "linear"', "linear")):
        path.write_text(f"{SMALL}[train.draft.rope]\n{table}\nfactor = 4.0\n")
        rope = recipes.load(path).train.draft.rope
        assert rope == {"rope_type": kind, "factor": 4.0}


def test_missing_recipe_names_the_nearest(tmp_path: Path) -> None:
    shutil.copy(ROOT / "jobs/smollm2.toml", tmp_path / "smollm2.toml")
    with pytest.raises(UsageError) as caught:
        recipes.load(tmp_path / "smolm2.toml")
    assert "no such recipe" in caught.value.line() and "smollm2.toml" in caught.value.line()


def test_directory_and_binary_instead_of_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        recipes.load(tmp_path)
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not TOML"):
        recipes.load(tmp_path / "x.toml")
