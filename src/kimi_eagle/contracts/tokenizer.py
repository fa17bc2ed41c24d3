"""The tokenizer: there, the same one for everybody, with ids that the matrices have rows for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import NotConcerned, Note, Problem, rule
from kimi_eagle.modelfiles import LFS_MARK, read_json
from kimi_eagle.verifier import VOCABULARY_FILES, Verifier

SETTINGS = "tokenizer_config.json"
USED = ("regenerate", "prepare", "benchmark")
"""Stages that open the tokenizer; vocab takes its special tokens."""
PROCESSOR = ("merge_kernel_size", "temporal_merge_kernel_size", "image_mean", "image_std")
TEXTS = (
    "The quick brown fox; it's 3.14159 and 1234567 don'ts!",
    "def f(x):\n    return {'a': [x, None]}  # \t tabs\r\n\r\n",
    "  leading, double  and trailing spaces  ",
    "你好，世界。今天天气不错，我们去公园吧！第3章",
    "日本語とカタカナ、한국어, Ελληνικά, русский, עברית",
    "cafe\u0301 and café, ﬁligree, Ⅷ, x²",
    "👩‍👩‍👧 🏳️‍🌈 ✅",
    "https://example.org/a?b=c&d=%20 <tag attr='v'/> \\frac{1}{2}",
)
"""What tokenizers that are not the same one split differently: Han beside punctuation, digits,
decomposed letters, joined emoji, blanks and line ends."""


@rule(
    "tokenizer-present",
    what="The verifier's directory holds its tokenizer.",
    why="Weights are often copied without it; transformers 5.17.0 then looks on the hub for one, "
    "or builds an empty one.",
    how=f"One of {', '.join(VOCABULARY_FILES)}, and no git-LFS pointer in its place.",
    fix="copy the tokenizer's files beside the weights",
    stages=(*USED, "vocab"),
    after=("verifier-settings",),
)
def present(facts: Facts) -> Iterator[Problem]:
    folder = facts.verifier.path
    found = [folder / name for name in VOCABULARY_FILES if (folder / name).is_file()]
    if not found:
        yield Problem(
            "model directory without tokenizer",
            where=str(folder),
            expected=f"one of {', '.join(VOCABULARY_FILES)}",
        )
    for file in found:
        with open(file, "rb") as f:
            if f.read(len(LFS_MARK)) == LFS_MARK:
                yield Problem(
                    "the tokenizer's vocabulary is a git-LFS pointer",
                    where=str(file),
                    fix="git lfs pull in the checkpoint's checkout",
                )


@rule(
    "tokenizer-own-code",
    what="A tokenizer that is Python code in the directory is run, by trust_remote_code.",
    why="transformers 5.17.0 knows the model type kimi_k25 (TOKENIZER_MAPPING_NAMES: "
    "TokenizersBackend). Without trust_remote_code it raises nothing: it converts tiktoken.model "
    "itself (convert_slow_tokenizer.py, TikTokenConverter) with GPT-4's pattern to split words, "
    "while Kimi's code splits Han apart. So prepare would make other ids than the engine: where "
    "vLLM 0.31.0 is imported, its own class of the configuration makes the same call an error.",
    how="auto_map.AutoTokenizer of tokenizer_config.json, where no tokenizer.json lies beside it.",
    fix="read the Python files in the directory, then set [verifier] trust_remote_code = true",
    stages=(*USED, "vocab"),
    after=("tokenizer-present",),
)
def own_code(facts: Facts) -> Iterator[Problem | Note]:
    verifier = facts.verifier
    code = own_class(verifier)
    if not code:
        if verifier.trust_remote_code and not any(verifier.path.glob("*.py")):
            yield Note("trust_remote_code is set, but no Python file is in the directory")
        elif not verifier.trust_remote_code:
            raise NotConcerned("the tokenizer is no Python code")
        return
    if not verifier.trust_remote_code and not (verifier.path / "tokenizer.json").is_file():
        yield Problem(
            f"the tokenizer is Python code ({code}) and trust_remote_code is false",
            where="verifier.trust_remote_code",
            expected="true, for no tokenizer.json says the same",
        )


def own_class(verifier: Verifier) -> str:
    """The class that tokenizer_config.json names in the directory's own code, else ""."""
    entries = verifier.settings(SETTINGS).get("auto_map")
    found = entries.get("AutoTokenizer") if isinstance(entries, dict) else entries
    if isinstance(found, list):  # [slow, fast]; transformers prefers the second
        found = next((f for f in reversed(found) if f), None)
    return found if isinstance(found, str) else ""


@rule(
    "tokenizer-code-present",
    what="The files of the tokenizer's own code are there.",
    why="transformers 5.17.0 copies the module and what it imports from beside it "
    "(dynamic_module_utils.py, get_relative_imports); a file left behind fails in the first job, "
    "not where the copy was made.",
    how="The module that auto_map names and its relative imports, followed; only where "
    "trust_remote_code lets them run.",
    fix="copy the checkpoint's Python files beside the weights",
    stages=(*USED, "vocab"),
    after=("tokenizer-own-code", "verifier-no-hub-code"),
)
def code_present(facts: Facts) -> Iterator[Problem]:
    verifier, seen = facts.verifier, set()
    if not (code := own_class(verifier)) or not verifier.trust_remote_code:
        raise NotConcerned("no tokenizer code is run")
    modules = [code.partition(".")[0]]
    while modules:
        name = modules.pop()
        seen.add(name)
        file = verifier.path / f"{name}.py"
        if not file.is_file():
            yield Problem(
                f"the tokenizer's code lacks {file.name}", str(verifier.path), f"{name}.py"
            )
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        modules += set(re.findall(r"^\s*(?:from|import)\s+\.(\w+)", text, re.M)) - seen


def code_text(verifier: Verifier) -> str:
    """The text of the tokenizer's own module, where it may run; else ""."""
    code = own_class(verifier) if verifier.trust_remote_code else ""
    file = verifier.path / f"{code.partition('.')[0]}.py"
    return file.read_text(encoding="utf-8", errors="replace") if code and file.is_file() else ""


@rule(
    "tokenizer-image-processor",
    what="Kimi's image processor has its settings, though no image is sent.",
    why="vLLM 0.31.0 builds the processor of a model with a vision part whenever it starts "
    "(models/kimi_k25.py, KimiK25ProcessingInfo) and takes media_proc_cfg apart: a directory of "
    "weights and tokenizer alone ends in KeyError 'merge_kernel_size', after the GPUs are held.",
    how="preprocessor_config.json with the four keys that KimiK25FusedVisionProcessor reads at "
    "once; concerns the model type kimi_k25.",
    fix="copy preprocessor_config.json from the published checkpoint",
    stages=("regenerate", "extract", "benchmark"),
    after=("verifier-settings",),
)
def image_processor(facts: Facts) -> Iterator[Problem]:
    verifier = facts.verifier
    if verifier.config.get("model_type") != "kimi_k25":
        raise NotConcerned("not of the type kimi_k25")
    told = verifier.settings("preprocessor_config.json").get("media_proc_cfg") or {}
    if missing := [key for key in PROCESSOR if key not in told]:
        yield Problem(
            f"preprocessor_config.json has no media_proc_cfg.{missing[0]}",
            where=str(verifier.path),
            expected=f"media_proc_cfg with {', '.join(PROCESSOR)}",
        )


# -- ids -----------------------------------------------------------------------------------------


@rule(
    "tokenizer-ids-in-range",
    what="Every id of the tokenizer has a row in embedding and lm_head.",
    why="A token added without resizing the model gives an id past the last row: on a GPU a "
    "device-side assert in the embedding (vLLM 0.31.0), without a word of which sample.",
    how="Ids in the tokenizer's files (vocabulary, added tokens; tiktoken.model by its lines) "
    "against vocab_size.",
    fix="use the tokenizer that belongs to these weights",
    stages=(*USED, "vocab"),
    after=("tokenizer-present",),
)
def ids_in_range(facts: Facts) -> Iterator[Problem]:
    verifier = facts.verifier
    ids = {**_vocabulary(verifier), **added_tokens(verifier)}
    if ids and (last := max(ids.values())) >= verifier.vocab_size:
        token = next(t for t, i in ids.items() if i == last)
        yield Problem(
            f"the tokenizer's {token!r} has id {last}",
            where=str(verifier.path),
            expected=f"ids below vocab_size {verifier.vocab_size}",
        )


def _vocabulary(verifier: Verifier) -> dict[str, int]:
    """Token -> id of the plain vocabulary; of tiktoken.model the last alone."""
    if (verifier.path / "tokenizer.json").is_file():
        vocabulary = (verifier.settings("tokenizer.json").get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, dict):
            return vocabulary
        return {entry[0]: at for at, entry in enumerate(vocabulary)}  # Unigram: [token, score]
    if (ranks := verifier.path / "tiktoken.model").is_file():
        return {"last line of tiktoken.model": ranks.read_bytes().rstrip().count(b"\n")}
    if (verifier.path / "vocab.json").is_file():
        return read_json(verifier.path / "vocab.json")
    return {}


def added_tokens(verifier: Verifier) -> dict[str, int]:
    """Added token -> id, as tokenizer.json and tokenizer_config.json say."""
    told = verifier.settings(SETTINGS).get("added_tokens_decoder") or {}
    found = {entry.get("content", ""): int(i) for i, entry in told.items()}
    if (verifier.path / "tokenizer.json").is_file():
        entries = verifier.settings("tokenizer.json").get("added_tokens") or []
        found |= {entry["content"]: entry["id"] for entry in entries}
    return found


@rule(
    "tokenizer-eos",
    what="config.json, generation_config.json and tokenizer agree on what ends an answer.",
    why="vLLM 0.31.0 stops at the tokenizer's eos and at those of generation_config.json "
    "(sampling_params.py, update_from_generation_config), prepare ends the loss mask at any that "
    "the model names. A tokenizer whose eos the model never heard of runs every answer to "
    "max_tokens.",
    how="eos_token_id of both files (either may be a list), in range; the tokenizer's eos_token "
    "among them. Kimi-K2.5 names two on purpose: [EOS] in config.json, <|im_end|> in "
    "generation_config.json.",
    fix="let eos_token_id in generation_config.json name the end-of-turn token",
    stages=USED,
    after=("tokenizer-ids-in-range",),
)
def eos(facts: Facts) -> Iterator[Problem | Note]:
    verifier = facts.verifier
    ids, where = verifier.eos_ids, str(verifier.path)
    if not ids:
        yield Problem(
            "no eos_token_id in config.json or generation_config.json", where, "the id of a token"
        )
        return
    if bad := [i for i in ids if not 0 <= i < verifier.vocab_size]:
        expected = f"ids from 0 to {verifier.vocab_size - 1}"
        yield Problem(f"eos_token_id {bad[0]} is no token", where, expected)
    token = eos_token(verifier)
    own = added_tokens(verifier).get(token) if token else None
    if own is not None and own not in ids:
        yield Problem(
            f"the tokenizer's eos_token {token} ({own}) is not among the model's {list(ids)}",
            where=str(verifier.path / SETTINGS),
            expected="it in eos_token_id of config.json or generation_config.json",
        )
    told = verifier.settings("generation_config.json").get("eos_token_id")
    generation = set(told if isinstance(told, list) else [told])
    if told is not None and not generation & set(_config_eos(verifier)):
        yield Note(
            f"answers end at {sorted(generation)} by generation_config.json and at "
            f"{_config_eos(verifier)} by config.json: both are taken"
        )


def eos_token(verifier: Verifier) -> str:
    """Text of the tokenizer's eos as its settings name it, else ""."""
    token = verifier.settings(SETTINGS).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


def _config_eos(verifier: Verifier) -> list[int]:
    for part in (verifier.config, verifier.text_config):
        if (value := part.get("eos_token_id")) is not None:
            return value if isinstance(value, list) else [value]
    return []


# -- as the libraries open it --------------------------------------------------------------------


@rule(
    "tokenizer-opens",
    what="transformers opens the tokenizer from local files.",
    why="A tokenizer for another version of transformers, or whose own code wants a package that "
    "the image lacks (tiktoken), stops every stage.",
    how="AutoTokenizer, local files only, HF_HUB_OFFLINE=1.",
    fix="use the versions of the image, and the checkpoint's own tokenizer files",
    needs=("transformers",),
    stages=(*USED, "vocab"),
    after=("tokenizer-code-present", "tokenizer-own-code", "verifier-no-hub-code"),
)
def opens(facts: Facts) -> Iterator[Problem]:
    facts.verifier.tokenizer()
    yield from ()


@rule(
    "tokenizer-parity",
    what="The directory's own tokenizer, transformers and vLLM give the same ids.",
    why="transformers 5 builds a tokenizer anew from its class where it knows one, and converts "
    "tiktoken files itself; vLLM 0.31.0 opens it through a registry of its own "
    "(tokenizers/registry.py). A difference shows in nothing but a worse acceptance: states are "
    "those of other tokens.",
    how=f"{len(TEXTS)} fixed texts (code, Han, digits, decomposed letters, emoji, blanks) through "
    "tokenizer.json (tokenizers) or the directory's Python class, AutoTokenizer and vLLM's "
    "get_tokenizer.",
    fix="use the checkpoint's own tokenizer files and settings, unchanged",
    needs=("transformers", "vllm"),
    stages=("regenerate", "extract", "benchmark"),
    after=("tokenizer-opens",),
)
def parity(facts: Facts) -> Iterator[Problem]:
    (first, tokenizer), *others = _openings(facts.verifier)
    expected = [_ids(tokenizer, text) for text in TEXTS]
    for name, other in others:
        for text, ids in zip(TEXTS, expected, strict=True):
            if (found := _ids(other, text)) != ids:
                yield Problem(
                    f"{text!r} is {_short(ids)} to {first} and {_short(found)} to {name}",
                    where=str(facts.verifier.path),
                    expected="the same ids from all",
                )
                break


def _openings(verifier: Verifier) -> Iterator[tuple[str, Any]]:
    """(who, tokenizer) of each way in which the directory's tokenizer is opened."""
    path, trusted = str(verifier.path), verifier.trust_remote_code
    if (verifier.path / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        yield "tokenizer.json", Tokenizer.from_file(str(verifier.path / "tokenizer.json"))
    if trusted and (code := own_class(verifier)):
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        own = get_class_from_dynamic_module(code, path, local_files_only=True)
        yield code, own.from_pretrained(path, local_files_only=True)
    yield "transformers", verifier.tokenizer()
    from vllm.tokenizers import get_tokenizer

    yield "vLLM", get_tokenizer(path, trust_remote_code=trusted)


def _ids(tokenizer: Any, text: str) -> list[int]:
    if hasattr(tokenizer, "from_file"):  # tokenizers' own class
        return tokenizer.encode(text, add_special_tokens=False).ids
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _short(ids: list[int]) -> str:
    return f"{ids[:8]}..." if len(ids) > 8 else str(ids)
