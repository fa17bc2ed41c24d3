"""A local checkpoint directory: configuration, tokenizer and single tensors, nothing else loaded.

Reads config.json, generation_config.json, the tokenizer's files, the weight index and the headers
of the safetensors files; a tensor's bytes only when asked for it by name. Writes nothing and never
calls a hub: `tokenizer()` sets HF_HUB_OFFLINE and passes local_files_only.

The id is made of headers and sizes, not of the weights themselves: a few milliseconds instead of
reading half a terabyte. The price: weights changed in place without a change of shape keep the id;
`content_hash` is there for who must know. No torch or transformers at import.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from kimi_eagle.errors import UsageError
from kimi_eagle.modelfiles import (
    FLOATS,
    FOREIGN,
    Cut,
    Header,
    Missing,
    Pointer,
    collector_off,
    content_hashes,
    read_header,
    read_json,
    weight_file,
)

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
SETTINGS_FILES = ("merges.txt", "added_tokens.json", "special_tokens_map.json")
TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")
TOKENIZER_FILES = (*VOCABULARY_FILES, *SETTINGS_FILES, *TEMPLATE_FILES)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
LM_HEAD_NAMES = ("lm_head.weight",)
NORM_NAMES = ("model.norm.weight", "transformer.ln_f.weight")
KNOWN = (*EMBEDDING_NAMES, *LM_HEAD_NAMES, *NORM_NAMES)
TABLES = {"embedding": EMBEDDING_NAMES, "lm_head": LM_HEAD_NAMES}
"""The two matrices that the draft takes over, [vocab_size, hidden_size]."""


def open_verifier(
    path: str | Path, *, trust_remote_code: bool = False, require_template: bool = False
) -> Verifier:
    """Open a checkpoint directory and check what can be checked without loading weights.

    Raises UsageError: no such directory, no config.json, no tokenizer, weights missing, a git-LFS
    pointer, a dangling link or a cut file, and with `require_template` no chat template.
    """
    verifier = Verifier(Path(path).expanduser().absolute(), trust_remote_code)
    folder = verifier.path
    if not folder.exists():
        fix = "set [verifier] path to a local checkpoint"
        raise UsageError("no such model directory", where=folder, fix=fix)
    if not folder.is_dir():
        raise UsageError("not a directory", where=folder, expected="a checkpoint directory")
    verifier.hidden_size, verifier.num_layers, verifier.vocab_size  # noqa: B018  fail early
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        raise UsageError(
            "model directory without tokenizer",
            where=folder,
            expected=f"one of {', '.join(VOCABULARY_FILES)}",
            fix="copy the tokenizer's files beside the weights",
        )
    if require_template and not verifier.has_template:
        raise UsageError(
            "model directory without chat template",
            where=folder,
            expected="chat_template.jinja or chat_template in tokenizer_config.json",
            fix="set [template] chat_template to a Jinja file",
        )
    verifier.headers  # noqa: B018  fail early
    return verifier


class Verifier:
    """One local checkpoint; made by `open_verifier`. All paths are absolute."""

    def __init__(self, path: Path, trust_remote_code: bool = False):
        self.path = path
        self.trust_remote_code = trust_remote_code
        self._tokenizer: Any = None
        self._settings: dict[str, dict[str, Any]] = {}
        self._found: dict[str, str] = {}
        self.data_bytes: dict[str, int] = {}
        """File name -> bytes of weights, for each file that `opened` found whole."""

    # -- configuration -------------------------------------------------------------------------

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json as it stands."""
        return read_json(self.path / "config.json")

    def settings(self, name: str) -> dict[str, Any]:
        """A JSON file of the directory, read once; {} where there is none."""
        if name not in self._settings:
            self._settings[name] = read_json(self.path / name) if self._has(name) else {}
        return self._settings[name]

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part: `text_config` of a multimodal model, else the whole."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def hidden_size(self) -> int:
        return self._integer("hidden_size", "n_embd")

    @property
    def num_layers(self) -> int:
        return self._integer("num_hidden_layers", "n_layer")

    @property
    def vocab_size(self) -> int:
        return self._integer("vocab_size")

    @property
    def context_length(self) -> int:
        """Positions the model was made for, tokens."""
        return self._integer("max_position_embeddings", "n_positions", "seq_length")

    @property
    def tied(self) -> bool:
        """Whether lm_head is the embedding."""
        for config in (self.text_config, self.config):
            if "tie_word_embeddings" in config:
                return bool(config["tie_word_embeddings"])
        return True  # transformers' PretrainedConfig default

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: generation_config.json first, then config.json; no doubles."""
        found: list[int] = []
        for place in (self.settings("generation_config.json"), self.config, self.text_config):
            value = place.get("eos_token_id")
            found += value if isinstance(value, list) else [] if value is None else [value]
        return tuple(dict.fromkeys(int(i) for i in found))

    def check_layers(self, ids: Iterable[int]) -> tuple[int, ...]:
        """The ids if all lie in 0..num_layers ("state entering layer k"; num_layers = after the
        last one), else UsageError."""
        ids = tuple(ids)
        if (bad := [i for i in ids if not 0 <= i <= self.num_layers]) or not ids:
            raise UsageError(
                f"layer id {bad[0]} out of range" if bad else "no layer ids",
                where="extract.layers",
                expected=f"ids from 0 to {self.num_layers} ({self.path.name} has "
                f"{self.num_layers} layers; {self.num_layers} is the state after the last)",
            )
        return ids

    # -- tokenizer -----------------------------------------------------------------------------

    def tokenizer(self) -> Any:
        """The tokenizer as vLLM opens it (transformers' AutoTokenizer), local files only; cached.

        Its import costs seconds the first time. UsageError where transformers cannot read it.
        """
        if self._tokenizer is None:
            os.environ["HF_HUB_OFFLINE"] = "1"
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(
                    str(self.path), local_files_only=True, trust_remote_code=self.trust_remote_code
                )
            except Exception as e:  # transformers raises many kinds; all mean the same here
                reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
                fix = ""
                if "trust_remote_code" in str(e):
                    fix = "read its Python files, then set [verifier] trust_remote_code = true"
                raise UsageError(
                    f"tokenizer cannot be read: {reason}", where=self.path, fix=fix
                ) from None
        return self._tokenizer

    @property
    def has_template(self) -> bool:
        """Whether the directory holds a chat template; nothing is imported for the answer."""
        if self._has("chat_template.jinja") or self._has("chat_template.json"):
            return True
        return bool(self.settings("tokenizer_config.json").get("chat_template"))

    def tokenizer_digest(self) -> str:
        """blake2b-128 hex over the tokenizer's files and their names."""
        return self._digest(self._tokenizer_files())

    # -- tensors -------------------------------------------------------------------------------

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> file name, from the index or from the single file's header."""
        index = self.path / INDEX
        if index.is_file():
            found = self.settings(INDEX).get("weight_map")
            if not isinstance(found, dict) or not found:
                raise UsageError("index without weight_map", where=index)
            return found
        single = self.path / SINGLE
        if single.is_symlink() or single.exists():
            header, _ = read_header(single)
            return {name: SINGLE for name in header if name != "__metadata__"}
        raise UsageError(
            "no weights",
            where=self.path,
            expected=f"{INDEX} with its shards, or {SINGLE}",
            fix="point [verifier] path at a complete safetensors checkpoint",
        )

    @cached_property
    def opened(self) -> dict[str, Header | Missing | Pointer | Cut]:
        """File name -> safetensors header of every weight file, or what is wrong with the file."""
        found: dict[str, Header | Missing | Pointer | Cut] = {}
        with collector_off():
            for name in sorted(set(self.weight_map.values())):
                try:
                    found[name], self.data_bytes[name] = read_header(self.path / name)
                except (Missing, Pointer, Cut) as e:
                    found[name] = e
        return found

    @property
    def headers(self) -> dict[str, Header]:
        """File name -> safetensors header of every weight file, each checked against its size."""
        headers: dict[str, Header] = {}
        for name, found in self.opened.items():
            if isinstance(found, UsageError):
                raise found
            headers[name] = found
        return headers

    @cached_property
    def _known(self) -> list[str]:
        """Names that end in one of KNOWN: one pass over 200,000 names instead of several."""
        return [n for n in self.weight_map if n.endswith(KNOWN)]

    def find(self, suffixes: str | Iterable[str]) -> str:
        """The one tensor name equal to, or ending in `.SUFFIX` of, the first suffix that matches.

        Nested names count (`language_model.model.embed_tokens.weight`); of several the shortest,
        those of other parts (a vision tower's, a talker's, an MTP layer's) last.
        """
        suffixes = (suffixes,) if isinstance(suffixes, str) else tuple(suffixes)
        for suffix in suffixes:
            if suffix in self._found:
                return self._found[suffix]
            pool = self._known if suffix in KNOWN else self.weight_map
            if names := [n for n in pool if n == suffix or n.endswith("." + suffix)]:
                names = [n for n in names if not FOREIGN.search(n)] or names
                self._found[suffix] = min(names, key=lambda n: (n.count("."), len(n), n))
                return self._found[suffix]
        fault = f"no tensor named {' or '.join(suffixes)}"
        raise UsageError(fault, where=self.path, expected="it in the index")

    def tensor(self, suffixes: str | Iterable[str]) -> Any:
        """One torch tensor (CPU, stored dtype) by full name or suffix; reads only its bytes."""
        from safetensors import safe_open

        name = self.find(suffixes)
        file = weight_file(self.path / self.weight_map[name])
        with safe_open(file, framework="pt") as f:
            return f.get_tensor(name)

    def embedding(self) -> Any:
        """Token embedding, [vocab_size, hidden_size], floating point."""
        return self.tensor(self.table("embedding"))

    def lm_head(self) -> Any:
        """Output matrix, [vocab_size, hidden_size]; the embedding where the two are tied."""
        return self.tensor(self.table("lm_head"))

    def table(self, what: str) -> str:
        """Name of the embedding or lm_head (a key of TABLES), checked by its header: floating
        point, [vocab_size, hidden_size]."""
        name = self.stored_table(what)
        self.check_float(what, name)
        self.check_shape(what, name)
        return name

    def stored_table(self, what: str) -> str:
        """Name of the matrix, quantised or not; of a tied lm_head that of the embedding."""
        suffixes = TABLES[what]
        try:
            name = self.find(suffixes)
            other = what == "lm_head" and self.tied and FOREIGN.search(name)
            return self.stored_table("embedding") if other else name
        except UsageError:
            stems = tuple(s.removesuffix(".weight") for s in suffixes)
            packed = [n for n in self.weight_map if any(f".{s}." in f".{n}" for s in stems)]
            if packed:
                return min(packed, key=len)
            if what == "lm_head" and self.tied:
                return self.stored_table("embedding")
            raise

    def check_float(self, what: str, name: str) -> None:
        """UsageError where a matrix is stored in another form than floating point."""
        entry = self.entry(name)
        if entry["dtype"] not in FLOATS or not name.endswith(".weight"):
            raise UsageError(
                f"{what} is quantised: {name} ({entry['dtype']})",
                where=self.path,
                expected="an unquantised floating-point tensor",
                fix="use a checkpoint whose quantisation leaves embedding and lm_head alone",
            )

    def check_shape(self, what: str, name: str) -> None:
        """UsageError where a matrix is not [vocab_size, hidden_size]."""
        shape, expected = self.entry(name)["shape"], [self.vocab_size, self.hidden_size]
        if shape != expected:
            fault = f"{what} {name} has shape {shape}"
            raise UsageError(fault, where=self.path, expected=str(expected))

    def entry(self, name: str) -> dict[str, Any]:
        """dtype, shape and data_offsets of a tensor that the index names."""
        file = self.weight_map[name]
        if (found := self.headers[file].get(name)) is None:
            raise UsageError(
                f"index names {name}, the file does not hold it",
                where=self.path / file,
                fix="fetch the checkpoint's index again",
            )
        return found

    def final_norm(self) -> tuple[Any, float]:
        """(weight [hidden_size], epsilon) of the norm between the last layer and lm_head."""
        weight = self.tensor(self.norm_name())
        eps = self.text_config.get("rms_norm_eps", self.text_config.get("layer_norm_epsilon", 1e-6))
        return weight, float(eps)

    def norm_name(self) -> str:
        """Name of the final norm's weight, its shape checked by its header."""
        name = self.find(NORM_NAMES)
        if (shape := self.entry(name)["shape"]) != [self.hidden_size]:
            raise UsageError(
                f"final norm has shape {shape}", where=self.path, expected=f"[{self.hidden_size}]"
            )
        return name

    # -- identity ------------------------------------------------------------------------------

    def id(self) -> str:
        """blake2b-128 hex over configuration, index, tokenizer files and every safetensors header
        with its file's size. Does not depend on where the directory lies."""
        return self._id

    @cached_property
    def _id(self) -> str:
        h = hashlib.blake2b(digest_size=16)
        small = [n for n in ("config.json", "generation_config.json", INDEX) if self._has(n)]
        h.update(self._digest([*small, *self._tokenizer_files()]).encode())
        for name, header in self.headers.items():
            size = (self.path / name).stat().st_size
            h.update(f"{name}\0{size}\0".encode())
            h.update(json.dumps(header, sort_keys=True).encode())
        return h.hexdigest()

    def content_hash(self, progress: Callable[[int], None] | None = None) -> dict[str, str]:
        """File name -> sha256 hex of every file of the directory (no sub-folders), read in full.

        `progress` gets the number of bytes of each block read.
        """
        return content_hashes(self.path, progress)

    # -- inside --------------------------------------------------------------------------------

    def _integer(self, *names: str) -> int:
        for name in names:
            value = self.text_config.get(name)
            if isinstance(value, int) and value > 0:
                return value
        raise UsageError(f"no {names[0]}", where=self.path / "config.json", expected="an integer")

    def _has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def _tokenizer_files(self) -> list[str]:
        code = sorted(p.name for p in self.path.glob("*token*.py"))
        return [n for n in TOKENIZER_FILES if self._has(n)] + code

    def _digest(self, names: list[str]) -> str:
        h = hashlib.blake2b(digest_size=16)
        for name in names:
            data = (self.path / name).read_bytes()
            h.update(f"{name}\0{len(data)}\0".encode())
            h.update(data)
        return h.hexdigest()
