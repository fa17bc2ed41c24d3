"""Uses of vLLM that tests look at afterwards; each runs in a process of its own.

    python engine_runs.py WHAT MODEL FOLDER

Writes FOLDER/WHAT.json (and FOLDER/WHAT.safetensors with states). vLLM can be loaded in one
process only a few times, and what is equal within a process need not be between two.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from kimi_eagle.capture.engine import ExtractionEngine, GenerationEngine
from kimi_eagle.errors import KimiEagleError
from kimi_eagle.recipe import EngineSection

LAYERS = (2, 15, 27, 30)
MAX_TOKENS = 32
QUESTIONS = (
    "What is the capital of France?",
    "Write two sentences about rain.",
    "Name three colours.",
    "Explain what a prime number is.",
    "How do plants make food?",
    "Write a short poem about a river.",
    "Count from one to ten.",
    "What does a compiler do?",
)


def prompts(model: Path) -> list[list[int]]:
    from kimi_eagle.verifier import open_verifier

    tokenizer = open_verifier(model).tokenizer()
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False
        )
        for q in QUESTIONS
    ]


def children() -> list[str]:
    import psutil

    return [" ".join(c.cmdline()) for c in psutil.Process().children(recursive=True)]


def generate(model: Path, folder: Path, briefly: bool = False) -> dict[str, Any]:
    asked = prompts(model)
    seeds = list(range(100, 100 + len(asked)))
    found: dict[str, Any] = {"prompts": asked}
    engine = EngineSection(dtype="float32", max_model_len=256, max_num_seqs=6)
    with GenerationEngine(model, engine, seed=5) as g:
        steps: list[int] = []
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            answers = g.generate(asked, MAX_TOKENS, temperature, 0.95, seeds, steps.append)
            found[name] = [(a.token_ids, a.finish_reason) for a in answers]
            found[name + "_steps"], steps = steps, []
        if briefly:
            return found
        found["again"] = [a.token_ids for a in g.generate(asked, MAX_TOKENS)]
        (alone,) = g.generate(asked[2:3], MAX_TOKENS, 1.0, 0.95, seeds[2:3])
        found["alone"] = alone.token_ids
        other = g.generate(asked, 16, 1.0, 0.95, [s + 1000 for s in seeds])
        found["other_seeds"] = [a.token_ids for a in other]
        found["long_prompt"] = [(asked[0] * 9)[:240]]
        found["room"] = [len(a.token_ids) for a in g.generate(found["long_prompt"], 500)]
        found["none"] = g.generate([], 48)
        found["errors"] = [
            fault(lambda: g.generate([[1] * 256], 4)),
            fault(lambda: g.generate([[]], 4)),
            fault(lambda: g.generate([[7], [49152]], 4)),
            fault(lambda: g.generate([[7]], 4, temperature=0.5)),
        ]
        found["after"] = [a.token_ids for a in g.generate(asked[:2], 8)]
        found["children"] = children()
    found["closed"] = fault(lambda: g.generate([[7]], 4))
    return found


def extract(model: Path, folder: Path, hand_over: str | None) -> dict[str, Any]:
    import torch
    from safetensors.torch import save_file

    batch = json.loads((folder / "batch.json").read_text())
    found: dict[str, Any] = {"digests": []}
    section = EngineSection(max_model_len=512, max_num_batched_tokens=512, max_num_seqs=6)
    spool = Path(tempfile.mkdtemp(dir=folder))
    with ExtractionEngine(model, section, LAYERS, spool, hand_over=hand_over) as engine:
        found["hand_over"] = engine.hand_over
        for _ in range(2):
            digest, seen, progress = hashlib.sha256(), [], []
            states = []
            for i, state, following in engine.extract(batch, progress.append):
                digest.update(state.view(torch.int16).numpy().tobytes())
                seen.append((i, list(state.shape), str(state.dtype), following))
                states.append(state)
            found["digests"].append(digest.hexdigest())
            found.update(seen=seen, progress=progress)
        save_file({"states": torch.cat(states)}, folder / f"{hand_over}.safetensors")
        edges = [[7], list(range(100, 100 + 511)), [9, 9]]
        found["edges"] = [list(s.shape) for _, s, _ in engine.extract(edges)]
        found["none"] = list(engine.extract([]))
        left = engine.extract(batch)
        next(left)
        left.close()
        found["after_leaving"] = hashlib.sha256(
            b"".join(s.view(torch.int16).numpy().tobytes() for _, s, _ in engine.extract(batch))
        ).hexdigest()
        found["errors"] = [
            fault(lambda: list(engine.extract([[1] * 512]))),
            fault(lambda: list(engine.extract([[7], [49152]]))),
        ]
        found["still"] = len(list(engine.extract(batch[:1])))
        found["spooled"] = [p.name for p in spool.rglob("*.safetensors*")]
        found["children"] = children()
    found["spool_left"] = [p.name for p in spool.iterdir()]
    return found


def faults(model: Path, folder: Path) -> dict[str, Any]:
    section = EngineSection(max_model_len=64)
    broken = folder / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "config.json").write_text('{"model_type": "llama", "architectures": ["NoSuch"]}')

    def open_extraction(path: Path, layers: tuple[int, ...]) -> None:
        with ExtractionEngine(path, section, layers, folder):
            pass

    return {
        "errors": [
            fault(lambda: open_extraction(broken, LAYERS)),
            fault(lambda: open_extraction(model, (15, 2))),
            fault(lambda: open_extraction(model, (2, 31))),
        ]
    }


def fault(call) -> list[str] | None:
    try:
        call()
    except KimiEagleError as e:
        return [type(e).__name__, e.line()]
    return None


if __name__ == "__main__":
    what, model, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if what.startswith("generate"):
        result = generate(model, folder, briefly=what != "generate")
    elif what == "faults":
        result = faults(model, folder)
    else:
        result = extract(model, folder, what)
    (folder / f"{what}.json").write_text(json.dumps(result))
