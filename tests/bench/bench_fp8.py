"""The embedded default trained from fp8 states, beside the same from raw ones.

    python tests/bench/bench_fp8.py [--folder DIR]          (two runs: half an hour on two cores)
    python tests/bench/bench_fp8.py --compare RAW FP8       (of two finished runs)

Both share the verifier's answers and the samples; states, training and benchmark are made twice.
Printed side by side: bytes of the states, error a layer, the loss by quarters of the training,
validation, acceptance as served by vLLM (float32, k = 3, held-out prompts).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def make(folder: Path) -> tuple[Path, Path]:
    """RAW and FP8: two finished runs."""
    raw, fp8 = folder / "raw", folder / "fp8"
    recipe = ROOT / "jobs" / "smollm2.toml"
    run(recipe, raw)
    shutil.copytree(raw, fp8)
    for stage in ("extract", "train", "benchmark", "draft", "bench"):
        shutil.rmtree(fp8 / stage)
    text = recipe.read_text().replace("[extract]", '[extract]\ncodec = "fp8"')
    other = folder / "smollm2.toml"
    # Paths in a recipe count from its own folder.
    other.write_text(text.replace('"data/', f'"{ROOT}/jobs/data/'))
    run(other, fp8)
    return raw, fp8


def run(recipe: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "kimi_eagle", "run", str(recipe), "--run", str(folder)]
    subprocess.run(command, check=True)


def facts(run: Path) -> dict[str, Any]:
    """What is compared."""
    records = [json.loads(p.read_text()) for p in (run / "extract/records").glob("*.json")]
    (curves,) = (run / "train/files").glob("*.curves.jsonl")
    lines = [json.loads(x) for x in curves.read_text().splitlines()]
    losses = [x["loss"] for x in lines if "loss" in x]
    quarter = len(losses) // 4
    validation = [x for x in lines if "val_loss" in x]
    results = json.loads((run / "bench/results.json").read_text())
    return {
        "GB of states": round(sum(r["counts"]["bytes"] for r in records) / 1e9, 3),
        "loss by quarters": [
            round(statistics.fmean(losses[i * quarter : (i + 1) * quarter]), 3) for i in range(4)
        ],
        "validation loss": [round(x["val_loss"], 3) for x in validation],
        "validation accuracy, first token": [round(x["val_accuracy"][0], 4) for x in validation],
        "acceptance length": round(results["acceptance_length"], 3),
        "acceptance by position": [round(x, 3) for x in results["acceptance_per_position"]],
    }


def errors(run: Path) -> list[str]:
    """SQNR, largest error and share of zeros of each layer, as the units recorded them."""
    records = [json.loads(p.read_text()) for p in (run / "extract/records").glob("*.json")]
    lines = []
    for layers in zip(*(r["info"]["error"] for r in records), strict=True):
        sqnr = statistics.fmean(x["sqnr_db"] for x in layers)
        largest = max(x["max_error"] for x in layers)
        zeros = statistics.fmean(x["zeros"] for x in layers)
        lines.append(
            f"layer {layers[0]['layer']}: SQNR {sqnr:.1f} dB, largest error {largest:g},"
            f" zeros {zeros:.1e}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("RAW", "FP8"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temp:
        raw, fp8 = args.compare or make(Path(temp))
        rows = [facts(raw), facts(fp8)]
        for name in rows[0]:
            print(f"{name:34} raw {rows[0][name]}   fp8 {rows[1][name]}")
        print("\n".join(errors(fp8)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
