"""What vLLM's own reader and loader do with draft directories: a program of its own.

`python vllm_loads.py VERIFIER DRAFT...` prints one line RESULT {draft's name: {"reads": error or
"", "loads": error or "", ...}}. The verifier is configured, not loaded; the draft is.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_MLA_DISABLE="1",  # the CPU build has no common block size for latent and plain attention
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)


def reads(draft: str) -> str:
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    try:
        SpeculatorsConfig.from_pretrained(draft)
    except Exception as e:
        return _words(e)
    return ""


def loads(verifier: str, draft: str) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.utils.network_utils import get_open_port

    try:
        config = EngineArgs(
            model=verifier,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=2,
            enforce_eager=True,
            speculative_config={"method": "eagle3", "model": draft, "num_speculative_tokens": 3},
        ).create_engine_config()
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
            initialize_model_parallel(1, 1)
            chosen = config.speculative_config.draft_model_config
            model = get_model(vllm_config=config, model_config=chosen, prefix="draft")
    except Exception as e:
        return {"loads": _words(e)}
    finally:
        cleanup_dist_env_and_memory()
    offsets = model.draft_id_to_target_id
    rotary = model.model.layers[0].self_attn.rotary_emb
    return {
        "loads": "",
        "tokens": [] if offsets is None else [i + int(d) for i, d in enumerate(offsets)],
        "norm": float(model.model.norm.weight.float().sum()),
        "head_dim": model.model.layers[0].self_attn.head_dim,
        "cosine": float(rotary.cos_sin_cache[1000, 1]),
        "positions": chosen.hf_config.max_position_embeddings,
        "layers": list(chosen.hf_config.eagle_aux_hidden_state_layer_ids),
    }


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


if __name__ == "__main__":
    verifier, *drafts = sys.argv[1:]
    found = {Path(d).name: {"reads": reads(d)} | loads(verifier, d) for d in drafts}
    print("RESULT", json.dumps(found))
