"""Embedding, lm_head and final norm: what the draft takes over from the verifier's weights.

Read from names and headers (modelfiles.py), never from weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import Note, Problem, rule
from kimi_eagle.verifier import TABLES, Verifier


@rule(
    "verifier-tables-found",
    what="Embedding and lm_head are found, under whatever prefix.",
    why="Kimi-K2.5 nests them (language_model.model.embed_tokens.weight); speculators 0.3.0 wanted "
    "exact names and failed, 0.9.0 (utils/loading.py) tries exact name, suffix, alias. Training "
    "would stop at its first step, after the whole extraction.",
    how="Suffixes embed_tokens.weight, wte.weight, word_embeddings.weight and lm_head.weight in "
    "the index; no lm_head where config.json ties it to the embedding.",
    fix="use a checkpoint in Hugging Face's names",
    stages=("extract", "train"),
    after=("verifier-config", "verifier-index-current"),
)
def tables_found(facts: Facts) -> Iterator[Problem]:
    for what in TABLES:
        facts.verifier.stored_table(what)
    yield from ()


@rule(
    "verifier-tables-unquantised",
    what="Embedding and lm_head are stored in floating point.",
    why="The draft takes them over as they are, and the loss is computed with lm_head: speculators "
    "0.9.0 copies the tensor named and knows no scales, so packed values would be taken for "
    "weights or not be found.",
    how="dtype in the header; a compressed-tensors quantization_config that targets one of them "
    "without ignoring it is a fault, too: vLLM 0.31.0 and transformers would look for packed "
    "weights that are not there.",
    fix="use a checkpoint whose quantisation leaves embedding and lm_head alone",
    stages=("extract", "train"),
    after=("verifier-tables-found",),
)
def tables_unquantised(facts: Facts) -> Iterator[Problem]:
    verifier = facts.verifier
    for what in TABLES:
        name = verifier.stored_table(what)
        verifier.check_float(what, name)
        if targeted := _targeted(verifier, what, name.removesuffix(".weight")):
            yield Problem(
                f"quantization_config targets {what} ({targeted}), which is stored unquantised",
                where=str(verifier.path / "config.json"),
                expected="it in quantization_config.ignore",
            )


def _targeted(verifier: Verifier, what: str, module: str) -> str:
    """The target of a compressed-tensors configuration that covers a module, else ""."""
    for part in (verifier.text_config, verifier.config):
        section = part.get("quantization_config")
        if not isinstance(section, dict) or section.get("quant_method") != "compressed-tensors":
            continue
        kinds = {"lm_head": ("Linear",), "embedding": ("Embedding",)}[what]
        if any(_matches(entry, module, kinds) for entry in section.get("ignore") or ()):
            return ""
        groups = section.get("config_groups") or {}
        for group in groups.values():
            for target in group.get("targets") or ():
                if _matches(target, module, kinds):
                    return target
    return ""


def _matches(entry: Any, module: str, kinds: tuple[str, ...]) -> bool:
    """compressed-tensors' rule: a class name, a module's name (here by any prefix), or re:PATTERN
    matched from the start of the name."""
    if not isinstance(entry, str):
        return False
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    return entry in kinds or module == entry or module.endswith(f".{entry}")


@rule(
    "verifier-tables-shape",
    what="Embedding and lm_head are [vocab_size, hidden_size].",
    why="A checkpoint with added tokens and an old config.json (or one padded for tensor parallel) "
    "loads in no two libraries alike; ids above the shorter one are out of range on the GPU, "
    "which shows as a device-side assert without a name.",
    how="Shapes in the headers against config.json.",
    fix="let vocab_size and hidden_size in config.json say what the matrices are",
    stages=("extract", "train"),
    after=("verifier-tables-unquantised",),
)
def tables_shape(facts: Facts) -> Iterator[Problem]:
    for what in TABLES:
        facts.verifier.check_shape(what, facts.verifier.stored_table(what))
    yield from ()


@rule(
    "verifier-tied",
    what="Where no lm_head is stored, the configuration says once that it is the embedding.",
    why="text_config and the outer config.json may disagree: transformers 5.17.0 ties by one and "
    "vLLM 0.31.0 by the other, and an untied lm_head that no file holds stays random.",
    how="tie_word_embeddings of both, where no lm_head is stored. One that is stored although tied "
    "is told.",
    fix="set tie_word_embeddings = true in both",
    stages=("extract", "train"),
    after=("verifier-tables-found",),
)
def tied(facts: Facts) -> Iterator[Problem | Note]:
    verifier = facts.verifier
    stored = verifier.stored_table("lm_head") != verifier.stored_table("embedding")
    places = (verifier.text_config, verifier.config)
    said = {bool(p["tie_word_embeddings"]) for p in places if "tie_word_embeddings" in p}
    if stored and verifier.tied:
        yield Note("lm_head is stored although tied to the embedding: the stored one is used")
    if not stored and len(said) > 1:
        yield Problem(
            "tie_word_embeddings differs between config.json and its text_config",
            where=str(verifier.path / "config.json"),
            expected="one answer, for no lm_head is stored",
        )


@rule(
    "verifier-norm",
    what="The final norm is found, [hidden_size].",
    why="States after the last layer are kept before this norm (vLLM 0.31.0, "
    "extract_hidden_states: id = number of layers); the probe and the loss apply it. speculators "
    "0.3.0 left it out: the target agreed with the model's own argmax at 12.5% of positions.",
    how="Suffix model.norm.weight (or transformer.ln_f.weight) in the index, shape in its header.",
    fix="use a checkpoint in Hugging Face's names",
    stages=("extract", "train"),
    after=("verifier-config", "verifier-index-current"),
)
def norm(facts: Facts) -> Iterator[Problem]:
    facts.verifier.norm_name()
    yield from ()


@rule(
    "verifier-tables-own",
    what="Training takes embedding, lm_head and norm of the language model, of no other part.",
    why="speculators 0.9.0 takes the shortest of the names that end alike (utils/loading.py, "
    "_resolve_key): a talker's or an MTP layer's lm_head.weight, a vision tower's "
    "model.norm.weight of the same shape. The draft learns another distribution, and nothing "
    "fails.",
    how="Its choice in the index against the name that is not under vision, audio, talker, mtp and "
    "the like.",
    fix="use a checkpoint of the language model alone, or rename the other part's tensor in files "
    "and index",
    stages=("extract", "train"),
    after=("verifier-tables-found", "verifier-norm"),
)
def tables_own(facts: Facts) -> Iterator[Problem]:
    verifier = facts.verifier
    own = {"embed_tokens.weight": verifier.stored_table("embedding")}
    own |= {"lm_head.weight": verifier.stored_table("lm_head")}
    own |= {"model.norm.weight": verifier.norm_name()}
    alike = [n for n in verifier.weight_map if n.endswith(tuple(own))]
    for asked, name in own.items():
        found = [n for n in alike if n.endswith(asked)]
        theirs = asked if asked in found else min(found, key=len, default=name)
        if theirs != name:
            yield Problem(
                f"speculators takes {theirs} for {asked}", where=str(verifier.path), expected=name
            )
