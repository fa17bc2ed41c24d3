"""Why the tokenizer has rules: what transformers makes of a directory with tiktoken.model alone."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import pytest
from place import Place

from kimi_eagle.contracts import judge, rules

pytest.importorskip("tiktoken")
CODE = '''
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer


class TikTokenTokenizer(PreTrainedTokenizer):
    """Splits Han from everything else, as Kimi's own does; the rest is left whole."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, **kwargs):
        ranks = load_tiktoken_bpe(vocab_file)
        pattern = r"[\\p{Han}]+|[^\\p{Han}]+"
        self.model = tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks,
                                       special_tokens={})
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return {f"t{i}": i for i in range(self.vocab_size)}

    def _tokenize(self, text, **kwargs):
        return [f"t{i}" for i in self.model.encode(text)]

    def _convert_token_to_id(self, token):
        return int(token[1:])

    def _convert_id_to_token(self, index):
        return f"t{index}"
'''
HAN = "a你"
"""One word to GPT-4's pattern, two to Kimi's."""


@pytest.fixture
def kimi_like(place: Place) -> Place:
    """The model's tokenizer as Kimi-K2.5 has it: tiktoken.model and Python code."""
    tokens = [bytes([i]) for i in range(256)]
    word = HAN.encode()  # 4 bytes: a merge for each prefix, so that the word is one token
    tokens += [word[:length] for length in range(2, len(word) + 1)]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (place.model / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (place.model / "tokenizer.json").unlink()
    (place.model / "tokenization_kimi.py").write_text(CODE)
    file = place.model / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings |= {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": None,
        "eos_token": None,
        "pad_token": None,
    }
    file.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    return place


def ids_by_trust(place: Place) -> dict[str, list[int]]:
    """Ids of HAN with and without trust_remote_code, in a process of its own: one that has
    imported vLLM knows another class of configuration."""
    code = (
        "import json, sys; from pathlib import Path; from kimi_eagle.verifier import Verifier\n"
        "opened = {t: Verifier(Path(sys.argv[1]), t).tokenizer() for t in (False, True)}\n"
        "ask = lambda t: list(t(sys.argv[2], add_special_tokens=False)['input_ids'])\n"
        "print(json.dumps({str(t): ask(tokenizer) for t, tokenizer in opened.items()}))\n"
    )
    command = [sys.executable, "-c", code, str(place.model), HAN]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def state(place: Place, rule: str) -> str:
    return next(v.state for v in judge(place.facts(), rules().values()) if v.rule.id == rule)


def test_without_its_code_the_tokenizer_opens_and_gives_other_ids(kimi_like: Place):
    found = ids_by_trust(kimi_like)
    assert found["True"] == list(HAN.encode())  # no merge across the border of Han
    assert found["False"] == [258]  # transformers raises nothing: its own conversion, one token
    for trusted, expected in ((True, "ok"), (False, "problem")):
        kimi_like.recipe["verifier"]["trust_remote_code"] = trusted
        assert state(kimi_like, "tokenizer-own-code") == expected
