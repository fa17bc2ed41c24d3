"""How large the toy is, in the published config's own field names, and in transformers'.

Everything that eight ranks cut divides by 8: attention heads, the experts' width (by 8 x 32, the
group of INT4 scales), the dense width, the vocabulary, the vision tower's heads. What kernels are
written for is as in the real one: ranks of latent attention (kv 512, rope 64, nope and v 128),
sigmoid routing with a correction bias, YaRN with mscale = mscale_all_dim = 1. Layers, hidden
size, number of experts and positions are small.
"""

from __future__ import annotations

from typing import Any

LAYERS = 8
HIDDEN = 256
VOCAB = 49_152  # SmolLM2's tokenizer
EXPERTS = 8
BOS, EOS, PAD = 1, 2, 2
MEDIA = 16
"""<empty_output>, a control token of SmolLM2 that no prompt has, stands for media."""
GROUP = 32
"""Weights that share an INT4 scale."""

ROPE = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""The real one: 64 x 4,096."""

TEXT: dict[str, Any] = {
    "model_type": "kimi_k2",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_shared_experts": 1,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rope_theta": 50000.0,
    "rope_scaling": ROPE,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "pretraining_tp": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "dtype": "bfloat16",
}

_TOWER = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
}
VISION: dict[str, Any] = {
    "model_type": "kimi_k25_vision",
    "patch_size": 14,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "video_attn_type": "spatial_temporal",
    "mm_projector_type": "patchmerger",
    "mm_hidden_size": 128,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "text_hidden_size": HIDDEN,
    # The published names. vLLM 0.31.0 (transformers_utils/configs/kimi_k25.py) does not read them:
    # it reads the plain ones, whose defaults are the real model's sizes. A toy needs both.
    **{f"vt_{name}": value for name, value in _TOWER.items()},
    **_TOWER,
}

MEDIA_PROCESSOR = {
    "patch_size": 14,
    "merge_kernel_size": 2,
    "temporal_merge_kernel_size": 4,
    "in_patch_limit": 64,
    "in_patch_limit_each_frame": 64,
    "in_patch_limit_video": None,
    "patch_limit_on_one_side": 8,
    "fixed_output_tokens": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "sample_fps": 2.0,
    "max_num_frames_each_video": None,
}
"""What vLLM's image processor wants of preprocessor_config.json, else KeyError at load."""


def published(experts: str) -> dict[str, Any]:
    """config.json as the published checkpoint has it, at toy size; experts: bf16 or int4."""
    text = dict(TEXT)
    if experts == "int4":
        text["quantization_config"] = quantization()
    return {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": text,
        "vision_config": VISION,
        "media_placeholder_token_id": MEDIA,
        "ignore_index": -100,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<empty_output>",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "dtype": "bfloat16",
    }


def quantization() -> dict[str, Any]:
    """The published checkpoint's way: symmetric INT4 in groups of 32, routed experts alone."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": GROUP,
                    "dynamic": False,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "actorder": None,
                    "block_structure": None,
                },
            }
        },
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
    }


def in_transformers(config: dict[str, Any]) -> Any:
    """A published config.json (a dict) as transformers' Kimi_K25Config.

    transformers 5.17.0 renames the vision fields (`vt_hidden_size` -> `hidden_size`,
    `init_pos_emb_height` -> `pos_emb_height`) and takes the published names for unknown ones, so
    that another size than the real one is lost on the way.
    """
    from transformers import Kimi_K25Config

    text, vision = dict(config["text_config"]), config["vision_config"]
    text.pop("quantization_config", None)
    tower = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    return Kimi_K25Config(
        text_config=text,
        vision_config={
            "patch_size": vision["patch_size"],
            "merge_kernel_size": vision["merge_kernel_size"],
            **{f"pos_emb_{n}": vision[f"init_pos_emb_{n}"] for n in ("height", "width", "time")},
            **{n: vision[f"vt_{n}"] for n in tower},
        },
        projection_hidden_size=vision["mm_hidden_size"],
        projection_layer_norm_eps=vision["projector_ln_eps"],
        image_token_id=config["media_placeholder_token_id"],
        tie_word_embeddings=False,
    )
