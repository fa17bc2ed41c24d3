"""What vLLM's CPU build is helped with: each help is needed as long as its test passes.

A test that fails here after an update of vLLM says what may go from src/kimi_eagle/capture/.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kimi_eagle import toy
from kimi_eagle.capture import vllm_cpu
from kimi_eagle.capture.settings import vllm_build

CPU = {"device": "cpu", "dtype": "bfloat16"}
LATENT = {"text_config": {"kv_lora_rank": 512}}

REBIND = """
import vllm.transformers_utils.processors.kimi_k25_vision_fused
from vllm.triton_utils import dispatcher
from kimi_eagle.capture import vllm_cpu
try:
    dispatcher._rebind_kernels([])
except AttributeError as e:
    print("stumbles:", e)
vllm_cpu.repair()
dispatcher._rebind_kernels([])
print("repaired")
"""
EXTRACT = """
import sys, tempfile
from pathlib import Path
from kimi_eagle.capture.engine import ExtractionEngine
from kimi_eagle.recipe import EngineSection
section = EngineSection(max_model_len=64, max_num_seqs=2, cpu_kv_cache_gib=1)
with ExtractionEngine(Path(sys.argv[1]), section, (2, 8), Path(tempfile.mkdtemp())) as engine:
    pass
"""
SERVE = """
import sys
from pathlib import Path
from kimi_eagle.bench import run_benchmark
from kimi_eagle.capture import vllm_cpu
from kimi_eagle.stages.context import open_context
vllm_cpu.served = lambda told, config: told
ctx = open_context(sys.argv[1])
run_benchmark(ctx.recipe, ctx.verifier, ctx.run.draft, Path(sys.argv[2]))
"""


EXPAND = """
import torch
import vllm.v1.sample.rejection_sampler
from vllm.utils import cpu_triton_utils
from kimi_eagle.capture import vllm_cpu
ends = torch.tensor([2, 2, 5], dtype=torch.int32)  # the second request has no draft
for values in (torch.tensor([0.7, 0.9, 0.0]), torch.tensor([5, 6, 0], dtype=torch.int32)):
    for how in (cpu_triton_utils._expand_kernel_impl, vllm_cpu.expand):
        output = values.new_full((5,), 9)
        how(output, values, ends, 0, 1, 64)
        print([round(v, 3) for v in output.tolist()])
vllm_cpu.repair()
print(cpu_triton_utils._expand_kernel_impl is vllm_cpu.expand)
"""


def says(code: str, *arguments: object) -> str:
    """All that a process says, whether it ends well or not."""
    argv = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


def test_only_a_latent_verifier_on_a_cpu_is_served_otherwise() -> None:
    assert vllm_cpu.served(CPU, LATENT) == {**CPU, "mla": False}
    assert vllm_cpu.served(CPU, LATENT["text_config"])["mla"] is False
    assert vllm_cpu.served({"device": "cuda"}, LATENT) == {"device": "cuda"}
    assert vllm_cpu.served(CPU, {"hidden_size": 576}) == CPU


def test_the_helps_are_for_this_vllm() -> None:
    """After an update of vLLM: run `make campaign` on this file, then renew the version here."""
    assert vllm_build() == ("0.31.0", "cpu")


def test_the_dispatcher_still_stumbles_over_numba() -> None:
    said = says(REBIND)
    assert "stumbles: '_lib_fn_wrapper' object has no attribute 'get'" in said
    assert "\nrepaired\n" in said


def test_temperatures_are_still_lost_on_their_way_to_a_draft() -> None:
    """1.0 stands for the greedy request's 0."""
    lost, kept = "[9.0, 9.0, 9.0, 9.0, 9.0]", "[0.7, 0.7, 1.0, 1.0, 1.0]"
    told = (lost, kept, "[9, 9, 9, 9, 9]", "[5, 5, 1, 1, 1]", "True")
    assert "\n".join(told) in says(EXPAND)


@pytest.mark.campaign
def test_serving_with_latent_attention_still_finds_no_block_size(toy_run, tmp_path: Path) -> None:
    assert "No common block size" in says(SERVE, toy_run[0], tmp_path)


@pytest.mark.campaign
def test_int4_experts_are_still_refused(tmp_path: Path, toy_dir: Path) -> None:
    """No kernel of the CPU build takes the published INT4 experts here: why the toy has bf16."""
    packed = toy.ensure(tmp_path / "int4", experts="int4")
    assert "No WNA16 MoE backend supports" in says(EXTRACT, packed)
