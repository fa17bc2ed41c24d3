"""The real thing: a draft beside the verifier and alone, in real vLLM, each in its own process.

The draft is an untrained one made by speculators; KIMI_EAGLE_TEST_DRAFT names another directory
(a trained draft/ for the same verifier) to be put through the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kimi_eagle import recipe as recipes
from kimi_eagle.bench import measure, results, telling
from kimi_eagle.capture.settings import environment
from kimi_eagle.errors import UsageError
from kimi_eagle.verifier import Verifier, open_verifier

K, MAX_TOKENS = 3, 24
COLD = 0.02
"""A temperature at which a token a tenth of a logit behind the first has a chance of 0.7%."""
QUESTIONS = ["What is rain?", "Name three animals.", "Count from one to ten.", "Who are you?"]


pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def verifier(verifier_dir: Path) -> Verifier:
    return open_verifier(verifier_dir)


@pytest.fixture(scope="module")
def draft(verifier: Verifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft under test, at a path other than the one where it was made."""
    folder = tmp_path_factory.mktemp("draft")
    copied = folder / "copied"
    given = os.environ.get("KIMI_EAGLE_TEST_DRAFT")
    if given:
        shutil.copytree(given, copied)
        return copied
    return shutil.move(make(verifier, folder / "made", ", . the\n and of 1 a to is"), copied)


@pytest.fixture(scope="module")
def other(verifier: Verifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that knows other words."""
    return make(verifier, tmp_path_factory.mktemp("other") / "rare", " zebra Quebec fjord yacht")


def make(verifier: Verifier, place: Path, words: str) -> Path:
    ids = verifier.tokenizer().encode(words, add_special_tokens=False)
    program = Path(__file__).with_name("drafts.py")
    args = [sys.executable, program, verifier.path, place, *ids]
    subprocess.run(list(map(str, args)), check=True, capture_output=True)
    return place


def recipe_for(folder: Path, verifier: Verifier, other: Path) -> recipes.Recipe:
    held_out = folder / "held.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": q}) + "\n" for q in QUESTIONS))
    return recipes.parse(
        {
            "name": "serving",
            "verifier": {"path": str(verifier.path)},
            "sources": [{"path": "unused.jsonl"}],
            "engine": {"max_model_len": 256, "max_num_batched_tokens": 256, "cpu_kv_cache_gib": 1},
            "prepare": {"max_length": 255},
            "regenerate": {"enabled": False},
            "extract": {"layers": [2, 15, 27, 30]},
            "vocab": {"draft_vocab_size": 8},
            "benchmark": {
                "prompts": str(held_out),
                "k": K,
                "sweep_k": [1],
                "max_tokens": MAX_TOKENS,
                "batch_sizes": [1, 4],
                "sampling": [{"temperature": 0.8, "top_p": 0.95}, {"temperature": COLD}],
                "against": [str(other)],
                "engine": {"dtype": "float32"},
            },
        },
        where="serving.toml",
        base=folder,
    )


@pytest.fixture(scope="module")
def benchmark(
    verifier: Verifier, draft: Path, other: Path, tmp_path_factory: pytest.TempPathFactory
):
    """(results, folder, progress) of one real benchmark, stopped in its middle once."""
    folder = tmp_path_factory.mktemp("bench")
    told: list[tuple[float, int]] = []
    recipe = recipe_for(folder, verifier, other)
    measurements = folder / "measurements"

    def stop(share: float, _tokens: int) -> None:
        told.append((share, 0))
        if done(measurements):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        results.run_benchmark(recipe, verifier, draft, folder, on_progress=stop)
    first = {path: path.stat().st_mtime_ns for path in done(measurements)}
    assert len(first) == 1
    told.clear()
    lines: list[str] = []
    found = results.run_benchmark(
        recipe,
        verifier,
        draft,
        folder,
        on_plan=lines.extend,
        on_progress=lambda share, tokens: told.append((share, tokens)),
    )
    assert lines[0].startswith("4 engine loads, 14 measurements of 4 prompts")
    assert lines[1].endswith("(1 done before)") and len(lines) == 5
    assert len(done(measurements)) == 14
    assert all(path.stat().st_mtime_ns == before for path, before in first.items())
    print("\n".join(telling.summary(found)))
    return found, folder, told


def done(folder: Path) -> list[Path]:
    return sorted(folder.glob("*-????????????????.json"))


def test_outputs_are_identical_and_figures_agree_with_the_tokens(benchmark, draft: Path) -> None:
    found, folder, _ = benchmark
    assert found["identical_outputs"] is True
    details = found["details"]
    assert details["identical_prompts"] == len(QUESTIONS) and details["dtype"] == "float32"
    assert found == json.loads((folder / "results.json").read_text())
    if "KIMI_EAGLE_TEST_DRAFT" not in os.environ:
        assert 1.0 <= found["acceptance_length"] < 1.5  # noise over ten common tokens
    per_position = found["acceptance_per_position"]
    assert len(per_position) == K and sorted(per_position, reverse=True) == per_position
    assert found["acceptance_length"] == pytest.approx(1 + sum(per_position))
    (whole,) = details["by_source"].values()  # from each request's own counts
    for name in ("acceptance_length", "acceptance_per_position"):
        assert whole[name] == pytest.approx(found[name])
    for row in [*details["batch_sizes"], *details["sweeps"]]:
        # The prompt's own step gives the first token; each draft gives one and what it got right;
        # of a last draft's tokens up to k may fall behind max_tokens.
        steps = row["output_tokens"]["draft"] - len(QUESTIONS)
        made = row["drafts"] + row["accepted_tokens"]
        assert steps <= made <= steps + row["k"] * len(QUESTIONS)
        if not row["temperature"]:
            assert row["identical_prompts"] == len(QUESTIONS)
    assert {p["finish_reason"] for p in details["prompts"]} <= {"length", "stop"}
    assert details["draft"] == str(draft)
    assert [f["share"] for f in details["floor"]] == [1.0]


def test_what_else_was_asked_for_is_measured(benchmark, other: Path) -> None:
    details = benchmark[0]["details"]
    kinds = [(r["draft"], r["k"], r["batch_size"], r["temperature"]) for r in details["sweeps"]]
    rare = other.name
    assert kinds == [
        ("draft", K, 1, 0.8), ("draft", K, 1, COLD),
        (rare, K, 1, 0.0), (rare, K, 4, 0.0), (rare, K, 1, 0.8), (rare, K, 1, COLD),
        ("draft", 1, 1, 0.0), ("draft", 1, 4, 0.0),
    ]  # fmt: skip
    assert [len(r["acceptance_per_position"]) for r in details["sweeps"]] == [K] * 6 + [1] * 2
    assert list(details["drafts"]) == ["draft", rare]
    if "KIMI_EAGLE_TEST_DRAFT" not in os.environ:
        assert details["sweeps"][2]["acceptance_length"] == 1.0  # nobody speaks of zebras
    sampled = details["sweeps"][0]
    assert sampled["identity"] is None and 1.0 <= sampled["acceptance_length"] <= K + 1
    assert [e["draft"] for e in details["engines"]] == [None, "draft", rare, "draft"]


def test_cold_sampling_with_a_draft_is_nearly_greedy(benchmark) -> None:
    """It is not where the temperature is lost on its way to the sampler (capture/vllm_cpu.py)."""
    found, folder, _ = benchmark
    runs = {}
    for path in done(folder / "measurements"):
        told = json.loads(path.read_text())
        runs[told["digest"]] = told["run"]["tokens"]
    for engine in found["details"]["engines"][:3]:
        greedy, _, _, cold = (runs[digest] for digest in engine["measurements"])
        same = sum(a == b for a, b in zip(greedy, cold, strict=True))
        assert same >= len(QUESTIONS) - 1, engine["draft"]


def test_times_of_each_request_add_up(benchmark) -> None:
    """vLLM's time to the first token and ours to the whole answer, one prompt after another."""
    found, folder, _ = benchmark
    single, wide = found["details"]["batch_sizes"]
    for kind in ("draft", "baseline"):
        assert single["mean_in_flight"][kind] == pytest.approx(1.0, abs=0.02)
        assert 1.5 < wide["mean_in_flight"][kind] <= 4.0
    for path in done(folder / "measurements"):
        run = json.loads(path.read_text())["run"]
        assert run["warm_up"]["prompts"] in (1, 4) and run["warm_up"]["tokens"] > 0
        for tokens, whole, first, later in zip(
            run["tokens"],
            run["each_seconds"],
            run["first_token_seconds"],
            run["token_seconds"],
            strict=True,
        ):
            assert 0 < first < whole
            assert first + later * (len(tokens) - 1) == pytest.approx(whole, rel=0.1, abs=0.02)


def test_some_noise_is_accepted(benchmark) -> None:
    """Zero everywhere would mean that draft ids are not mapped to the verifier's."""
    found, _, _ = benchmark
    assert sum(row["accepted_tokens"] for row in found["details"]["batch_sizes"]) > 0


def test_progress_grows_to_the_end(benchmark) -> None:
    found, _, told = benchmark
    shares, tokens = [t[0] for t in told], [t[1] for t in told]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0)
    rows = [*found["details"]["batch_sizes"], *found["details"]["sweeps"]]
    made = sum(r["output_tokens"]["draft"] for r in rows)
    own = [r for r in rows if (r["draft"], r["k"]) == ("draft", K)]
    made += sum(r["output_tokens"]["baseline"] for r in own)
    assert tokens == sorted(tokens) and tokens[-1] == made


def test_what_is_finished_is_not_measured_again(
    benchmark, verifier: Verifier, draft: Path, other: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found, before, _ = benchmark
    folder = shutil.copytree(before, tmp_path / "bench")
    (folder / "results.json").unlink()
    recipe = recipe_for(folder, verifier, other)

    def forbidden(*_: object) -> int:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(measure, "_run_child", forbidden)
    assert results.run_benchmark(recipe, verifier, draft, folder) == found
    next(p for p in done(folder / "measurements") if p.name.startswith("baseline")).unlink()
    with pytest.raises(AssertionError, match="an engine was started"):
        results.run_benchmark(recipe, verifier, draft, folder)


def test_a_place_that_cannot_be_written_is_told_before_an_engine_loads(
    verifier: Verifier, draft: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    recipe = recipe_for(tmp_path, verifier, other)
    monkeypatch.setattr(measure, "_run_child", None)
    with pytest.raises(UsageError, match="cannot be written"):
        results.run_benchmark(recipe, verifier, draft, tmp_path / "file" / "bench")


# ---------------------------------------------------------- the draft's path alone, plain vLLM


def plain_environment(folder: Path) -> dict[str, str]:
    """vLLM's own environment, without this package; its command line wants a distribution named
    `vllm` with "cpu" in its version (vllm/platforms/__init__.py), which vllm-cpu is not."""
    section = recipes.EngineSection(dtype="float32", cpu_kv_cache_gib=1)
    stub = folder / "vllm-0.31.0+cpu.dist-info"
    stub.mkdir()
    (stub / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0+cpu\n")
    return os.environ | environment(section) | {"PYTHONPATH": str(folder)}


@contextlib.contextmanager
def served(draft: Path, folder: Path) -> Iterator[str]:
    """`vllm serve DRAFT`: the address of the running server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", str(draft), "--dtype", "float32",
        "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "256",
        "--max-num-seqs", "4",
    ]  # fmt: skip
    log = folder / "serve.log"
    with log.open("w") as sink:
        server = subprocess.Popen(
            command, stdout=sink, stderr=sink, env=plain_environment(folder), cwd=folder
        )
    try:
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 400
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def test_vllm_serve_loads_the_draft_alone(
    benchmark, verifier: Verifier, draft: Path, tmp_path: Path
) -> None:
    found, folder, _ = benchmark
    ids = verifier.tokenizer().apply_chat_template(
        [{"role": "user", "content": QUESTIONS[0]}], add_generation_prompt=True, return_dict=False
    )
    body = {
        "model": str(draft), "prompt": ids, "max_tokens": MAX_TOKENS, "temperature": 0,
        "return_token_ids": True,
    }  # fmt: skip
    with served(draft, tmp_path) as address:
        request = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            choice = json.load(reply)["choices"][0]
        with urllib.request.urlopen(f"{address}/metrics", timeout=30) as reply:
            metrics = reply.read().decode()
    measured = [json.loads(p.read_text()) for p in done(folder / "measurements")]
    (alone,) = (
        m
        for m in measured
        if m["kind"] == "baseline"
        and m["case"] == {"batch_size": 1, "temperature": 0.0, "top_p": 1.0}
    )
    assert choice["token_ids"] == alone["run"]["tokens"][0]
    drafts = [m for m in metrics.splitlines() if m.startswith("vllm:spec_decode_num_drafts_total")]
    assert drafts and float(drafts[0].split()[-1]) > 0
