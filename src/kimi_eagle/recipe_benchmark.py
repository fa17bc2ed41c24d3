"""What the benchmark asks and how: the part of a recipe under `[benchmark]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kimi_eagle.recipe_engine import StageEngineSection
from kimi_eagle.typed_toml import Section

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


class BenchmarkSection(Section):
    """Acceptance and speed with and without the draft on held-out prompts."""

    prompts: str | None = None
    """File or folder of held-out prompts, in any form that `[[benchmark.sources]]` knows."""
    sources: tuple[WorkloadSection, ...] = ()
    """Instead of `prompts`: several workloads, told apart in the results."""
    limit: int | None = Field(default=None, gt=0)
    """Rows asked at most, the first ones; of each of the `sources` that sets no other."""
    k: int = Field(default=3, ge=1, le=64)
    """Draft tokens a step (num_speculative_tokens)."""
    max_tokens: int = Field(default=128, ge=1)
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(1,), min_length=1)
    """Sequences in flight; the first one gives the headline figures."""
    engine: StageEngineSection = StageEngineSection()

    @model_validator(mode="after")
    def _asks_something(self) -> BenchmarkSection:
        if (self.prompts is None) == (not self.sources):
            raise ValueError("expected either prompts or [[benchmark.sources]]")
        return self

    @property
    def workloads(self) -> tuple[WorkloadSection, ...]:
        """What is asked, with names and limits filled in."""
        given = self.sources or (WorkloadSection(path=str(self.prompts)),)
        return tuple(
            w.model_copy(
                update={"name": w.name or Path(w.path).stem, "limit": w.limit or self.limit}
            )
            for w in given
        )
