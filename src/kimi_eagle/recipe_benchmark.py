"""What the benchmark asks and how: the part of a recipe under `[benchmark]`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kimi_eagle.recipe_engine import StageEngineSection
from kimi_eagle.typed_toml import Section, located, stem

WorkloadFormat = Literal[
    "auto", "messages", "conversations", "prompt", "tokens",
    "mt-bench", "speed-bench", "humaneval", "gsm8k", "math-500",
]  # fmt: skip
"""The forms of a training source, and those of public benchmarks (bench/suites.py)."""


class WorkloadSection(Section):
    """One file or folder of held-out prompts; a row's `category` groups the figures."""

    path: str
    """JSONL, JSON or Parquet file, or a folder holding such files in name order."""
    name: str | None = None
    """Name in results; default the file's stem."""
    format: WorkloadFormat = "auto"
    """auto looks at the columns."""
    category: str | None = None
    """Category of all rows; unset: each row's own, and the name where it has none."""
    limit: int | None = Field(default=None, gt=0)
    """Rows asked at most, the first ones."""


class AgainstSection(Section):
    """Another draft for the same verifier, measured beside the run's own."""

    path: str
    """Directory of a draft that vLLM loads."""
    name: str | None = None
    """Name in results; default the directory's, of a run's draft/ that of the run."""


class SamplingSection(Section):
    """One way to sample answers, measured beside the greedy one."""

    temperature: float = Field(gt=0, le=2)
    """Divides the logits; 1 samples what the verifier says."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Share of the probability that is sampled from (nucleus); 1: all."""


class BenchmarkSection(Section):
    """Acceptance and speed with and without the draft on held-out prompts.

    The engine is loaded once for the verifier alone and once for each draft and each k; every load
    measures all batch sizes greedily. `kimi-eagle benchmark RECIPE --draft DIR --dry-run` counts.
    """

    prompts: str | None = None
    """File or folder of held-out prompts, in any form that `[[benchmark.sources]]` knows."""
    sources: tuple[WorkloadSection, ...] = ()
    """Instead of `prompts`: several workloads, told apart in the results."""
    limit: int | None = Field(default=None, gt=0)
    """Rows asked at most, the first ones; of each of the `sources` that sets no other."""
    k: int = Field(default=3, ge=1, le=64)
    """Draft tokens a step (num_speculative_tokens) of the headline."""
    sweep_k: tuple[Annotated[int, Field(ge=1, le=64)], ...] = ()
    """Other k to measure, as [1, 2, 4, 5]: each is an engine load more, for the run's own draft."""
    max_tokens: int = Field(default=128, ge=2)
    """Tokens of an answer at most."""
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1, 16), min_length=1)
    """Sequences in flight; the first one gives the headline figures."""
    sampling: tuple[SamplingSection, ...] = ()
    """Ways to sample, measured at the first batch size and at `k`: what sampling changes is how
    much is accepted, and that does not depend on the batch."""
    against: tuple[AgainstSection, ...] = ()
    """Other drafts, measured like the run's own at `k`: directories, or tables with `path` and
    `name`. Each is an engine load more."""
    profile: bool = False
    """Whether 64 decoding steps of the verifier alone and of it with the draft, at the first batch
    size, go under torch's profiler after the measurements: shares of communication, attention,
    experts and the rest. Off: it takes some 10 MB a rank, and must be allowed on the GPUs."""
    engine: StageEngineSection = StageEngineSection()

    @model_validator(mode="before")
    @classmethod
    def _plain_against(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("against"), tuple | list):
            return data
        given = (a if not isinstance(a, str) else {"path": a} for a in data["against"])
        return data | {"against": tuple(given)}

    @model_validator(mode="after")
    def _asks_something(self) -> BenchmarkSection:
        if (self.prompts is None) == (not self.sources):
            raise ValueError("expected either prompts or [[benchmark.sources]]")
        for key in ("batch_sizes", "sweep_k", "sampling"):
            if len(set(values := getattr(self, key))) != len(values):
                raise ValueError(f"{key}: expected each value once")
        if self.k in self.sweep_k:
            raise ValueError(
                f"sweep_k: expected others than k = {self.k}, which is measured anyway"
            )
        names = [OWN, *(a.name or name_of_draft(a.path) for a in self.against)]
        if len(set(names)) != len(names):
            raise ValueError(
                f"against: names must differ, also from {OWN!r}, the run's own draft;"
                f' got {names[1:]}; set name = "..."'
            )
        return self

    @property
    def workloads(self) -> tuple[WorkloadSection, ...]:
        """What is asked, with names and limits filled in."""
        given = self.sources or (WorkloadSection(path=str(self.prompts)),)
        return tuple(
            w.model_copy(update={"name": w.name or stem(w.path), "limit": w.limit or self.limit})
            for w in given
        )

    @property
    def paths(self) -> dict[str, str]:
        """What this section reads, by the key that names it."""
        found = {"benchmark.prompts": self.prompts} if self.prompts else {}
        found |= {f"benchmark.sources.{s.name}.path": s.path for s in self.sources}
        return found | {f"benchmark.against.{a.name}.path": a.path for a in self.against}

    def absolute(self, full: Callable[[str], str]) -> BenchmarkSection:
        """The same with names filled in and each path as `full` makes it."""
        changes: dict[str, Any] = {
            "sources": located(self.sources, full, stem),
            "against": located(self.against, full, name_of_draft),
        }
        if self.prompts:
            changes["prompts"] = full(self.prompts)
        return self.model_copy(update=changes)


OWN = "draft"
"""Name of the run's own draft in results."""


def name_of_draft(path: str) -> str:
    """`runs/a/draft` -> `a`; else the directory's own name."""
    parts = Path(path).parts
    return parts[-2] if len(parts) > 1 and parts[-1] == "draft" else Path(path).name
