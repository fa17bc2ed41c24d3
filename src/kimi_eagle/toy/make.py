"""Make the toy's directory: config, tokenizer, weights in several files with an index.

Reads the small model's tokenizer (the real one is not at hand) and writes what the published
checkpoint has, under its names. Names and shapes come from transformers' own Kimi_K25 classes
through its own way back to published names; what that way leaves wrong in 5.17.0 is put right in
`_name`. The routed experts are bf16, or INT4 as published with `experts="int4"`: vLLM 0.31.0's CPU
build has a kernel for those only where the processor has AMX tiles, and none for this routing.

torch and transformers are imported only when something must be made.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle import demo_model
from kimi_eagle.errors import UsageError
from kimi_eagle.modeldir import ModelDir, Say
from kimi_eagle.toy import shape

if TYPE_CHECKING:
    import torch

EXPERTS = ("bf16", "int4")
SEED = 0
FORMAT = "toy-kimi/1"
"""Changes when the making does, so that older toys are made anew."""
SHARD_BYTES = 32 << 20
README = """\
# Kimi-K2.5's architecture at toy size

Made by `python -m kimi_eagle.toy`: weights by chance (seed {seed}), routed experts in {experts}. It
answers with words that only chance put together. Tokenizer and template are SmolLM2's (Apache-2.0).
"""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE")


def _dir(experts: str) -> ModelDir:
    if experts not in EXPERTS:
        raise UsageError(f"experts {experts!r}", expected=f"one of {', '.join(EXPERTS)}")
    return ModelDir("Kimi-K2.5-toy" + ("" if experts == "bf16" else f"-{experts}"), FORMAT)


def default_path(experts: str = "bf16") -> Path:
    """Where the toy lies unless told otherwise: beside the small model."""
    return _dir(experts).default_path()


def ensure(
    dest: Path | None = None, *, experts: str = "bf16", say: Say = lambda text: None
) -> Path:
    """The path of a complete toy; makes it (a few seconds), and the small model, if not there.

    Raises UsageError (something else lies at `dest`), RunError (making it failed).
    """
    tokenizer = demo_model.ensure(say=say)
    kind = _dir(experts)

    def build(made: Path) -> None:
        say(f"making {dest or kind.default_path()} (a few seconds)")
        for name in _TOKENIZER:
            shutil.copy(tokenizer / name, made / name)
        for name, data in _settings(experts).items():
            (made / name).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        text = README.format(seed=SEED, experts=experts)
        (made / "README.md").write_text(text, encoding="utf-8")
        with demo_model.quiet():
            _write(made, tensors(made, experts))

    return kind.ensure(dest, build, source=f"seed {SEED}", say=say)


def _settings(experts: str) -> dict[str, Any]:
    ids = {"bos_token_id": shape.BOS, "eos_token_id": shape.EOS, "pad_token_id": shape.PAD}
    return {
        "config.json": shape.published(experts),
        "generation_config.json": ids,
        "preprocessor_config.json": {"media_proc_cfg": shape.MEDIA_PROCESSOR},
    }


def tensors(folder: Path, experts: str) -> dict[str, torch.Tensor]:
    """All tensors by published name. folder: holds config.json and the tokenizer."""
    import torch
    from transformers import Kimi_K25ForConditionalGeneration
    from transformers.core_model_loading import revert_weight_conversion

    from kimi_eagle.toy import int4, weights

    config = shape.in_transformers(json.loads((folder / "config.json").read_text()))
    with torch.device("meta"):
        model = Kimi_K25ForConditionalGeneration(config)
    embedding, plain, directions = weights.embedding(shape.VOCAB, shape.HIDDEN, shape.EXPERTS, SEED)
    words, begin = _words(folder)
    made = {
        "model.language_model.embed_tokens.weight": embedding,
        "lm_head.weight": weights.chain(plain, words, begin, shape.EOS, SEED),
    }
    for name, t in model.state_dict().items():
        if name.endswith(".mlp.gate.weight"):
            made[name] = weights.router(name, directions, SEED)
        elif name not in made:
            made[name] = weights.values(name, tuple(t.shape), SEED)
    filled = {name: torch.from_numpy(array) for name, array in made.items()}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in revert_weight_conversion(model, filled).items():
        # The router's correction bias is float32 in the published checkpoint, all else bf16.
        kind = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        name, tensor = _name(name), tensor.to(kind).contiguous()
        packed = experts == "int4" and int4.is_expert(name)
        found |= int4.pack(name, tensor) if packed else {name: tensor}
    return found


def _name(name: str) -> str:
    """What transformers 5.17.0's way back (conversion_mapping.py, kimi_k25) leaves wrong."""
    name = name.replace("language_model.model.blocks.", "language_model.model.layers.")
    name = name.replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")
    return name.replace("model.mm_projector.", "mm_projector.")


def _words(folder: Path) -> tuple[list[int], int]:
    """(ids of the words that the toy says, id of the last token of every prompt)."""
    from kimi_eagle.toy.weights import WORDS

    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    common = sorted(i for text, i in vocabulary.items() if re.fullmatch("Ġ[a-z]{3,}", text))
    return common[:WORDS], vocabulary["Ċ"]  # the template ends with "assistant\n"


def _write(folder: Path, named: dict[str, torch.Tensor]) -> None:
    """Several weight files and the index, in the order of the names in the model."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    split = split_torch_state_dict_into_shards(named, max_shard_size=SHARD_BYTES)
    for file, names in split.filename_to_tensors.items():
        save_file({n: named[n] for n in names}, folder / file, metadata={"format": "pt"})
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    text = json.dumps(index, indent=1) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
