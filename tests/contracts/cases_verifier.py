"""Checkpoint directories that are not whole, not local, or not what the draft needs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from place import HIDDEN, Case, Place

INDEX = "model.safetensors.index.json"
EMBED = "language_model.model.embed_tokens.weight"
HEAD = "language_model.lm_head.weight"


def shard(place: Place, number: int = 2) -> Any:
    return place.model / f"model-{number:05d}-of-00003.safetensors"


def change_index(place: Place, change: Callable[[dict[str, str]], None]) -> None:
    file = place.model / INDEX
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def rewrite(place: Place, name: str, change: Callable[[Any], dict[str, Any]]) -> None:
    """Put other tensors in a tensor's place (new name -> tensor), in file, index and total_size."""
    from safetensors.torch import load_file, save_file

    file = place.model / INDEX
    index = json.loads(file.read_text())
    part = place.model / index["weight_map"].pop(name)
    tensors = load_file(part)
    before = tensors.pop(name)
    after = change(before)
    save_file(tensors | after, part, metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(after, part.name)
    index["metadata"]["total_size"] += sum(t.nbytes for t in after.values()) - before.nbytes
    file.write_text(json.dumps(index))


def beside(place: Place, name: str, like: str = "language_model.model.norm.weight") -> None:
    """A tensor more, of the values of another."""
    rewrite(place, like, lambda t: {like: t, name: t.clone()})


def elsewhere(place: Place) -> None:
    place.recipe["verifier"]["path"] = "moonshotai/Kimi-K2.5"


def cut_config(place: Place) -> None:
    file = place.model / "config.json"
    file.write_bytes(file.read_bytes()[:100])


def a_draft(place: Place) -> None:
    verifier = {"name_or_path": "moonshotai/Kimi-K2.5"}
    place.write_config(place.config() | {"speculators_config": {"verifier": verifier}})


def trusted(place: Place, entry: str = "configuration_kimi_k25.KimiK25Config") -> None:
    place.recipe["verifier"]["trust_remote_code"] = True
    place.write_config(place.config() | {"auto_map": {"AutoConfig": entry}})
    (place.model / "configuration_kimi_k25.py").write_text("")


def hub_code(place: Place) -> None:
    trusted(place, "moonshotai/Kimi-K2.5--configuration_kimi_k25.KimiK25Config")


def no_index(place: Place) -> None:
    (place.model / INDEX).unlink()


def dangling(place: Place) -> None:
    shard(place).unlink()
    shard(place).symlink_to(place.path / "blobs" / "0123")


def pointer(place: Place) -> None:
    shard(place).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def cut(place: Place) -> None:
    os.truncate(shard(place), shard(place).stat().st_size - 1)


def stale_index(place: Place) -> None:
    change_index(place, lambda m: m.update({"language_model.model.mtp.weight": shard(place).name}))


def unnamed(place: Place) -> None:
    change_index(place, lambda m: m.pop("mm_projector.proj.0.weight") and None)


def swapped(place: Place) -> None:
    def move(names: dict[str, str]) -> None:
        names["mm_projector.proj.0.weight"] = shard(place, 1).name

    change_index(place, move)


def no_head(place: Place) -> None:
    rewrite(place, HEAD, lambda t: {})


def packed_head(place: Place) -> None:
    import torch

    def pack(t: Any) -> dict[str, Any]:
        stem = HEAD.removesuffix("weight")
        return {
            f"{stem}weight_packed": torch.zeros(len(t), HIDDEN // 8, dtype=torch.int32),
            f"{stem}weight_scale": torch.zeros(len(t), HIDDEN // 32, dtype=torch.bfloat16),
        }

    rewrite(place, HEAD, pack)


def quantised(place: Place, *, ignore: list[str]) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}
    place.change_text(
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": group},
            "ignore": ignore,
        }
    )


def head_targeted(place: Place) -> None:
    quantised(place, ignore=["re:.*self_attn.*", "re:.*mlp.*"])


def as_published(place: Place) -> None:
    quantised(place, ignore=["lm_head", "re:.*self_attn.*", "re:.*mlp.*"])


def longer(place: Place) -> None:
    rewrite(place, EMBED, lambda t: {EMBED: t.new_zeros(len(t) + 64, HIDDEN)})


def tied_once(place: Place) -> None:
    place.change_text(tie_word_embeddings=True)
    no_head(place)


def tied_twice(place: Place) -> None:
    place.write_config(place.config() | {"tie_word_embeddings": True})
    tied_once(place)


def no_norm(place: Place) -> None:
    name = "language_model.model.norm.weight"
    rewrite(place, name, lambda t: {"language_model.model.last.weight": t.clone()})


def no_layer(place: Place) -> None:
    """A layer that neither index nor files hold."""
    index = json.loads((place.model / INDEX).read_text())
    for name in index["weight_map"]:
        if ".layers.2." in name:
            rewrite(place, name, lambda t: {})


def one_more(place: Place) -> None:
    """config.json of a deeper model, and a recipe for it."""
    place.change_text(num_hidden_layers=5)
    place.recipe["extract"]["layers"] = [1, 2, 3, 5]


def mtp(place: Place) -> None:
    beside(place, "language_model.model.layers.4.eh_proj.weight")
    place.change_text(num_nextn_predict_layers=1)


def single(place: Place, *, stray: bool) -> None:
    """One file without index; stray: a shard of another checkpoint lies beside it."""
    from safetensors.torch import load_file, save_file

    tensors = {}
    for number in (1, 2, 3):
        tensors |= load_file(shard(place, number))
        if not stray or number > 1:
            shard(place, number).unlink()
    save_file(tensors, place.model / "model.safetensors", metadata={"format": "pt"})
    (place.model / INDEX).unlink()


def header(place: Place, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header's entry of a norm in the second shard; its length stays."""
    file = shard(place)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    found = json.loads(data[8 : 8 + length])
    change(next(entry for name, entry in found.items() if name.endswith("layernorm.weight")))
    text = json.dumps(found, separators=(",", ":")).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def marked(place: Place) -> None:
    """config.json as Windows' editor saves it."""
    file = place.model / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())


def cut_json(name: str) -> Callable[[Place], None]:
    return lambda p: (p.model / name).write_text('{"eos_token_id": ')


def settings_pointer(place: Place) -> None:
    text = "version https://git-lfs.github.com/spec/v1\n"
    (place.model / "tokenizer_config.json").write_text(text)


CASES = [
    Case("verifier-directory", elsewhere, "no such model directory"),
    Case("verifier-directory", lambda p: (p.model / "config.json").unlink(), "without config.json"),
    Case("verifier-config", cut_config, "not JSON"),
    Case("verifier-config", lambda p: p.change_text(vocab_size=None), "no vocab_size"),
    Case("verifier-config", marked, "Unexpected UTF-8 BOM"),
    Case("verifier-config", lambda p: p.change_text(max_position_embeddings=None), "no max_posi"),
    Case("verifier-settings", cut_json("tokenizer_config.json"), "not JSON"),
    Case("verifier-settings", cut_json("generation_config.json"), "not JSON"),
    Case("verifier-settings", cut_json("preprocessor_config.json"), "not JSON"),
    Case("verifier-settings", settings_pointer, "a git-LFS pointer"),
    Case("verifier-not-a-draft", a_draft, "speculators_config"),
    Case("verifier-no-hub-code", hub_code, "moonshotai/Kimi-K2.5--", good=trusted),
    Case("verifier-index", no_index, "no weights"),
    Case("verifier-weights-present", lambda p: shard(p).unlink(), "weight file missing"),
    Case("verifier-weights-present", dangling, "dangling link"),
    Case("verifier-weights-fetched", pointer, "git-LFS pointer"),
    Case("verifier-weights-whole", cut, "bytes; expected"),
    Case("verifier-weights-whole", lambda p: shard(p).write_bytes(b""), "not a safetensors file"),
    Case("verifier-weights-whole", lambda p: header(p, lambda e: e["shape"].append(2)), "[64, 2]"),
    Case("verifier-weights-whole", lambda p: header(p, lambda e: e.pop("dtype")), "broken header"),
    Case(
        "verifier-weights-whole",
        lambda p: header(p, lambda e: e.update(data_offsets=[-128, 0])),
        "begins at byte -128",
    ),
    Case(
        "verifier-weights-whole",
        lambda p: header(p, lambda e: e.update(data_offsets=[2, 130])),
        "broken header: a tensor begins at byte",
    ),
    Case(
        "verifier-index-current",
        lambda p: single(p, stray=True),
        "model-00001-of-00003.safetensors beside model.safetensors and no index",
        good=lambda p: single(p, stray=False),
    ),
    Case("verifier-layers", no_layer, "no tensor of layer 2", good=mtp),
    Case("verifier-layers", one_more, "no tensor of layer 4; "),
    Case("verifier-layers", lambda p: p.change_text(num_hidden_layers=5), "of layer 4; "),
    Case("verifier-index-current", stale_index, "index names language_model.model.mtp.weight"),
    Case("verifier-index-current", unnamed, "the index does not name it there"),
    Case("verifier-index-current", swapped, "the file does not hold it"),
    Case("verifier-tables-found", no_head, "no tensor named lm_head.weight"),
    Case("verifier-tables-unquantised", packed_head, "lm_head is quantised"),
    Case("verifier-tables-unquantised", head_targeted, "targets lm_head (Linear)", as_published),
    Case("verifier-tables-shape", longer, "has shape [448, 64]"),
    Case("verifier-tied", tied_once, "tie_word_embeddings differs", good=tied_twice),
    Case(
        "verifier-tables-own",
        lambda p: beside(p, "talker.lm_head.weight", HEAD),
        "speculators takes talker.lm_head.weight",
        good=lambda p: beside(p, "language_model.model.layers.4.shared_head.lm_head.weight", HEAD),
    ),
    Case("verifier-norm", no_norm, "no tensor named model.norm.weight"),
]
