"""What the installed vLLM's own files say, read as text: no import, no GPU, a few milliseconds.

The alternative, importing the model classes and asking them, costs ten seconds and does not tell
either: a class that drops a state does so in its forward pass. The price: a rewrite of vLLM's code
may keep the sense and change the words, so that these answers can be None ("cannot tell").
"""

from __future__ import annotations

import re
from pathlib import Path

from kimi_eagle.verifier import Verifier

REGISTRY = Path("model_executor/models/registry.py")
_KEEPS_LAST = (r"end_layer in self\.aux_hidden_state_layers", r"_maybe_add_hidden_state\(")
"""deepseek_v2.py's own way, and that of EagleModelMixin (interfaces.py), which counts a layer's
output as idx + 1 (vLLM 0.31.0)."""


def model_text(source: Path, architecture: str) -> str | None:
    """The file (of a package: all its files) of the class that vLLM runs for an architecture; None
    where its registry has none. source: vLLM's folder."""
    registry = (source / REGISTRY).read_text(encoding="utf-8")
    found = re.search(rf'"{re.escape(architecture)}":\s*\(\s*"([\w.]+)"', registry)
    if found is None:
        return None
    name = found[1]
    inside = name.removeprefix("vllm.") if "." in name else f"model_executor/models/{name}"
    path = source / inside.replace(".", "/")
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return "\n".join(f.read_text(encoding="utf-8") for f in files if f.is_file()) or None


def architecture(verifier: Verifier) -> str | None:
    """Of the class that holds the layers: the language model's own, where it names one."""
    for config in (verifier.text_config, verifier.config):
        if names := config.get("architectures"):
            return str(names[0])
    return None


def gives_last_state(text: str) -> bool | None:
    """Whether this model code hands out the state after its last layer; None: it hands out none
    itself (another class may)."""
    if "aux_hidden_state" not in text and "_maybe_add_hidden_state" not in text:
        return None
    return any(re.search(pattern, text) for pattern in _KEEPS_LAST)
