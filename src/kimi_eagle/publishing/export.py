"""A run's draft, or its token samples, as a folder to hand on: files, card, licence texts.

Everything is a copy, though hard links would cost nothing: who edits a file of an export must not
change the run's. Each file's bytes are compared with its record on the way.

config.json names the verifier by its path on this machine. Where `[card] base_model` tells its name
on the hub, the copy has that instead: `vllm serve DRAFT` then finds it anywhere.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.publishing import dataset_card, folder, model_card, sglang, weights, words
from kimi_eagle.publishing.facts import Facts, draft_record
from kimi_eagle.publishing.model_card import Form
from kimi_eagle.record import Record
from kimi_eagle.training.draftfiles import DraftFiles

EMBEDDING = "embed_tokens.weight"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Plan:
    """What will be written. bytes: to be read, for a progress bar. fill(folder, tell) writes it."""

    kind: str
    bytes: int
    fill: Callable[[Path, weights.Progress], None]
    warnings: list[str]


def write(plan: Plan, out: Path, tell: weights.Progress) -> None:
    """OUT as the plan has it, whole or not at all."""
    folder.write(out, plan.kind, lambda temp: plan.fill(temp, tell))


def draft(facts: Facts, server: str, *, embedding: bool) -> Plan:
    """The draft for a server: vllm or sglang. embedding: carry it along.

    RunError where the run has no current draft, UsageError where the server cannot load it so.
    """
    record = draft_record(facts)
    recorded = {Path(f["name"]).name: f for f in record.data["files"] if "/" in f["name"]}
    if missing := {"config.json", WEIGHTS} - set(recorded):
        raise RunError(f"the draft has no {sorted(missing)[0]}", where=facts.run.draft)
    found = DraftFiles(facts.run.draft)
    own = _own_embedding(facts, found)
    if server == "sglang":
        sglang.refuse(found)
    if own and (server == "sglang" or not embedding):
        raise UsageError(
            "the draft's embedding is not the verifier's",
            where=facts.run.draft,
            expected=f"the verifier's, which {'SGLang' if server == 'sglang' else 'vLLM'} "
            "would put in its place",
            fix="leave out --without-embedding"
            if server == "vllm"
            else "export it --for vllm, with its embedding",
        )
    if not embedding and (why := _not_shared(facts, found, server)):
        raise UsageError(why, where="--without-embedding", fix="leave out --without-embedding")
    form = Form(server, embedding and EMBEDDING in found.tensors, own)
    texts = words.verifier_texts(facts)
    warnings = [*facts.warnings, *_unknown(facts, texts)]
    if server == "vllm" and not facts.card.base_model:
        warnings.append("config.json names the verifier by its path here: set [card] base_model")

    def fill(temp: Path, tell: weights.Progress) -> None:
        source, rewritten = facts.run.draft / WEIGHTS, server == "sglang" or not embedding
        if rewritten:
            weights.check(source, recorded[WEIGHTS].get("xxh3"), tell)
            weights.rewrite(source, temp / WEIGHTS, lambda n: _name(n, server, embedding), tell)
        else:
            weights.copy(source, temp / WEIGHTS, recorded[WEIGHTS].get("xxh3"), tell)
        weights.check(
            facts.run.draft / "config.json", recorded["config.json"].get("xxh3"), lambda _: None
        )
        _write_json(temp / "config.json", _config(facts, found, server))
        for name, path in texts.items():
            shutil.copyfile(path, temp / name)
        card = model_card.text(facts, found, form, list(texts))
        (temp / "README.md").write_text(card, encoding="utf-8")

    size = recorded[WEIGHTS]["bytes"] * (1 if server == "vllm" and embedding else 2)
    return Plan(f"draft for {server}", size, fill, warnings)


def dataset(facts: Facts) -> Plan:
    """The token samples of the run; RunError where prepare is not done or a part is gone."""
    prepared = facts.prepared
    if prepared is None:
        raise RunError(
            "prepare is not done in this run",
            where=facts.run.path,
            fix=f"kimi-eagle status {facts.run.path} says how far it is",
        )
    if fault := prepared.files_whole():
        raise RunError(fault, fix=f"kimi-eagle retry {facts.run.path}, then run it again")
    parts = _parts(prepared)
    texts = words.verifier_texts(facts) if facts.recipe.regenerate.enabled else {}

    def fill(temp: Path, tell: weights.Progress) -> None:
        for name, (path, entry) in parts.items():
            weights.copy(path, temp / name, entry.get("xxh3"), tell)
        for name, path in texts.items():
            shutil.copyfile(path, temp / name)
        card = dataset_card.text(facts, prepared, list(parts), list(texts))
        (temp / "README.md").write_text(card, encoding="utf-8")

    size = sum(entry["bytes"] for _, entry in parts.values())
    return Plan("dataset", size, fill, [*facts.warnings, *_unknown(facts, texts, data=True)])


def _parts(prepared: Record) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Name in the export -> (file, its entry in the record)."""
    found = {}
    for entry in prepared.data["files"]:
        if entry["name"].endswith(".tokens.parquet"):
            path = prepared.stage_dir.files / entry["name"]
            found[entry["name"].split(".", 2)[-1]] = (path, entry)
    return found


def _name(tensor: str, server: str, embedding: bool) -> str | None:
    """The tensor's name in the export; None leaves it out."""
    if tensor == EMBEDDING and not embedding:
        return None
    return sglang.name(tensor) if server == "sglang" else tensor


def _config(facts: Facts, found: DraftFiles, server: str) -> dict[str, Any]:
    if server == "sglang":
        return sglang.config(found)
    config = json.loads(json.dumps(found.config))
    if name := facts.card.base_model:
        config["speculators_config"]["verifier"]["name_or_path"] = name
    return config


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _not_shared(facts: Facts, found: DraftFiles, server: str) -> str:
    """Why the server would take no embedding from the verifier; "" where it does."""
    if found.target_hidden_size != found.shape()["hidden_size"]:
        return "draft and verifier have different hidden sizes: they cannot share an embedding"
    if server == "vllm" and facts.recipe.engine_for("benchmark").pp > 1:
        return "the recipe serves with pp > 1, where vLLM 0.31.0 takes no embedding of the verifier"
    return ""


def _own_embedding(facts: Facts, found: DraftFiles) -> bool:
    """Whether the draft carries another embedding than the verifier's. Training here keeps it
    frozen, so only a draft that training started from can bring one (training/start.py)."""
    if facts.recipe.train.from_ is None or EMBEDDING not in found.tensors:
        return False
    import torch
    from safetensors import safe_open

    from kimi_eagle.verifier import Verifier

    theirs = Verifier(Path(facts.recipe.verifier.path)).embedding()
    with safe_open(facts.run.draft / WEIGHTS, framework="pt") as f:
        own = f.get_tensor(EMBEDDING)
    return not torch.equal(own.bfloat16(), theirs.bfloat16())


def _unknown(facts: Facts, texts: dict[str, Path], *, data: bool = False) -> list[str]:
    """What the card cannot say, and which key would tell it."""
    said = []
    if not data and not facts.licence.known:
        said.append("licence unknown: say it in [card] license")
    if not data and not facts.card.base_model:
        said.append("base model unknown: say it in [card] base_model")
    if not texts and (not data or facts.recipe.regenerate.enabled):
        said.append("no licence text in the verifier's directory")
    if silent := [s.name for s in facts.sources if not s.licence]:
        said.append(f"licence unknown of {', '.join(silent)}: say it in its [[sources]]")
    return said
