"""Training data for the tests of this room: real hidden states of the small model.

`corpus` runs the verifier through transformers on short conversations and keeps the states
entering the chosen layers (the last one by a hook before the final norm, because
hidden_states[-1] is after it), as shards.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

LAYERS = (2, 15, 27, 30)
DRAFT_VOCAB = 512
SEQ_LEN = 64
CHILD = """
import json, sys
from pathlib import Path
from kimi_eagle.recipe import Recipe
from kimi_eagle.shards import ShardSet
from kimi_eagle.training.loop import train
from kimi_eagle.verifier import open_verifier
job = json.loads(Path(sys.argv[1]).read_text())
recipe = Recipe.model_validate(job["recipe"], strict=False)
result = train(recipe, open_verifier(recipe.verifier.path), ShardSet(job["shards"]),
    Path(job["d2t"]), Path(job["t2d"]), Path(job["workdir"]),
    should_stop=lambda: False, on_progress=lambda d: print(d["step"], file=sys.stderr, flush=True))
print("finished", result.steps, file=sys.stderr, flush=True)
"""

WORDS = "river stone copper engine garden letter winter market signal harbor violin castle".split()


@dataclass(frozen=True)
class Corpus:
    """shards: safetensors paths. order: sample ids as they lie there. states: sample id ->
    (ids int32 [T], mask uint8 [T], states bfloat16 [T, 4, H])."""

    shards: list[Path]
    order: list[str]
    states: dict[str, tuple[Any, Any, Any]]
    d2t: Path
    t2d: Path

    def write(self, folder: Path, codec: str = "raw") -> list[Path]:
        """The same samples as shards of their own, to damage or to read in another codec."""
        return write_shards(folder, self.order, self.states, codec)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """These models are tiny and the machine may be shared: threads would wait for each other."""
    import torch

    before = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    if before[1] is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before[1]


@pytest.fixture(scope="session")
def verifier(verifier_dir):
    """The small model, opened."""
    from kimi_eagle.verifier import open_verifier

    return open_verifier(verifier_dir)


@pytest.fixture(scope="session")
def corpus(verifier, tmp_path_factory) -> Corpus:
    """24 conversations, about 1,000 tokens, in two shards."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(verifier.path, dtype=torch.bfloat16).eval()
    tokenizer = verifier.tokenizer()
    last: list[Any] = []
    model.model.norm.register_forward_pre_hook(lambda _m, args: last.append(args[0]))

    states: dict[str, tuple[Any, Any, Any]] = {}
    for i in range(24):
        a, b, c = (WORDS[(i * k + k) % len(WORDS)] for k in (1, 5, 7))
        prompt = f"Tell me about a {a} and a {b}."
        answer = f"A {a} is near the {c}, and number {i} of every {b} is old." + f" {c}" * (i % 5)
        prompt_ids = tokenizer.encode(prompt)
        ids = prompt_ids + tokenizer.encode(answer) + [2]
        with torch.no_grad():
            out = model(torch.tensor([ids]), output_hidden_states=True)
        layers = [out.hidden_states[k][0] for k in LAYERS[:-1]] + [last.pop()[0]]
        mask = np.arange(len(ids)) >= len(prompt_ids)
        states[f"{i:032x}"] = (
            np.array(ids, np.int32),
            mask.astype(np.uint8),
            torch.stack(layers, dim=1).contiguous(),
        )
    folder = tmp_path_factory.mktemp("shards")
    order = list(states)
    shards = write_shards(folder, order, states)
    d2t, t2d = write_mapping(folder, states, verifier.vocab_size)
    return Corpus(shards, order, states, d2t, t2d)


def write_shards(
    folder: Path, order: list[str], states: dict[str, tuple[Any, Any, Any]], codec: str = "raw"
) -> list[Path]:
    """Two shards: the first 10 samples, and the others."""
    from kimi_eagle.shards import ShardWriter

    shards = []
    for number, names in enumerate((order[:10], order[10:])):
        meta = {"verifier_id": "test", "engine": {}}
        size = states[names[0]][2].shape[-1]
        with ShardWriter(folder, f"0000{number}.a1", LAYERS, size, meta, codec=codec) as writer:
            for name in names:
                ids, mask, hidden = states[name]
                writer.add(name, hidden, ids, mask)
        shards.append(writer.path)
    return shards


def write_mapping(
    folder: Path, states: dict[str, tuple[Any, Any, Any]], vocab_size: int
) -> tuple[Path, Path]:
    """d2t.npy and t2d.npy of the DRAFT_VOCAB most frequent tokens."""
    counts = np.bincount(np.concatenate([s[0] for s in states.values()]), minlength=vocab_size)
    kept = np.sort(np.argsort(-counts, kind="stable")[:DRAFT_VOCAB])
    t2d = np.zeros(vocab_size, bool)
    t2d[kept] = True
    np.save(folder / "d2t.npy", kept.astype(np.int64) - np.arange(DRAFT_VOCAB))
    np.save(folder / "t2d.npy", t2d)
    return folder / "d2t.npy", folder / "t2d.npy"


@pytest.fixture(scope="session")
def run(verifier, corpus):
    """Train on the corpus in a folder; progress lines go to the list `progress`.

    shards: others than the corpus's own.
    """
    from kimi_eagle.shards import ShardSet
    from kimi_eagle.training.loop import train

    def call(
        recipe: Any,
        workdir: Path,
        *,
        stop_at: int | None = None,
        progress: Any = None,
        shards: list[Path] = corpus.shards,
    ):
        lines = [] if progress is None else progress
        return train(
            recipe,
            verifier,
            ShardSet(shards),
            corpus.d2t,
            corpus.t2d,
            workdir,
            should_stop=lambda: stop_at is not None and lines[-1]["step"] >= stop_at,
            on_progress=lines.append,
        )

    return call


@pytest.fixture(scope="session")
def recipe_for(verifier):
    """A recipe for this corpus; keyword arguments override `[train]`."""
    from kimi_eagle.recipe import parse

    def make(**train: Any):
        section = {
            "epochs": 2,
            "seq_len": SEQ_LEN,
            "optimizer": "muon",
            "lr": 2e-3,
            "dtype": "float32",
            "device": "cpu",
            **train,
        }
        data = {
            "name": "test",
            "verifier": {"path": str(verifier.path)},
            "sources": [{"path": "unused.jsonl"}],
            "prepare": {"max_length": 256},
            "extract": {"layers": list(LAYERS)},
            "vocab": {"draft_vocab_size": DRAFT_VOCAB},
            "benchmark": {"prompts": "unused.jsonl"},
            "train": section,
        }
        return parse(data, where="test", base=Path("/"))

    return make


@pytest.fixture
def in_a_process(corpus, tmp_path):
    """Train in a process of its own, which says each step on stderr; SIGKILL `wait` seconds after
    it said `kill_at`, or after it said `kill_after` steps."""

    def call(
        recipe: Any,
        workdir: Path,
        *,
        kill_at: int | None = None,
        kill_after: int | None = None,
        wait: float = 0.02,
    ) -> subprocess.CompletedProcess[str]:
        job = {
            "recipe": recipe.model_dump(mode="json"),
            "shards": [str(p) for p in corpus.shards],
            "d2t": str(corpus.d2t),
            "t2d": str(corpus.t2d),
            "workdir": str(workdir),
        }
        (tmp_path / "job.json").write_text(json.dumps(job))
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path / "job.json")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            steps = [x for x in said if x.strip().isdecimal()]
            if steps and (int(steps[-1]) == kill_at or len(steps) == kill_after):
                time.sleep(wait)
                process.send_signal(signal.SIGKILL)
                kill_at = kill_after = None
        out = process.stdout.read()
        return subprocess.CompletedProcess([], process.wait(), out, "".join(said))

    return call


@pytest.fixture(scope="session")
def same_weights():
    """Whether two checkpoints have the same weights, bit for bit."""
    import torch
    from safetensors.torch import load_file

    def call(one: Path, other: Path) -> bool:
        a, b = (load_file(p / "model.safetensors") for p in (one, other))
        return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

    return call
