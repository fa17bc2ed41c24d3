"""Conversations to token samples with a loss mask, beside `speculators prepare-data`.

    python tests/bench/bench_prepare.py [--rows 1000] [--pairs 3] [--model DIR]

Same JSONL file of ShareGPT conversations with given answers (one and two turns), same model, both
in a warm process, imports and tokenizer loaded before the clock starts. Ours: read, check, apply
the template, mask, write the tokens part. Theirs (0.9.0): the function behind prepare-data,
load_and_preprocess_dataset, with vLLM's render server (`vllm launch render`, started before the
clock) and save_to_disk. Their number of workers is what they choose for this machine. Input and
output are compared: every sample of theirs must be among ours, up to their one-row-a-turn layout.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

MODEL = Path("~/.cache/kimi-eagle/models/SmolLM2-135M-Instruct").expanduser()
PROMPTS = Path(__file__).parents[2] / "jobs" / "data" / "prompts.jsonl"


def write_rows(path: Path, rows: int) -> None:
    """Conversations made of the demo's prompts; answers are other prompts, some 100 words."""
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    with open(path, "w") as f:
        for i in range(rows):
            pick = [texts[(i * 7 + k) % len(texts)] for k in range(24)]
            turns = [("human", f"{i}. {pick[0]}"), ("gpt", " ".join(pick[1:12]))]
            if i % 3 == 0:
                turns += [("human", pick[12]), ("gpt", " ".join(pick[13:]))]
            conversation = [{"from": role, "value": text} for role, text in turns]
            f.write(json.dumps({"conversations": conversation}) + "\n")


@contextlib.contextmanager
def render_server(model: Path, folder: Path):
    """vLLM's render server on a free port; a stub says that this vLLM is the CPU build."""
    stub = folder / "stub" / "vllm-0.31.0+cpu.dist-info"
    stub.mkdir(parents=True)
    (stub / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0+cpu\n")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(stub.parent), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = ["launch", "render", str(model), "--host", "127.0.0.1", "--port", str(port)]
    vllm = "import sys; from vllm.entrypoints.cli.main import main; sys.argv[0] = 'vllm'; main()"
    log = open(folder / "server.log", "w")  # noqa: SIM115
    server = subprocess.Popen(
        [
            sys.executable,
            "-c",
            vllm,
            *command,
            "--max-model-len",
            "2048",
            "--uvicorn-log-level",
            "error",
        ],
        env=env,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            if server.poll() is not None:
                raise SystemExit((folder / "server.log").read_text()[-3000:])
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=2)
                break
            time.sleep(1)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def ours(data: Path, out: Path, template) -> int:
    """The path of the prepare stage; returns the number of tokens."""
    from kimi_eagle.data import samples
    from kimi_eagle.data.sources import select
    from kimi_eagle.recipe import SourceSection

    rows = select([SourceSection(path=str(data))], 0).rows
    masked = template.conversations([(r.messages, r.tools) for r in rows])
    found = [
        samples.make_sample(ids, mask, row.source)
        for row, made in zip(rows, masked, strict=True)
        for ids, mask in made
    ]
    found = [samples.fit(s, 2048) for s in found]
    samples.write_part(out / "tokens.parquet", found, {"tokenizer": "t", "template": "t"})
    return sum(len(s.input_ids) for s in found)


def theirs(data: Path, out: Path, model: Path, url: str):
    """What `speculators prepare-data` does after parsing its arguments."""
    from speculators.data_generation.preprocessing import (
        default_preprocessing_workers,
        load_and_preprocess_dataset,
    )

    rows, _ = load_and_preprocess_dataset(
        target_model_path=str(model),
        train_data_paths=[str(data)],
        seq_length=2048,
        build_dataset_num_proc=default_preprocessing_workers(),
        render_endpoint=url,
    )
    rows.save_to_disk(out / "theirs")
    return rows


def compare(part: Path, rows) -> None:
    """Each of their rows is one of our samples cut after one turn, with that turn's loss alone."""
    from kimi_eagle.data.samples import read_samples

    mine = {}
    for sample in read_samples(part):
        ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
        starts = [i for i, on in enumerate(mask) if on and not mask[i - 1]]
        for start in starts:
            end = mask.index(False, start) + 1  # theirs counts the template's newline as answer
            mine[tuple(ids[:end])] = (start, end)
    assert len(rows) == len(mine), (len(rows), len(mine))
    for row in rows:
        ids, mask = row["input_ids"].tolist(), row["loss_mask"].tolist()
        start, end = mine[tuple(ids)]
        assert mask == [0] * start + [1] * (end - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--model", type=Path, default=MODEL)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from kimi_eagle.data.template import ChatTemplate
    from kimi_eagle.recipe import TemplateSection
    from kimi_eagle.verifier import open_verifier

    times: dict[str, list[float]] = {"ours": [], "speculators": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        import speculators.data_generation.preprocessing  # noqa: F401  imports before the clock

        logging.disable(logging.WARNING)
        template = ChatTemplate(open_verifier(args.model), TemplateSection())
        with render_server(args.model, folder) as url:
            for pair in range(-1, args.pairs):  # the first pair warms up and is compared
                data, out = folder / f"rows{pair}.jsonl", folder / f"out{pair}"
                write_rows(data, args.rows)  # a new file: no cache of theirs helps
                out.mkdir()
                start = time.perf_counter()
                tokens = ours(data, out, template)
                mine = time.perf_counter() - start
                with contextlib.redirect_stderr(io.StringIO()):
                    start = time.perf_counter()
                    rows = theirs(data, out, args.model, url)
                    other = time.perf_counter() - start
                if pair < 0:
                    compare(out / "tokens.parquet", rows)
                    continue
                times["ours"].append(mine)
                times["speculators"].append(other)
    for what, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{what:12} {median:8.3f} s  {args.rows / median:8.0f} conversations/s")
    pairs = [b / a for a, b in zip(times["ours"], times["speculators"], strict=True)]
    print(f"{args.rows} conversations, {tokens} tokens")
    print(
        f"ratio speculators / ours: {statistics.median(pairs):.1f} (goal >= 2; median of "
        f"{args.pairs} pairs, {min(pairs):.1f} to {max(pairs):.1f})"
    )


if __name__ == "__main__":
    main()
