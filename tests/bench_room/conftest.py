"""Helpers of this room can be imported by name; vLLM's parameters without vLLM."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def vllm_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests hold what they were made of, and no engine is there."""
    params = SimpleNamespace(SamplingParams=lambda **given: SimpleNamespace(**given))
    monkeypatch.setitem(sys.modules, "vllm", params)
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA=1, FINAL_ONLY=2))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
