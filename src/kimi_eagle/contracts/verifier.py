"""The verifier's directory: complete, local, with the two matrices that the draft takes over.

Everything here is read from names, sizes and headers (modelfiles.py), never from weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import NotConcerned, Note, Problem, rule
from kimi_eagle.errors import UsageError
from kimi_eagle.modelfiles import Cut, Missing, Pointer
from kimi_eagle.verifier import INDEX, SINGLE, TABLES, Verifier

SETTINGS = (
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
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
    what="config.json says hidden size, number of layers, vocabulary size and positions.",
    why="Every other rule, the shape of the draft and of the states stand on these four; an empty "
    "or cut config.json is what an interrupted download leaves.",
    how="Parsed; of a model with several parts the values of text_config count.",
    fix="fetch config.json again",
    stages=ALL,
    after=("verifier-directory",),
)
def config(facts: Facts) -> Iterator[Problem]:
    verifier = facts.verifier
    verifier.hidden_size, verifier.num_layers, verifier.vocab_size  # noqa: B018  they raise
    verifier.context_length  # noqa: B018
    yield from ()


@rule(
    "verifier-settings",
    what="The settings beside config.json, where there are any, can be read.",
    why="Tokenizer, template, stop tokens and processors stand on them; a cut one or a git-LFS "
    "pointer in its place is what an interrupted copy leaves, and an error of each stage.",
    how=f"{', '.join(SETTINGS)}: UTF-8 without a byte order mark (transformers 5.17.0 refuses "
    "one), a JSON object.",
    fix="fetch that file again",
    stages=ALL,
    after=("verifier-config",),
)
def settings(facts: Facts) -> Iterator[Problem]:
    for name in SETTINGS:
        try:
            facts.verifier.settings(name)
        except UsageError as e:
            yield Problem(e.what, e.where, e.expected, e.fix)


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
    after=("verifier-settings",),
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
    yield from _others(verifier)


def _others(verifier: Verifier) -> Iterator[Problem | Note]:
    """What vLLM 0.31.0 makes of files that no index names (default_loader.py, _prepare_weights)."""
    others = {p.name for p in verifier.path.glob("*.safetensors")} - set(verifier.headers)
    if mistral := {name for name in others if name.startswith("consolidated")}:
        yield Note(f"vLLM loads {min(mistral)} in the place of {min(verifier.headers)}")
    elif others and (verifier.path / INDEX).is_file():
        yield Note(f"{len(others)} safetensors files are not in the index: vLLM leaves them out")
    elif others:
        yield Problem(
            f"{min(others)} beside {SINGLE} and no index: vLLM loads both, one over the other",
            where=str(verifier.path),
            expected=f"{SINGLE} alone",
            fix="move it elsewhere",
        )


@rule(
    "verifier-layers",
    what="Each of the verifier's layers has weights.",
    why="A layer that neither index nor files name (a filtered copy, a config.json of another "
    "size) stays as it was initialised: vLLM 0.31.0 counts what it loaded for unquantised models "
    "alone (default_loader.py, load_weights). Of INT4 weights no error is seen, and answers and "
    "states are another model's.",
    how="Names beside the embedding's, PREFIX.layers.N. or PREFIX.h.N., for each N below "
    "num_hidden_layers; layers above (MTP) are told. Other ways to name layers are passed over.",
    fix="fetch index and weights again, or the config.json that belongs to them",
    stages=LOADED,
    after=("verifier-config", "verifier-index-current"),
)
def layers(facts: Facts) -> Iterator[Problem | Note]:
    verifier = facts.verifier
    found, count = _stored_layers(verifier), verifier.num_layers
    if missing := sorted(set(range(count)) - found):
        more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
        yield Problem(
            f"no tensor of layer {missing[0]}{more}",
            where=str(verifier.path),
            expected=f"layers 0 to {count - 1}, as num_hidden_layers {count} says",
        )
    more = len({n for n in found if n >= count})
    if more > (verifier.text_config.get("num_nextn_predict_layers") or 0):
        yield Note(f"{more} layers above num_hidden_layers {count} are stored")


def _stored_layers(verifier: Verifier) -> set[int]:
    """Numbers of the language model's layers of which a tensor is stored."""
    try:
        table = verifier.stored_table("embedding")
    except UsageError:
        raise NotConcerned("the embedding is not found, which says where layers are") from None
    stem = next((table[: -len(s)] for s in TABLES["embedding"] if table.endswith(s)), None)
    for word in ("layers.", "h.") if stem is not None else ():
        at = stem + word
        skip = len(at)
        names = {n[skip : n.find(".", skip)] for n in verifier.weight_map if n.startswith(at)}
        if found := {int(n) for n in names if n.isdecimal()}:
            return found
    raise NotConcerned("its layers are named in another way")
