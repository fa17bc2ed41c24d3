"""A small world in which every rule holds, and what the cases of the rules are made of.

The model is Kimi-shaped (nested configuration and names, latent attention, experts, YaRN) with a
tokenizer of 384 tokens; weights by chance. It is built once and copied for each case.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

VOCAB, HIDDEN, LAYERS = 384, 64, 4
BOS, EOS, TURN = 256, 257, 258
SPECIAL = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<think>", "</think>"]
TEMPLATE = (
    "{%- if tools -%}<|im_user|>{{ tools | tojson }}<|im_end|>{%- endif -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}<|im_assistant|>{{ m.content }}<|im_end|>"
    "{%- else -%}<|im_user|>{{ m.role }}: {{ m.content }}<|im_end|>{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>"
    "{%- if thinking is defined and not thinking -%}<think></think>{%- else -%}<think>{%- endif -%}"
    "{%- endif -%}"
)


@dataclass
class Place:
    """One copy of the world: change it, then ask for `facts`."""

    path: Path
    recipe: dict[str, Any]
    site: dict[str, Any] | None = None
    given: dict[str, Any] = field(default_factory=dict)
    """Facts handed over as they are: mapping=..., samples=..., states=..., draft=..., run=..."""

    @property
    def model(self) -> Path:
        return self.path / "model"

    def config(self) -> dict[str, Any]:
        return json.loads((self.model / "config.json").read_text())

    def write_config(self, config: dict[str, Any]) -> None:
        (self.model / "config.json").write_text(json.dumps(config, indent=1))

    def change_text(self, **values: Any) -> None:
        """Set keys of text_config; None removes one."""
        config = self.config()
        for key, value in values.items():
            if value is None:
                config["text_config"].pop(key, None)
            else:
                config["text_config"][key] = value
        self.write_config(config)

    def facts(self, *, heavy: bool = False) -> Any:
        from kimi_eagle.contracts import Facts
        from kimi_eagle.recipe import parse
        from kimi_eagle.site import Site
        from kimi_eagle.typed_toml import validated

        recipe = parse(self.recipe, where="recipe.toml", base=self.path)
        site = validated(Site, self.site, "site.toml") if self.site is not None else None
        return Facts(recipe, site=site, heavy=heavy, **self.given)


@dataclass(frozen=True)
class Case:
    """`broken` makes exactly `rule` a problem whose line holds `says`; `good` is another world in
    which the rule is concerned and holds. heavy: with libraries imported."""

    rule: str
    broken: Callable[[Place], None]
    says: str
    good: Callable[[Place], None] | None = None
    heavy: bool = False


def copy_of(base: Path, target: Path) -> Place:
    """A world of its own."""
    shutil.copytree(base, target, symlinks=True)
    return Place(target, recipe())


def recipe() -> dict[str, Any]:
    """The recipe of the good world, as TOML would give it."""
    return {
        "name": "place",
        "verifier": {"path": "model"},
        "template": {"thinking": True},
        "sources": [{"path": "prompts.jsonl"}],
        "engine": {"max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 4},
        "regenerate": {"max_tokens": 64},
        "prepare": {"max_length": 128},
        "extract": {"layers": [1, 2, 3, 4]},
        "vocab": {"draft_vocab_size": 128},
        "train": {"seq_len": 128, "draft": {"num_attention_heads": 4, "num_key_value_heads": 4}},
        "benchmark": {"prompts": "prompts.jsonl"},
    }


def config() -> dict[str, Any]:
    """config.json as the published Kimi-K2.5 has it, small."""
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "max_position_embeddings": 4096,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": TURN,
        "pad_token_id": EOS,
        "torch_dtype": "bfloat16",
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {"vt_hidden_size": 32, "vt_num_hidden_layers": 1, "patch_size": 14},
        "media_placeholder_token_id": 263,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": TURN,
        "pad_token_id": EOS,
        "torch_dtype": "bfloat16",
    }


def build(path: Path) -> Path:
    """Write the good world; returns `path`."""
    import torch
    from safetensors.torch import save_file

    model = path / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(config(), indent=1))
    generation = {"eos_token_id": TURN, "bos_token_id": BOS, "do_sample": True}
    (model / "generation_config.json").write_text(json.dumps(generation))
    media = {"patch_size": 14, "merge_kernel_size": 2, "temporal_merge_kernel_size": 4}
    media |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (model / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": media}))
    _tokenizer(model)
    generator = torch.Generator().manual_seed(0)
    shapes, total, where = _shapes(), 0, {}
    for number, names in enumerate(np.array_split(sorted(shapes), 3), 1):
        file = f"model-{number:05d}-of-00003.safetensors"
        tensors = {
            n: torch.randn(shapes[n], generator=generator).mul(0.05).bfloat16() for n in names
        }
        save_file(tensors, model / file, metadata={"format": "pt"})
        total += sum(t.numel() * 2 for t in tensors.values())
        where |= dict.fromkeys(map(str, names), file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    rows = [{"prompt": f"What is {n} and {n}?"} for n in range(8)]
    (path / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def _shapes() -> dict[str, tuple[int, ...]]:
    text = config()["text_config"]
    heads, nope, rope = 4, text["qk_nope_head_dim"], text["qk_rope_head_dim"]
    q_rank, kv_rank, value = text["q_lora_rank"], text["kv_lora_rank"], text["v_head_dim"]
    found: dict[str, tuple[int, ...]] = {
        "language_model.model.embed_tokens.weight": (VOCAB, HIDDEN),
        "language_model.model.norm.weight": (HIDDEN,),
        "language_model.lm_head.weight": (VOCAB, HIDDEN),
        "vision_tower.patch_embed.proj.weight": (32, 3, 14, 14),
        "mm_projector.proj.0.weight": (HIDDEN, 32),
    }
    for layer in range(LAYERS):
        at = f"language_model.model.layers.{layer}."
        found |= {
            f"{at}input_layernorm.weight": (HIDDEN,),
            f"{at}post_attention_layernorm.weight": (HIDDEN,),
            f"{at}self_attn.q_a_proj.weight": (q_rank, HIDDEN),
            f"{at}self_attn.q_a_layernorm.weight": (q_rank,),
            f"{at}self_attn.q_b_proj.weight": (heads * (nope + rope), q_rank),
            f"{at}self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, HIDDEN),
            f"{at}self_attn.kv_a_layernorm.weight": (kv_rank,),
            f"{at}self_attn.kv_b_proj.weight": (heads * (nope + value), kv_rank),
            f"{at}self_attn.o_proj.weight": (HIDDEN, heads * value),
        }
        experts = ["mlp."] if layer == 0 else ["mlp.shared_experts."]
        if layer:
            experts += [f"mlp.experts.{e}." for e in range(text["n_routed_experts"])]
            found[f"{at}mlp.gate.weight"] = (text["n_routed_experts"], HIDDEN)
            found[f"{at}mlp.gate.e_score_correction_bias"] = (text["n_routed_experts"],)
        for expert in experts:
            width = text["intermediate_size" if layer == 0 else "moe_intermediate_size"]
            found |= {
                f"{at}{expert}gate_proj.weight": (width, HIDDEN),
                f"{at}{expert}up_proj.weight": (width, HIDDEN),
                f"{at}{expert}down_proj.weight": (HIDDEN, width),
            }
    return found


def _tokenizer(model: Path) -> None:
    """Bytes and a few special tokens; ids 256 to 262 are special, the rest of VOCAB is unused."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": "<|im_end|>",
        "pad_token": "[EOS]",
        "chat_template": TEMPLATE,
    }
    (model / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
