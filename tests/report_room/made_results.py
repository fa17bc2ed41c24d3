"""results.json for tests of the report: made-up answers, put through the benchmark's own arithmetic
(results.compare), so that the shape is the one that a benchmark writes, whatever it becomes."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import traces

from kimi_eagle.bench import breakdown
from kimi_eagle.bench.draftdir import DraftInfo
from kimi_eagle.bench.measure import Case, Measurement, Run, Spec
from kimi_eagle.bench.plan import Load
from kimi_eagle.bench.results import compare
from kimi_eagle.bench.workload import make_workload

CATEGORIES = ("chat", "code", "maths", "chinese", "tools", "long context")
K = 3
SAMPLED = Case(1, temperature=0.6, top_p=0.95)


def answers(seed: int, loops: tuple[int, ...] = ()) -> list[list[int]]:
    """One answer a prompt, two prompts a category; those of `loops` repeat themselves."""
    luck = random.Random(seed)
    found = [[luck.randrange(9000) for _ in range(luck.randrange(24, 60))] for _ in range(12)]
    for i in loops:
        found[i] = [7, 8, 9, 10] * 14
    return found


def run_of(tokens: list[list[int]], batch: int, rate: float, k: int | None, luck: Any) -> Run:
    """These answers given at `rate` tokens a second; with a draft where k is given."""
    seconds = [len(t) / rate * luck.uniform(0.9, 1.1) for t in tokens]
    histograms = counters = None
    if k is not None:
        histograms = []
        for answer in tokens:
            row = [0] * (k + 1)
            made = 0
            while made < len(answer):
                kept = next((j for j in range(k) if luck.random() > 0.55 - 0.12 * j), k)
                kept = k if answer[:4] == [7, 8, 9, 10] else kept
                row[kept] += 1
                made += kept + 1
            histograms.append(row)
        drafts = sum(map(sum, histograms))
        per_position = [sum(sum(row[j:]) for row in histograms) for j in range(1, k + 1)]
        counters = {
            "num_drafts": drafts,
            "num_draft_tokens": drafts * k,
            "num_accepted_tokens": sum(per_position),
            "num_accepted_tokens_per_pos": per_position,
        }
    return Run(
        seconds=sum(seconds) / batch,
        tokens=tokens,
        finish_reasons=["length" if len(t) > 50 else "stop" for t in tokens],
        counters=counters,
        histograms=histograms,
        each_seconds=seconds,
        first_token_seconds=[0.04 * luck.uniform(1, 2) for _ in tokens],
        token_seconds=[s / len(t) for s, t in zip(seconds, tokens, strict=True)],
        warm_up={"prompts": batch, "tokens": 16 * batch, "seconds": 1.5},
    )


def made_results(dtype: str = "bfloat16", loops: tuple[int, ...] = (3, 8)) -> dict[str, Any]:
    """Three drafts, k 1 to 4, batches 1, 4 and 16, greedy and sampled; fresh, as if read."""
    return json.loads(_text(dtype, loops))


@functools.cache
def _text(dtype: str, loops: tuple[int, ...]) -> str:
    luck = random.Random(17)
    cases = (Case(1), Case(4), Case(16), SAMPLED)
    workload = make_workload(
        [f"held:{i}" for i in range(12)],
        [[i, i + 1, i + 2] for i in range(12)],
        max_tokens=60,
        k=K,
        categories=[CATEGORIES[i // 2] for i in range(12)],
        sources=["own"] * 9 + ["mt-bench"] * 3,
    )
    alone = Spec(
        verifier="/models/verifier", verifier_id="feedbeef", engine={"dtype": dtype, "seed": 3},
        environment={}, workload=workload, cases=cases, versions={"vllm": "0.31.0"},
        machine={"cpu": "a processor", "cores": 16, "gpus": "8 × a GPU"},
    )  # fmt: skip
    plan = [
        Load("draft", replace(alone, draft="/runs/a/draft", draft_digest="d0", k=K)),
        Load("published", replace(alone, draft="/drafts/published", draft_digest="d1", k=K)),
        Load(
            "a-very-long-name-of-another-draft",
            replace(alone, draft="/drafts/other", draft_digest="d2", k=K),
        ),
        *(
            Load("draft", replace(alone, draft="/runs/a/draft", k=k, cases=cases[:3]))
            for k in (1, 2, 4)
        ),
    ]
    texts = {case: answers(0 if case.greedy else 1, loops) for case in cases}
    found = [[_measured(alone, case, run_of(texts[case], case.batch_size, 20, None, luck))
              for case in cases]]  # fmt: skip
    for i, load in enumerate(plan):
        spec, drafted = load.spec, []
        for case in spec.cases:
            tokens = [list(t) for t in texts[case]]
            if dtype != "float32" and case.greedy:
                tokens[5][10] += 1
                tokens[9] = tokens[9][:-2]
            rate = (34 - 3 * i) / (1 + case.batch_size / 20)
            run = run_of(tokens, case.batch_size, rate, spec.k, luck)
            drafted.append(_measured(spec, case, run))
        found.append(drafted)
    info = {
        str(load.draft): DraftInfo(
            Path(str(load.spec.draft)), {"method": "eagle3"}, "Eagle3Speculator", 49152, 576, 4096
        )
        for load in plan
    }
    data = compare([Load(None, alone), *plan], found, info)
    data["details"]["later_turns"] = 4
    data["details"]["near_duplicates"] = {
        "prompts": 1, "compared": 12, "not_compared": 0,
        "examples": [{"prompt": "held:7", "trained": "chat: row 3", "words": "one two three"}],
    }  # fmt: skip
    data["details"]["breakdown"] = {"baseline": _breakdown(1, None), "draft": _breakdown(1, K)}
    return json.dumps(data)


def _breakdown(batch: int, k: int | None) -> dict[str, Any]:
    """Of two ranks with the kernels of traces.cuda, as breakdown.profiled adds to it."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"rank{i}.pt.trace.json" for i in range(2)]
        for file in files:
            file.write_text(json.dumps(traces.cuda(4)))
        found = breakdown.combined(files)
    return found | {"batch_size": batch, "k": k, "context_tokens": 300.5, "asked_steps": 4}


def _measured(spec: Spec, case: Case, run: Run) -> Measurement:
    return Measurement(
        digest=spec.digest(case), kind=spec.kind, case=case, run=run, load_seconds=11.4,
        peak_memory_bytes=4_061_155_328, versions={"vllm": "0.31.0"}, threads=2,
    )  # fmt: skip
