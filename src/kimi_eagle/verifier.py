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
import struct
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from kimi_eagle.errors import UsageError

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
SETTINGS_FILES = ("merges.txt", "added_tokens.json", "special_tokens_map.json")
TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")
TOKENIZER_FILES = (*VOCABULARY_FILES, *SETTINGS_FILES, *TEMPLATE_FILES)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
LM_HEAD_NAMES = ("lm_head.weight",)
NORM_NAMES = ("model.norm.weight", "transformer.ln_f.weight")
FLOATS = {"BF16", "F16", "F32", "F64"}
HEADER_LIMIT = 100 << 20  # bytes; the safetensors format's own limit
LFS_MARK = b"version https://git-lfs"


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
        raise UsageError(
            "no such model directory", where=folder, fix="set [verifier] path to a local checkpoint"
        )
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

    # -- configuration -------------------------------------------------------------------------

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json as it stands."""
        return self._json("config.json")

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

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: generation_config.json first, then config.json; no doubles."""
        generation = self.path / "generation_config.json"
        places = [self._json(generation.name)] if generation.is_file() else []
        found: list[int] = []
        for place in [*places, self.config, self.text_config]:
            value = place.get("eos_token_id")
            found += value if isinstance(value, list) else [] if value is None else [value]
        return tuple(dict.fromkeys(int(i) for i in found))

    def check_layers(self, ids: Iterable[int]) -> tuple[int, ...]:
        """The ids if all lie in 0..num_layers ("state entering layer k"; num_layers = after the
        last one), else UsageError."""
        ids = tuple(ids)
        bad = [i for i in ids if not 0 <= i <= self.num_layers]
        if bad or not ids:
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
        for name in ("chat_template.jinja", "chat_template.json"):
            if (self.path / name).is_file():
                return True
        settings = self.path / "tokenizer_config.json"
        return settings.is_file() and bool(self._json(settings.name).get("chat_template"))

    def tokenizer_digest(self) -> str:
        """blake2b-128 hex over the tokenizer's files and their names."""
        return self._digest(self._tokenizer_files())

    # -- tensors -------------------------------------------------------------------------------

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Tensor name -> file name, from the index or from the single file's header."""
        index = self.path / INDEX
        if index.is_file():
            found = self._json(INDEX).get("weight_map")
            if not isinstance(found, dict) or not found:
                raise UsageError("index without weight_map", where=index)
            return found
        if (self.path / SINGLE).is_symlink() or (self.path / SINGLE).exists():
            header = self._header(SINGLE)
            return {name: SINGLE for name in header if name != "__metadata__"}
        raise UsageError(
            "no weights",
            where=self.path,
            expected=f"{INDEX} with its shards, or {SINGLE}",
            fix="point [verifier] path at a complete safetensors checkpoint",
        )

    @cached_property
    def headers(self) -> dict[str, dict[str, Any]]:
        """File name -> safetensors header of every weight file, each checked against its size."""
        return {name: self._header(name) for name in sorted(set(self.weight_map.values()))}

    def find(self, suffixes: str | Iterable[str]) -> str:
        """The one tensor name equal to, or ending in `.SUFFIX` of, the first suffix that matches.

        Nested names count (`language_model.model.embed_tokens.weight`); of several the shortest,
        so that a vision tower's or an MTP layer's copy is not taken.
        """
        suffixes = (suffixes,) if isinstance(suffixes, str) else tuple(suffixes)
        for suffix in suffixes:
            names = [n for n in self.weight_map if n == suffix or n.endswith("." + suffix)]
            if names:
                return min(names, key=lambda n: (n.count("."), len(n), n))
        raise UsageError(
            f"no tensor named {' or '.join(suffixes)}", where=self.path, expected="it in the index"
        )

    def tensor(self, suffixes: str | Iterable[str]) -> Any:
        """One torch tensor (CPU, stored dtype) by full name or suffix; reads only its bytes."""
        from safetensors import safe_open

        name = self.find(suffixes)
        with safe_open(self._weights(self.weight_map[name]), framework="pt") as f:
            return f.get_tensor(name)

    def embedding(self) -> Any:
        """Token embedding, [vocab_size, hidden_size], floating point."""
        return self._table(EMBEDDING_NAMES, "embedding")

    def lm_head(self) -> Any:
        """Output matrix, [vocab_size, hidden_size]; the embedding where the two are tied."""
        names = [n for n in self.weight_map if n.split(".")[-2:] == ["lm_head", "weight"]]
        if not names and self._tied():
            return self.embedding()
        return self._table(LM_HEAD_NAMES, "lm_head")

    def final_norm(self) -> tuple[Any, float]:
        """(weight [hidden_size], epsilon) of the norm between the last layer and lm_head."""
        weight = self.tensor(NORM_NAMES)
        if tuple(weight.shape) != (self.hidden_size,):
            raise UsageError(
                f"final norm has shape {list(weight.shape)}",
                where=self.path,
                expected=f"[{self.hidden_size}]",
            )
        eps = self.text_config.get("rms_norm_eps", self.text_config.get("layer_norm_epsilon", 1e-6))
        return weight, float(eps)

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
        result = {}
        for file in sorted(p for p in self.path.iterdir() if p.is_file()):
            h = hashlib.sha256()
            with open(file, "rb") as f:
                while block := f.read(8 << 20):
                    h.update(block)
                    if progress:
                        progress(len(block))
            result[file.name] = h.hexdigest()
        return result

    # -- inside --------------------------------------------------------------------------------

    def _json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        try:
            data = json.loads(file.read_bytes())
        except FileNotFoundError:
            raise UsageError(
                f"model directory without {name}", where=self.path, expected="a checkpoint"
            ) from None
        except OSError as e:
            raise UsageError(f"cannot be read: {e.strerror}", where=file) from None
        except ValueError as e:
            raise UsageError(f"not JSON: {e}", where=file) from None
        if not isinstance(data, dict):
            raise UsageError("not a JSON object", where=file)
        return data

    def _integer(self, *names: str) -> int:
        for name in names:
            value = self.text_config.get(name)
            if isinstance(value, int) and value > 0:
                return value
        raise UsageError(f"no {names[0]}", where=self.path / "config.json", expected="an integer")

    def _tied(self) -> bool:
        for config in (self.text_config, self.config):
            if "tie_word_embeddings" in config:
                return bool(config["tie_word_embeddings"])
        return True  # transformers' PretrainedConfig default

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

    def _weights(self, name: str) -> Path:
        """Path of a weight file that is really there."""
        file = self.path / name
        if file.is_symlink() and not file.exists():
            raise UsageError(
                f"dangling link to {os.readlink(file)}", where=file, fix="restore its target"
            )
        if not file.is_file():
            raise UsageError(
                "weight file missing", where=file, expected="every shard that the index names"
            )
        return file

    def _header(self, name: str) -> dict[str, Any]:
        file = self._weights(name)
        size = file.stat().st_size
        with open(file, "rb") as f:
            start = f.read(len(LFS_MARK))
            if start == LFS_MARK:
                raise UsageError(
                    "a git-LFS pointer, not weights", where=file, fix="git lfs pull in its checkout"
                )
            length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
            if not 0 < length <= min(HEADER_LIMIT, size - 8):
                raise UsageError("not a safetensors file", where=file)
            f.seek(8)
            try:
                header = json.loads(f.read(length))
                ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
            except (ValueError, KeyError, TypeError, AttributeError, IndexError):
                raise UsageError("not a safetensors file: broken header", where=file) from None
        expected = 8 + length + max(ends, default=0)
        if size != expected:
            wanted = f"{expected} by its header"
            raise UsageError(
                f"weight file has {size} bytes", where=file, expected=wanted, fix="copy it again"
            )
        return header

    def _table(self, suffixes: tuple[str, ...], what: str) -> Any:
        """A [vocab_size, hidden_size] floating-point tensor, checked from the header first."""
        try:
            name = self.find(suffixes)
        except UsageError:
            packed = [
                n for n in self.weight_map if any(s.removesuffix(".weight") in n for s in suffixes)
            ]
            if not packed:
                raise
            raise self._quantised(what, min(packed, key=len)) from None
        entry = self.headers[self.weight_map[name]].get(name)
        if entry is None:
            raise UsageError(
                f"index names {name}, the file does not hold it",
                where=self.path / self.weight_map[name],
            )
        if entry["dtype"] not in FLOATS:
            raise self._quantised(what, f"{name} ({entry['dtype']})")
        expected = [self.vocab_size, self.hidden_size]
        if entry["shape"] != expected:
            raise UsageError(
                f"{what} {name} has shape {entry['shape']}", where=self.path, expected=str(expected)
            )
        return self.tensor(name)

    def _quantised(self, what: str, name: str) -> UsageError:
        return UsageError(
            f"{what} is quantised: {name}",
            where=self.path,
            expected="an unquantised floating-point tensor",
            fix="use a checkpoint whose quantisation leaves embedding and lm_head alone",
        )
