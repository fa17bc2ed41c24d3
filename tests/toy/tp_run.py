"""Extract with so many ranks, in a process of its own: python tp_run.py MODEL BATCH.json TP OUT

Writes OUT/TP.safetensors with the states of each sequence and, of engines with processes of their
own, OUT/watch-TP/PID with what each rank's connector was asked and did.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from kimi_eagle.capture.engine import ExtractionEngine
from kimi_eagle.recipe import EngineSection

LAYERS = (2, 4, 5, 8)


class WatchedEngine(ExtractionEngine):
    """ExtractionEngine with the connector of watching.py."""

    def _extra_arguments(self) -> dict[str, Any]:
        found = super()._extra_arguments()
        if self.hand_over == "file":
            found["kv_transfer_config"] |= {
                "kv_connector": "WatchingConnector",
                "kv_connector_module_path": "watching",
            }
        return found


def main(model: Path, batch: list[list[int]], tp: int, out: Path) -> None:
    from safetensors.torch import save_file

    watch = out / f"watch-{tp}"
    watch.mkdir()
    here = str(Path(__file__).parent)
    os.environ["KIMI_EAGLE_WATCH"] = str(watch)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    section = EngineSection(max_model_len=512, max_num_seqs=8, tp=tp, cpu_kv_cache_gib=1)
    spool = out / f"spool-{tp}"
    spool.mkdir()
    with WatchedEngine(model, section, LAYERS, spool) as engine:
        states = {str(i): s for i, s, _ in engine.extract(batch)}
        left = [p.name for p in spool.rglob("*.safetensors*")]
    save_file(states, out / f"{tp}.safetensors")
    (out / f"{tp}.json").write_text(json.dumps({"left": left, "bind": _bind()}))


def _bind() -> dict[str, str | None]:
    names = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS")
    return {name: os.environ.get(name) for name in names}


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3]),
         Path(sys.argv[4]))  # fmt: skip
