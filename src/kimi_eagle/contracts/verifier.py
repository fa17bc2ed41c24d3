"""The verifier's directory: complete, local, with the two matrices that the draft takes over.

Everything here is read from names, sizes and headers (modelfiles.py), never from weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import NotConcerned, Note, Problem, rule
from kimi_eagle.errors import UsageError
from kimi_eagle.modelfiles import Cut, Missing, Pointer
from kimi_eagle.verifier import INDEX, TABLES, Verifier

ALL = ("regenerate", "prepare", "extract", "vocab", "train", "benchmark")
LOADED = ("regenerate", "extract", "train", "benchmark")
"""Stages that read weights: train takes embedding and lm_head."""
FETCH = "hf download NAME --local-dir DIRECTORY goes on where it stopped"


@rule(
    "verifier-directory",
    what="[verifier] path is a local directory with a config.json.",
    why="vLLM 0.31.0 and transformers 5.17.0 take a path that does not exist for a hub name. On a "
    "compute node without network that is an error after the job has waited for its GPUs; with "
    "one, 600 GB are fetched beside the copy that was meant.",
    how="The path of the recipe, looked at as it is. A name such as moonshotai/Kimi-K2.5 counts "
    "from the recipe's folder and is never looked up elsewhere.",
    fix=f"set [verifier] path to a local checkpoint ({FETCH})",
    stages=ALL,
)
def directory(facts: Facts) -> Iterator[Problem]:
    folder = facts.verifier.path
    if not folder.exists():
        yield Problem("no such model directory", str(folder), "a directory, never a hub name")
    elif not folder.is_dir():
        yield Problem("not a directory", str(folder), "a checkpoint directory")
    elif not (folder / "config.json").is_file():
        yield Problem("model directory without config.json", str(folder), "a checkpoint")


@rule(
    "verifier-config",
    what="config.json says hidden size, number of layers and vocabulary size.",
    why="Every other rule, the shape of the draft and of the states stand on these three; an empty "
    "or cut config.json is what an interrupted download leaves.",
    how="Parsed; of a model with several parts the values of text_config count.",
    fix="fetch config.json again",
    stages=ALL,
    after=("verifier-directory",),
)
def config(facts: Facts) -> Iterator[Problem]:
    verifier = facts.verifier
    verifier.hidden_size, verifier.num_layers, verifier.vocab_size  # noqa: B018  they raise
    yield from ()


@rule(
    "verifier-not-a-draft",
    what="The verifier's directory holds a target model, not a draft.",
    why="vLLM 0.31.0 (transformers_utils/config.py, maybe_override_with_speculators) reads "
    "speculators_config in a model's config.json and loads the verifier named there instead: "
    "states and answers would come from another model than the recipe says.",
    how="No speculators_config in config.json.",
    fix="set [verifier] path to the target model, not to a draft made for it",
    stages=("regenerate", "extract", "benchmark"),
    after=("verifier-config",),
)
def not_a_draft(facts: Facts) -> Iterator[Problem]:
    if "speculators_config" in facts.verifier.config:
        yield Problem(
            "config.json is a draft's: it holds speculators_config",
            where=str(facts.verifier.path),
            expected="a target model",
        )


@rule(
    "verifier-no-hub-code",
    what="Code that the directory asks for lies in the directory.",
    why='An auto_map entry "owner/name--module.Class" makes transformers 5.17.0 '
    "(dynamic_module_utils.py, get_class_from_dynamic_module) fetch and run that repository's "
    "code: an error on a node without network, code that nobody looked at on one with it.",
    how="auto_map of config.json, its parts and the tokenizer's settings; concerns "
    "trust_remote_code = true alone, for nothing is run without it.",
    fix='copy the module into the directory and drop "owner/name--" from auto_map',
    stages=ALL,
    after=("verifier-config",),
)
def no_hub_code(facts: Facts) -> Iterator[Problem]:
    verifier = facts.verifier
    if not verifier.trust_remote_code:
        raise NotConcerned("no Python code of the directory is run (trust_remote_code = false)")
    for place, entry in _auto_maps(verifier):
        if "--" in entry:
            yield Problem(
                f"auto_map names code of another repository: {entry}",
                where=str(verifier.path / place),
                expected="module.Class, with module.py in the directory",
            )


def _auto_maps(verifier: Verifier) -> Iterator[tuple[str, str]]:
    """(file, entry) of every auto_map in the directory's settings."""
    parts = [("config.json", c) for c in (verifier.config, *verifier.config.values())]
    names = ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
    parts += [(name, verifier.settings(name)) for name in names]
    for name, part in parts:
        entries = part.get("auto_map") if isinstance(part, dict) else None
        for entry in entries.values() if isinstance(entries, dict) else ():
            for text in entry if isinstance(entry, list) else [entry]:
                if isinstance(text, str):
                    yield name, text


# -- weight files --------------------------------------------------------------------------------


@rule(
    "verifier-index",
    what="The weights are safetensors files, and their index can be read.",
    why="vLLM 0.31.0 finds shards by the index (weight_utils.py, "
    "filter_duplicate_safetensors_files), speculators 0.9.0 embedding and lm_head; .bin and .gguf "
    "files are read by neither here.",
    how=f"{INDEX} parsed once, or model.safetensors alone; file names must be plain names.",
    fix=f"fetch the index again, or point [verifier] path at a safetensors checkpoint ({FETCH})",
    stages=LOADED,
    after=("verifier-directory",),
)
def index(facts: Facts) -> Iterator[Problem]:
    verifier = facts.verifier
    odd = [f for f in set(verifier.weight_map.values()) if not isinstance(f, str) or "/" in f]
    if odd:
        yield Problem(
            f"index names {odd[0]!r}",
            where=str(verifier.path / INDEX),
            expected="names of files in this directory",
        )


def _files(facts: Facts, kind: type[UsageError]) -> Iterator[Problem]:
    """One problem for all weight files that have the same fault."""
    opened = facts.verifier.opened
    if found := [e for e in opened.values() if isinstance(e, kind)]:
        first, more = found[0], f" (of {len(opened)} files {len(found)})" if found[1:] else ""
        yield Problem(f"{first.what}{more}", first.where, first.expected, first.fix)


@rule(
    "verifier-weights-present",
    what="Every weight file that the index names is there.",
    why="vLLM 0.31.0 raises FileNotFoundError only when the engine starts, on nodes that are paid "
    "for by then; a dangling link is what a moved or cleaned hub cache leaves.",
    how="Each file of the index, links followed.",
    fix=FETCH,
    stages=LOADED,
    after=("verifier-index",),
)
def weights_present(facts: Facts) -> Iterator[Problem]:
    yield from _files(facts, Missing)


@rule(
    "verifier-weights-fetched",
    what="The weight files are weights, not git-LFS pointers.",
    why="git clone without git-lfs leaves 130 bytes of text in each file's place: same names, same "
    "number of files. safetensors raises HeaderTooLarge in each of the engine's processes.",
    how="The first bytes of each file.",
    fix="git lfs pull in the checkpoint's checkout",
    stages=LOADED,
    after=("verifier-index",),
)
def weights_fetched(facts: Facts) -> Iterator[Problem]:
    yield from _files(facts, Pointer)


@rule(
    "verifier-weights-whole",
    what="Each weight file is as long as its header says.",
    why="A copy that was cut off (full disk, time limit) opens all the same; vLLM 0.31.0 fails or "
    "dies of SIGBUS at that shard, for 595 GB ten minutes into the load.",
    how="Header and size of each file; no weight is read. Whether bytes changed in place: "
    "`kimi-eagle verifier hash`.",
    fix="copy that file again",
    stages=LOADED,
    after=("verifier-index",),
)
def weights_whole(facts: Facts) -> Iterator[Problem]:
    yield from _files(facts, Cut)


@rule(
    "verifier-index-current",
    what="Index and weight files name the same tensors.",
    why="speculators 0.9.0 looks embedding and lm_head up in the index, vLLM 0.31.0 takes whatever "
    "lies in the files: under an index of another save the two read different models, or a layer "
    "is left as it was initialised.",
    how="Names of every header against the index, both ways; total_size and files that the index "
    "does not name are told, for tools count them differently.",
    fix="fetch the index that belongs to these files again",
    stages=LOADED,
    after=("verifier-weights-present", "verifier-weights-fetched", "verifier-weights-whole"),
)
def index_current(facts: Facts) -> Iterator[Problem | Note]:
    verifier = facts.verifier
    names, headers = verifier.weight_map, verifier.headers
    lost = [name for name, file in names.items() if name not in headers[file]]
    if lost:
        more = f" (and {len(lost) - 1} more)" if lost[1:] else ""
        yield Problem(
            f"index names {lost[0]}, the file does not hold it{more}",
            where=str(verifier.path / names[lost[0]]),
        )
    elif sum(len(h) - ("__metadata__" in h) for h in headers.values()) > len(names):
        pairs = ((f, n) for f, h in headers.items() for n in h if n != "__metadata__")
        file, name = next((f, n) for f, n in pairs if names.get(n) != f)
        yield Problem(
            f"{file} holds {name}, the index does not name it there",
            where=str(verifier.path / file),
        )
    told = (verifier.settings(INDEX).get("metadata") or {}).get("total_size")
    size = sum(verifier.data_bytes.values())
    if isinstance(told, int) and told != size:
        yield Note(f"the index says {told:,} bytes, its files hold {size:,}")
    if others := {p.name for p in verifier.path.glob("*.safetensors")} - set(verifier.headers):
        yield Note(f"{len(others)} safetensors files are not in the index: vLLM leaves them out")


# -- embedding, lm_head and norm -----------------------------------------------------------------


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
