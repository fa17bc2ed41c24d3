"""Engine settings: what is in the key is what vLLM gets; the environment is ready in time."""

from __future__ import annotations

import json
import os

import pytest

from kimi_eagle.capture import settings as module
from kimi_eagle.capture.settings import engine_arguments, environment, in_process, settings
from kimi_eagle.errors import UsageError
from kimi_eagle.recipe import EngineSection


@pytest.fixture
def cpu_build(monkeypatch):
    monkeypatch.setattr(module, "vllm_build", lambda: ("0.31.0", "cpu"))


@pytest.fixture
def cuda_build(monkeypatch):
    monkeypatch.setattr(module, "vllm_build", lambda: ("0.31.0", "cuda"))


def test_every_engine_key_is_in_the_settings(cpu_build):
    """A recipe value that changes what vLLM does changes the key."""
    base = settings(EngineSection())
    other = {
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 4096,
        "tp": 2,
        "pp": 2,
        "cpu_kv_cache_gib": 5,
        "enforce_eager": False,
    }
    for key, value in other.items():
        assert settings(EngineSection(**{key: value})) != base, key
    assert settings(EngineSection(), layers=[1, 2]) != base
    assert settings(EngineSection(), seed=1) != base
    assert json.loads(json.dumps(base)) == base
    unseen = set(EngineSection.model_fields) - set(other) - {"device", "gpu_memory_utilization"}
    assert not unseen, "a new engine key must reach settings()"


def test_device(cpu_build):
    assert settings(EngineSection())["device"] == "cpu"
    assert settings(EngineSection(device="cpu")) == settings(EngineSection())
    with pytest.raises(UsageError, match="built for cpu"):
        settings(EngineSection(device="cuda"))


def test_cuda(cuda_build):
    told = settings(EngineSection(tp=8, gpu_memory_utilization=0.8))
    assert told["gpu_memory_utilization"] == 0.8 and "cpu_kv_cache_gib" not in told
    assert not in_process(told)
    assert engine_arguments(told, "/m", False)["gpu_memory_utilization"] == 0.8
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment(EngineSection())
    assert "OMP_NUM_THREADS" not in environment(EngineSection())


def test_installed_build_is_found():
    version, build = module.vllm_build()
    assert (version, build) == ("0.31.0", "cpu")


def test_environment_on_cpu(cpu_build, monkeypatch):
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "HF_HUB_OFFLINE", "VLLM_LOGGING_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    wanted = environment(EngineSection(cpu_kv_cache_gib=3))
    assert wanted["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    assert wanted["OMP_WAIT_POLICY"] == "passive"
    assert wanted["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert wanted["HF_HUB_OFFLINE"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "9")
    wanted = environment(EngineSection(cpu_kv_cache_gib=3))
    assert "OMP_NUM_THREADS" not in wanted and "VLLM_LOGGING_LEVEL" not in wanted
    assert wanted["VLLM_CPU_KVCACHE_SPACE"] == "3", "the recipe's value is in the key: it wins"


def test_tensor_parallel_on_cpu_shares_the_cores(cpu_build, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 4, 5})
    wanted = environment(EngineSection(tp=2))
    assert wanted["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|4,5"
    assert wanted["OMP_NUM_THREADS"] == "2"
    assert wanted.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0"
    assert not in_process(settings(EngineSection(tp=2)))
