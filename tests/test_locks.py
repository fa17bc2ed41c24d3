"""The locks hold what pyproject.toml asks for, hashed, without CUDA's libraries or index names."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = ("cpu", "cuda", "model")


def blocks(lock: str) -> dict[str, tuple[str, list[str]]]:
    """{package: (version, hashes)} of a lock; fails on a line that is no pinned requirement."""
    found = {}
    for block in re.split(r"(?m)^(?=[A-Za-z0-9-])", (ROOT / f"containers/{lock}.lock").read_text()):
        if block.startswith("#") or not block.strip():
            continue
        pin = re.match(r"([a-z0-9-]+)==(\S+)", block)
        assert pin, f"{lock}.lock: {block.splitlines()[0]!r}"
        found[pin[1]] = (pin[2], re.findall(r"--hash=sha256:([0-9a-f]{64})\b", block))
    return found


def asked(*extras: str) -> list[Requirement]:
    listed = PROJECT["project"]["optional-dependencies"]
    lines = PROJECT["project"]["dependencies"] + [r for e in extras for r in listed[e]]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_is_pinned_and_hashed(lock: str) -> None:
    found = blocks(lock)
    assert found and all(hashes for _, hashes in found.values())


@pytest.mark.parametrize("lock", LOCKS)
def test_no_index_and_no_cuda_libraries(lock: str) -> None:
    text = (ROOT / f"containers/{lock}.lock").read_text()
    assert not re.search(r"https?://|--(extra-)?index|--find-links|\bfile:", text)
    assert not [n for n in blocks(lock) if n.startswith(("nvidia-", "cuda-"))]


def test_cpu_lock_meets_the_project() -> None:
    found = blocks("cpu")
    for need in [*asked("cpu", "test"), *map(Requirement, PROJECT["build-system"]["requires"])]:
        assert need.specifier.contains(found[need.name][0]), need


def test_cuda_lock_meets_the_project_beside_its_base() -> None:
    found = blocks("cuda")
    for need in asked("gpu"):
        if need.name in ("torch", "vllm"):
            assert need.name not in found
        else:
            assert need.specifier.contains(found[need.name][0]), need


def test_both_sides_have_the_same_libraries() -> None:
    cpu, cuda = blocks("cpu"), blocks("cuda")
    for name in ("transformers", "speculators", "hs-connectors", "numpy", "pyarrow", "safetensors"):
        assert cpu[name][0] == cuda[name][0], name
    pins = PROJECT["project"]["optional-dependencies"]
    version = {e: next(r.split("==")[1] for r in pins[e] if "vllm" in r) for e in ("cpu", "gpu")}
    assert version["cpu"] == version["gpu"]
    assert f"v{version['gpu']}@sha256:" in (ROOT / "containers/README.md").read_text()


def test_torch_has_the_one_hash_of_the_cpu_build() -> None:
    version, hashes = blocks("cpu")["torch"]
    assert version == "2.13.0" and len(hashes) == 1
    assert f"TORCH_CPU_SHA256={hashes[0]}\n" in (ROOT / "containers/lock.sh").read_text()
    assert metadata.version("torch") == "2.13.0+cpu"


def test_what_is_installed_is_what_is_locked() -> None:
    for name, (version, _) in blocks("cpu").items():
        assert metadata.version(name).split("+")[0] == version.split("+")[0], name
