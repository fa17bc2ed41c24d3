"""A directory that should hold a draft model: what it is and how vLLM must be told to use it.

Reads `config.json` and the names of the weight files, nothing else, and needs no torch: a wrong
`--draft` is refused in milliseconds instead of after an engine's load. What is a draft stands in
training/draftkind.py.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_eagle import files
from kimi_eagle.errors import UsageError
from kimi_eagle.training import draftkind
from kimi_eagle.training.draftfiles import DraftFiles


@dataclass(frozen=True)
class DraftInfo:
    """What a draft directory says of itself.

    speculative: `method` and what else vLLM's speculative_config needs besides path and k.
    vocab_size, hidden_size: of the verifier it was made for, None where the config is silent.
    """

    path: Path
    speculative: dict[str, Any]
    architecture: str
    vocab_size: int | None
    hidden_size: int | None
    draft_vocab_size: int | None

    def digest(self) -> str:
        """sha256 hex over names and contents of config and weight files (a draft is small)."""
        total = hashlib.sha256()
        for file in sorted([self.path / "config.json", *_weights(self.path)]):
            total.update(f"{file.name} {files.sha256_file(file)}\n".encode())
        return total.hexdigest()


def open_draft(path: str | Path, verifier_path: str | Path | None = None) -> DraftInfo:
    """Read a draft directory; with `verifier_path` also check that it was made for that model.

    The verifier named in the draft's config need not exist: the benchmark passes its own.
    Raises UsageError for a missing directory, no or broken config.json, no weights, a model that
    is no draft, or one whose vocabulary or hidden size is another verifier's.
    """
    path = Path(path).expanduser().absolute()
    config = _config(path)
    names, kind = draftkind.architectures(config), config.get("speculators_model_type")
    speculative = draftkind.speculative(config)
    if speculative is None:
        raise UsageError(
            f"not a draft model: {kind or ', '.join(names) or config.get('model_type')}",
            where=path / "config.json",
            expected="an EAGLE-3 draft such as Eagle3Speculator or LlamaForCausalLMEagle3",
            fix="give the run's draft/ directory",
        )
    if not _weights(path):
        raise UsageError("no weights", where=path, expected="*.safetensors or *.bin")
    layer = draftkind.layer_of(config)
    info = DraftInfo(
        path=path,
        speculative=dict(speculative),
        architecture=names[0] if names else str(kind),
        vocab_size=_int(layer.get("vocab_size")),
        hidden_size=_int(config.get("target_hidden_size") or layer.get("hidden_size")),
        draft_vocab_size=_int(config.get("draft_vocab_size")),
    )
    if verifier_path is not None:
        _check_pair(info, Path(verifier_path))
    return info


def quick_digest(path: str | Path) -> str:
    """Hex that stands for the draft's content, for a key that status reads again and again: over
    the first MiB of each tensor; over all bytes where the weights are no safetensors."""
    info = open_draft(path)
    if any(f.suffix == ".safetensors" for f in _weights(info.path)):
        return DraftFiles(info.path).digest()
    return info.digest()


def _check_pair(info: DraftInfo, verifier_path: Path) -> None:
    config = _config(verifier_path)
    config = config.get("text_config") or config
    for key, own in (("vocab_size", info.vocab_size), ("hidden_size", info.hidden_size)):
        theirs = _int(config.get(key))
        if own is not None and theirs is not None and own != theirs:
            raise UsageError(
                f"draft was made for another verifier: {key} {own}, the verifier has {theirs}",
                where=info.path,
                expected=f"a draft for {verifier_path}",
            )


def _config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise UsageError("no such directory", where=path, expected="a directory with a model")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError("no config.json", where=path, expected="a model directory") from None
    except (OSError, ValueError) as e:
        raise UsageError(f"config.json cannot be read: {e}", where=path) from None
    if not isinstance(config, dict):
        raise UsageError("config.json holds no object", where=path)
    return config


def _weights(path: Path) -> list[Path]:
    found = sorted(path.glob("*.safetensors"))
    return [f for f in found or sorted(path.glob("*.bin")) if f.is_file()]


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
