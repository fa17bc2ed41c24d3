"""`kimi-eagle export`: what the folder holds, what the cards say, what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from kimi_eagle.lock import runlock


def metadata(card):
    """The block at the head of a card, read by a YAML library."""
    import yaml

    start, text, _ = card.read_text().split("---\n", 2)
    assert start == ""
    return yaml.safe_load(text)


def test_a_draft_with_its_card(world, cli):
    world.finish()
    runlock.write(world.run)
    out = world.path / "out/draft"
    done = cli("export", world.run.path, out, "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["files"] == [
        "README.md", "config.json", "kimi-eagle-export.json", "model.safetensors",
        "verifier-LICENSE",
    ]  # fmt: skip
    weights = (out / "model.safetensors").read_bytes()
    assert weights == (world.run.draft / "model.safetensors").read_bytes()
    assert (out / "model.safetensors").stat().st_nlink == 1, "an edit must not reach the run"
    assert "Version 2.0" in (out / "verifier-LICENSE").read_text()
    head = metadata(out / "README.md")
    assert head["license"] == "apache-2.0"
    assert {"eagle3", "speculative-decoding", "vllm"} <= set(head["tags"])
    assert "base_model" not in head, "a path is no name on the hub"
    card = (out / "README.md").read_text()
    for words in (
        "Acceptance length 2.345 at k = 2",
        "0.800, 0.500",
        "| 1 | 2.345 | 20.0 | 30.0 | 1.50 |",
        "Measured on 1 held-out prompts of the recipe, greedy, at most 64 tokens",
        "(tokens a verifier step yields; 95 % interval over prompts 2.100 to 2.600)",
        "1 of 1 answers repeat themselves and are left out",
        "alone they have an acceptance length of 3.930, all prompts together 2.600",
        "None of 1 prompts compared with the training data share a run of words with it.",
        "| chat | cc-by-4.0 | 1,000 |",
        "| code | unknown: say it with license in its [[sources]] | 500 |",
        "carries the embedding of verifier (embed_tokens.weight): weights of the verifier",
        "none: the machine's own Python",
    ):
        assert words in card, words
    assert str(world.path) not in card, "no path of this machine"
    assert "licence unknown of code: say it in its [[sources]]" in said["warnings"]


def test_a_card_of_older_results_says_what_is_not_known(world, cli):
    world.finish()
    path = world.run.bench / "results.json"
    found = json.loads(path.read_text())
    del found["intervals"], found["details"]["loops"], found["details"]["near_duplicates"]
    path.write_text(json.dumps(found | {"identical_outputs": None}))
    assert cli("export", world.run.path, world.path / "out").exit_code == 0
    card = (world.path / "out/README.md").read_text()
    assert "(tokens a verifier step yields)." in card and "repeat themselves" not in card
    assert "near-duplicates of training data is unknown" in card
    assert "Outputs with and without the draft: not claimed (1 of 1 prompts, float32)" in card


def test_the_recipe_as_it_lies_now_tells_licence_and_names(world, cli):
    world.finish()
    text = world.recipe.read_text().replace('name = "code"', 'name = "code"\nlicense = "mit"')
    world.recipe.write_text(text + '[card]\nlicense = "cc-by-nc-4.0"\nbase_model = "me/big"\n')
    out = world.path / "out"
    done = cli("export", world.run.path, out, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["warnings"] == []
    head = metadata(out / "README.md")
    assert (head["license"], head["base_model"]) == ("cc-by-nc-4.0", ["me/big"])
    assert "| code | mit | 500 |" in (out / "README.md").read_text()
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "me/big"


def test_a_recipe_file_that_is_anothers_now_tells_nothing(world, cli):
    world.finish()
    text = world.recipe.read_text().replace('"mini"', '"other"', 1)
    world.recipe.write_text(text + '[card]\nlicense = "mit"\n')
    done = cli("export", world.run.path, world.path / "out")
    assert "is another run's recipe now" in done.stderr
    assert metadata(world.path / "out/README.md")["license"] == "apache-2.0"
    done = cli("export", world.run.path, world.path / "asked", "--recipe", world.recipe)
    assert done.exit_code == 0, done.output
    assert metadata(world.path / "asked/README.md")["license"] == "mit"


@pytest.mark.parametrize(
    ("made", "name", "title"),
    [
        ({"LICENSE": "MIT License\n\nCopyright"}, "mit", None),
        ({"LICENSE": "Modified MIT License\n\nCopyright"}, "other", "modified-mit-license"),
        ({"README.md": "---\nlicense: llama3.1\n---\n"}, "llama3.1", None),
        (
            {"README.md": "---\nlicense: other\nlicense_name: my-own\n---\n"},
            "other",
            "my-own",
        ),
        ({"README.md": "license: mit\n"}, "unknown", None),
        ({"NOTICE": "Apache License\nVersion 2.0"}, "unknown", None),
        ({}, "unknown", None),
    ],
)
def test_licences_are_read_and_never_guessed(world, cli, made, name, title):
    world.finish()
    (world.verifier / "LICENSE").unlink()
    for file, text in made.items():
        (world.verifier / file).write_text(text)
    done = cli("export", world.run.path, world.path / "out")
    assert done.exit_code == 0, done.output
    head = metadata(world.path / "out/README.md")
    assert (head["license"], head.get("license_name")) == (name, title)
    silent = "unknown: say it in [card] license" in (world.path / "out/README.md").read_text()
    assert silent == (name == "unknown") == ("say it in [card] license" in done.stderr)


def test_figures_of_another_draft_are_left_out(world, cli):
    world.finish(measured=False)
    done = cli("export", world.run.path, world.path / "out")
    assert done.exit_code == 0 and "is of another draft" in done.stderr
    card = (world.path / "out/README.md").read_text()
    assert "Not measured" in card and "2.345" not in card


def test_without_the_embedding_nothing_else_changes(world, cli):
    world.finish()
    out = world.path / "out"
    done = cli("export", world.run.path, out, "--without-embedding")
    assert done.exit_code == 0, done.output
    whole, left = (load_file(d / "model.safetensors") for d in (world.run.draft, out))
    assert set(whole) - set(left) == {"embed_tokens.weight"}
    for name, tensor in left.items():
        assert tensor.dtype == whole[name].dtype and np.array_equal(tensor, whole[name]), name
    assert (out / "config.json").read_bytes() != b""
    assert "embed_tokens.weight is left out" in (out / "README.md").read_text()


def test_an_embedding_that_cannot_be_shared_is_not_left_out(world, cli):
    world.finish(target_hidden_size=32)
    done = cli("export", world.run.path, world.path / "out", "--without-embedding")
    assert done.exit_code == 2 and "different hidden sizes" in done.stderr
    spec = json.loads(world.run.spec.read_text())
    spec["recipe"]["engine"]["pp"] = 2
    world.run.spec.write_text(json.dumps(spec))
    assert cli("export", world.run.path, world.path / "out").exit_code == 0


def test_more_pipeline_stages_need_the_embedding(world, cli):
    world.finish()
    spec = json.loads(world.run.spec.read_text())
    spec["recipe"]["engine"]["pp"] = 2
    world.run.spec.write_text(json.dumps(spec))
    done = cli("export", world.run.path, world.path / "out", "--without-embedding")
    assert done.exit_code == 2 and "pp > 1" in done.stderr
    assert not (world.path / "out").exists()


def test_the_libraries_still_load_a_draft_without_embedding():
    """The lines of vLLM 0.31.0 and speculators 0.9.0 that --without-embedding rests on, read."""

    def source(package: str, name: str) -> str:
        spec = importlib.util.find_spec(package)
        return (Path(spec.submodule_search_locations[0]) / name).read_text()

    vllm = source("vllm", "model_executor/models/llama_eagle3.py")
    assert 'if not includes_embed_tokens:\n            orig_to_new_substr["embed_tokens"]' in vllm
    assert "if not self.model.has_own_embed_tokens:\n" in source(
        "vllm", "v1/spec_decode/llm_base_proposer.py"
    )
    ignored = source("speculators", "models/eagle3/core.py").split(
        "_keys_to_ignore_on_load_missing"
    )
    assert '"embed_tokens.weight"' in ignored[1].split("    ]\n", 1)[0]


def test_an_export_is_replaced_only_while_nobody_changed_it(world, cli):
    world.finish()
    out = world.path / "out"
    assert cli("export", world.run.path, out).exit_code == 0
    assert cli("export", world.run.path, out, "--without-embedding").exit_code == 0
    assert "embed_tokens.weight" not in load_file(out / "model.safetensors")
    (out / "README.md").write_text("mine")
    done = cli("export", world.run.path, out)
    assert done.exit_code == 2 and "README.md, which was changed" in done.stderr
    assert (out / "README.md").read_text() == "mine"
    assert sorted(p.name for p in world.path.iterdir() if p.name.startswith(".")) == []


def test_other_places_are_refused(world, cli):
    world.finish()
    other, file = world.path / "other", world.path / "file"
    other.mkdir()
    (other / "notes.txt").write_text("x")
    file.write_text("x")
    for out, words in (
        (other, "something else"),
        (file, "a file or a link"),
        (world.run.path / "sub", "in the run itself"),
    ):
        done = cli("export", world.run.path, out)
        assert done.exit_code == 2 and words in done.stderr, out
    assert [p.name for p in other.iterdir()] == ["notes.txt"]


def test_no_draft_a_stale_draft_and_damage_are_refused(world, cli):
    out = world.path / "out"
    done = cli("export", world.run.path, out)
    assert done.exit_code == 1 and "no draft yet" in done.stderr
    assert "prepare is not done" in cli("export", world.run.path, out, "--dataset").stderr
    world.finish()
    weights = world.run.draft / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for words in ((), ("--without-embedding",)):
        done = cli("export", world.run.path, out, *words)
        assert done.exit_code == 1 and "not those that were written" in done.stderr
    weights.write_bytes(whole)
    (world.run.draft / "record.json").write_text('"0123456789abcdef.a1"')
    done = cli("export", world.run.path, out)
    assert done.exit_code == 1 and "not the one that the run's records name" in done.stderr
    assert not out.exists()


def test_token_samples_with_their_card(world, cli):
    world.finish()
    out = world.path / "out"
    done = cli("export", world.run.path, out, "--dataset", "--json")
    assert done.exit_code == 0, done.output
    assert (out / "00000.tokens.parquet").read_bytes() == b"PAR10"
    assert (out / "00001.tokens.parquet").exists() and (out / "verifier-LICENSE").exists()
    head = metadata(out / "README.md")
    assert head["size_categories"] == ["1K<n<10K"] and head["license"] == "other"
    card = (out / "README.md").read_text()
    for words in (
        "| samples | 1,500 |",
        "| tokens | 90,000 |",
        "| rows rejected | 3 |",
        "| unknown-role | 3 |",
        "| chat | cc-by-4.0 | 1,000 |",
        f"| template digest | {'t' * 32} |",
        "wrote the answers, greedily, at most 256 tokens each",
    ):
        assert words in card, words
    assert str(world.path) not in card


def test_what_cards_say_is_in_no_key(world):
    from kimi_eagle.contracts.drift import _comparable
    from kimi_eagle.recipe import load
    from kimi_eagle.stages.context import recipe_digest

    before, told = recipe_digest(load(world.recipe)), _comparable(load(world.recipe))
    text = world.recipe.read_text().replace('"cc-by-4.0"', '"mit"')
    world.recipe.write_text(text + '[card]\nlicense = "mit"\n')
    assert recipe_digest(load(world.recipe)) == before
    assert _comparable(load(world.recipe)) == told, "no drift"


@pytest.mark.parametrize("words", [("--for", "sglang"), ("--without-embedding",)])
def test_a_dataset_has_no_weights(world, cli, words):
    world.finish()
    done = cli("export", world.run.path, world.path / "out", "--dataset", *words)
    assert done.exit_code == 2 and "--dataset has no weights" in done.stderr


@pytest.mark.parametrize("same", [True, False])
def test_a_draft_with_an_embedding_of_its_own(world, cli, same):
    """Only a draft that training started from can bring one; leaving it out would change it."""
    from safetensors.numpy import save_file

    world.finish(norm_before_fc=False, norm_before_residual=False)
    spec = json.loads(world.run.spec.read_text())
    spec["recipe"]["train"]["from"] = str(world.run.draft)
    world.run.spec.write_text(json.dumps(spec))
    table = load_file(world.run.draft / "model.safetensors")["embed_tokens.weight"]
    save_file(
        {"model.embed_tokens.weight": table if same else table + 1},
        world.verifier / "model.safetensors",
    )
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 8, "model_type": "llama"}
    (world.verifier / "config.json").write_text(json.dumps(sizes))
    whole = cli("export", world.run.path, world.path / "whole")
    assert whole.exit_code == 0, whole.output
    own = "carries its own embedding" in (world.path / "whole/README.md").read_text()
    assert own is not same
    for words in (["--without-embedding"], ["--for", "sglang"]):
        done = cli("export", world.run.path, world.path / words[0], *words)
        assert (done.exit_code == 0) == same, done.output
        assert same or "the draft's embedding is not the verifier's" in done.stderr


def test_the_image_of_the_lock_is_in_the_card(world, cli):
    world.finish()
    runlock.write(world.run)
    lock = json.loads(world.run.lock.read_text())
    lock["image"] = {"sha256": "ab" * 32, "name": "cpu"}
    world.run.lock.write_text(json.dumps(lock))
    assert cli("export", world.run.path, world.path / "out").exit_code == 0
    assert f"sha256:{'ab' * 32}" in (world.path / "out/README.md").read_text()
    world.run.lock.write_text("{}")
    assert cli("export", world.run.path, world.path / "bare").exit_code == 0
    assert "versions are unknown" in (world.path / "bare/README.md").read_text()


def test_diff_shows_what_cards_say_and_counts_it_not(world):
    from kimi_eagle.lock import rundiff
    from kimi_eagle.recipe import load
    from kimi_eagle.rundir import follow

    before = runlock.compose(world.run)
    text = world.recipe.read_text().replace('"cc-by-4.0"', '"mit"')
    world.recipe.write_text(text + '[card]\nlicense = "mit"\n')
    follow(world.run, load(world.recipe), world.recipe)
    rows = {r.what: r for r in rundiff.compare(before, runlock.compose(world.run))}
    for name in ("recipe.card.license", "recipe.sources.chat.license"):
        assert rows[name].same is False and not rows[name].differs, name
