"""Tokenizers that are missing, not the same for everybody, or not the model's."""

from __future__ import annotations

import json
from typing import Any

from place import EOS, TURN, VOCAB, Case, Place

CODE = """from transformers import PreTrainedTokenizerFast


class Own(PreTrainedTokenizerFast):
    pass
"""


def change_json(place: Place, name: str, **values: Any) -> None:
    """Set keys of a JSON file of the model; None removes one."""
    file = place.model / name
    data = json.loads(file.read_text()) if file.is_file() else {}
    data |= values
    file.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))


def settings(place: Place, **values: Any) -> None:
    change_json(place, "tokenizer_config.json", **values)


def missing(place: Place) -> None:
    (place.model / "tokenizer.json").unlink()


def pointer(place: Place) -> None:
    (place.model / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")


def own_code(place: Place, *, trusted: bool, text: str = CODE) -> None:
    """A tokenizer of the directory's own code, with its vocabulary in tiktoken.model alone."""
    settings(
        place,
        auto_map={"AutoTokenizer": ["tokenization_own.Own", None]},
        tokenizer_class="Own",
        added_tokens_decoder={str(TURN): {"content": "<|im_end|>", "special": True}},
    )
    (place.model / "tokenizer.json").unlink()
    (place.model / "tiktoken.model").write_text("IQ== 0\nIg== 1\n")
    (place.model / "tokenization_own.py").write_text(text)
    place.recipe["verifier"]["trust_remote_code"] = trusted


def code_left_behind(place: Place) -> None:
    own_code(place, trusted=True, text="from .tool_declaration_ts import encode\n" + CODE)


def code_complete(place: Place) -> None:
    code_left_behind(place)
    (place.model / "tool_declaration_ts.py").write_text("encode = str\n")


def too_many(place: Place) -> None:
    added = json.loads((place.model / "tokenizer.json").read_text())["added_tokens"]
    new = {**added[-1], "id": VOCAB, "content": "<|new|>"}
    change_json(place, "tokenizer.json", added_tokens=[*added, new])


def ranks_too_many(place: Place) -> None:
    own_code(place, trusted=True)
    (place.model / "tiktoken.model").write_text("IQ== 0\n" * (VOCAB + 1))


def no_eos(place: Place) -> None:
    place.change_text(eos_token_id=None)
    config = place.config()
    del config["eos_token_id"]
    place.write_config(config)
    change_json(place, "generation_config.json", eos_token_id=None)


def other_eos(place: Place) -> None:
    settings(place, eos_token="<|im_user|>")


def eos_out_of_range(place: Place) -> None:
    change_json(place, "generation_config.json", eos_token_id=[TURN, VOCAB])


def two_eos(place: Place) -> None:
    """As Kimi-K2.5 has it: [EOS] in config.json, the end of a turn in generation_config.json."""
    place.change_text(eos_token_id=EOS)
    place.write_config(place.config() | {"eos_token_id": EOS})


def broken_file(place: Place) -> None:
    change_json(place, "tokenizer.json", model={"type": "NoSuchModel", "vocab": {}})


def added_elsewhere(place: Place) -> None:
    """tokenizer_config.json of another save: one more token, which tokenizer.json lacks."""
    token = {"content": "quick", "special": False, "normalized": False}
    settings(place, added_tokens_decoder={str(VOCAB - 1): token})


def no_processor(place: Place) -> None:
    (place.model / "preprocessor_config.json").unlink()


def half_a_processor(place: Place) -> None:
    media = {"merge_kernel_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    change_json(place, "preprocessor_config.json", media_proc_cfg=media)


CASES = [
    Case("tokenizer-present", missing, "model directory without tokenizer"),
    Case("tokenizer-present", pointer, "vocabulary is a git-LFS pointer"),
    Case(
        "tokenizer-own-code",
        lambda p: own_code(p, trusted=False),
        "tokenization_own.Own",
        good=lambda p: own_code(p, trusted=True),
    ),
    Case("tokenizer-code-present", code_left_behind, "tool_declaration_ts.py", good=code_complete),
    Case("tokenizer-image-processor", no_processor, "media_proc_cfg.merge_kernel_size"),
    Case("tokenizer-image-processor", half_a_processor, "no media_proc_cfg.temporal_merge"),
    Case("tokenizer-ids-in-range", too_many, "'<|new|>' has id 384"),
    Case("tokenizer-ids-in-range", ranks_too_many, "has id 384"),
    Case("tokenizer-eos", no_eos, "no eos_token_id"),
    Case("tokenizer-eos", other_eos, "<|im_user|> (259)", good=two_eos),
    Case("tokenizer-eos", eos_out_of_range, "eos_token_id 384 is no token"),
    Case("tokenizer-opens", broken_file, "tokenizer cannot be read", heavy=True),
    Case("tokenizer-parity", added_elsewhere, "to tokenizer.json and", heavy=True),
]
