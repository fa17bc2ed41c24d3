"""The recipe: what a run does, as one typed, frozen object read from one TOML file.

Reads `jobs/*.toml`; writes nothing. Every field has its meaning, unit and default here (those about
jobs, engines, training and the benchmark in `recipe_*.py`) and nowhere else. Where a run takes
place (partition, mounts) is the site file's matter.

Relative paths count from the recipe's own folder, `~` is the home directory: a recipe means the
same from any working directory. The price: a recipe that is moved must take its data along.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from kimi_eagle.errors import UsageError
from kimi_eagle.provenance import image_digest
from kimi_eagle.recipe_benchmark import BenchmarkSection
from kimi_eagle.recipe_engine import EngineSection, StageEngineSection
from kimi_eagle.recipe_jobs import STAGES as STAGES
from kimi_eagle.recipe_jobs import ContainerSection, NotifySection, SlurmSection
from kimi_eagle.recipe_train import DraftSection as DraftSection
from kimi_eagle.recipe_train import TrainSection
from kimi_eagle.typed_toml import Section, absolute_path, located, read_toml, stem, validated


class VerifierSection(Section):
    """The target model whose decoding the draft will speed up."""

    path: str
    """Local directory with config, tokenizer and safetensors shards. Never a hub name."""
    trust_remote_code: bool = False
    """Run Python files found in the verifier's directory (tokenizer, config). Off unless asked."""


class TemplateSection(Section):
    """How conversations become tokens; one block for regenerate, prepare and benchmark alike."""

    chat_template: str | None = None
    """Path of a Jinja file used instead of the verifier's own chat template."""
    thinking: bool | None = None
    """Value of the template's thinking argument; unset leaves the template's own default."""
    thinking_argument: str = "thinking"
    """Name under which the template reads `thinking` (Kimi: thinking, Qwen: enable_thinking)."""
    tools: bool = True
    """Pass a row's `tools` to the template. False refuses rows that carry tools."""
    arguments: dict[str, str | int | float | bool] = {}
    """Further arguments for the template; one that it never reads is refused."""


class SourceSection(Section):
    """One file or folder of prompts or conversations."""

    path: str
    """JSONL, JSON or Parquet file, or a folder holding such files in name order."""
    name: str | None = None
    """Name in counts and reports; default the file's stem."""
    format: Literal["auto", "messages", "conversations", "prompt", "tokens"] = "auto"
    """messages (OpenAI), conversations (ShareGPT), prompt (one text) or tokens (pre-tokenised
    Parquet with input_ids and loss_mask); auto looks at the columns."""
    weight: float | None = Field(default=None, gt=0)
    """Share relative to the other weighted sources; no row is repeated, so the scarcest source
    sets the amount. Unset: all rows are taken."""
    limit: int | None = Field(default=None, gt=0)
    """Rows taken at most, the first ones of the seeded order."""
    license: str | None = None
    """Its licence, for the cards of `kimi-eagle export`. In no key."""


class RegenerateSection(Section):
    """The target answers every prompt, so that the draft learns the target's own words."""

    enabled: bool = True
    """False: the answers in the sources are used as they are (prepare reads the sources)."""
    max_tokens: int = Field(default=256, ge=1)
    """Answer length at most, tokens a turn."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off."""
    unit_tokens: int = Field(default=4_000_000, ge=1)
    """Prompt tokens + max_tokens of the conversations in one unit, at most."""
    engine: StageEngineSection = StageEngineSection()


class PrepareSection(Section):
    """Conversations to token samples: template, loss mask, shuffle, units."""

    max_length: int = Field(default=2048, ge=2)
    """Samples longer than this many tokens are handled as `long_samples` says."""
    long_samples: Literal["truncate", "reject"] = "truncate"
    """truncate keeps the first max_length tokens (dropped if no loss token is left)."""
    keep_truncated_answers: bool = False
    """Keep samples whose answer ended at max_tokens instead of its end-of-turn token."""
    max_reject_share: float = Field(default=0.01, ge=0, le=1)
    """Share of input rows that may be rejected before the run stops."""
    unit_tokens: int = Field(default=4_000_000, ge=1)
    """Tokens of one part, which is one unit of extract."""


class ExtractSection(Section):
    """The verifier's hidden states for every sample."""

    layers: tuple[int, ...]
    """Ids k of 'the state entering layer k', ascending; the last one is the number of layers:
    the state after the last layer, before the final norm (target of the loss)."""
    probe_min_agreement: float = Field(default=0.9, ge=0, le=1)
    """Share of positions at which norm + lm_head of the last state must name the next token: the
    engine's own after each sample, and those of answers that the verifier wrote greedily."""
    codec: Literal["raw", "lossless", "fp8"] = "raw"
    """How states lie on the disk. raw: bfloat16. lossless: the same bits in 0.71 of the bytes.
    fp8: half the bytes, rounded (e4m3, a scale a token and layer). raw and lossless may be mixed in
    one run: a change between them makes nothing undone."""
    engine: StageEngineSection = StageEngineSection()


class VocabSection(Section):
    """The draft's reduced vocabulary."""

    draft_vocab_size: int = Field(ge=2)
    """Tokens the draft can name; must not exceed the verifier's vocabulary."""
    force_tokens: tuple[int, ...] = ()
    """Token ids always included, besides the tokenizer's special tokens."""
    force_special: bool = True
    """Always include control, tool and thinking tokens of the tokenizer."""
    mapping: str | None = None
    """Folder with a mapping made before (`kimi-eagle vocab import` or `vocab build`), taken as it
    is instead of counting; the run's own tokens are counted for its coverage alone."""


class ContractsSection(Section):
    """What `kimi-eagle check` and the stages' openings take as known."""

    accepted: tuple[str, ...] = ()
    """Ids of rules whose problems are meant to be so: told, but nothing stops. In no key."""


class CardSection(Section):
    """What the cards of `kimi-eagle export` say and no file of the run knows. In no key."""

    license: str | None = None
    """Licence of the draft, as the Hugging Face hub names it; unset: that of the verifier."""
    base_model: str | None = None
    """Name of the verifier on the hub (owner/name); its path here means nothing elsewhere."""


class Recipe(Section):
    """A whole recipe file; `load` reads one."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Names the run directory (`runs/NAME`) and the jobs."""
    seed: int = 0
    """Seed of shuffle, choice of rows, sampling and training."""
    allow_rejected: float = Field(default=0.0, ge=0, le=1)
    """Share of samples that may be rejected or lie in failed units when a gate opens."""
    verifier: VerifierSection
    template: TemplateSection = TemplateSection()
    sources: tuple[SourceSection, ...] = Field(min_length=1)
    engine: EngineSection = EngineSection()
    regenerate: RegenerateSection = RegenerateSection()
    prepare: PrepareSection = PrepareSection()
    extract: ExtractSection
    vocab: VocabSection
    train: TrainSection = TrainSection()
    benchmark: BenchmarkSection
    contracts: ContractsSection = ContractsSection()
    slurm: SlurmSection = SlurmSection()
    notify: NotifySection = NotifySection()
    container: ContainerSection = ContainerSection()
    card: CardSection = CardSection()

    @model_validator(mode="after")
    def _agree(self) -> Recipe:
        layers = self.extract.layers
        if len(layers) < 2 or list(layers) != sorted(set(layers)) or layers[0] < 0:
            raise ValueError("extract.layers: expected at least 2 ascending distinct ids >= 0")
        for stage, needed in (
            ("extract", self.prepare.max_length),
            ("regenerate", self.regenerate.max_tokens),
            ("benchmark", self.benchmark.max_tokens),
        ):
            length = self.engine_for(stage).max_model_len
            unused = stage == "regenerate" and not self.regenerate.enabled
            if length <= needed and not unused:
                name = "prepare.max_length" if stage == "extract" else f"{stage}.max_tokens"
                raise ValueError(
                    f"{name} {needed} needs max_model_len > {needed} in [{stage}.engine], "
                    f"got {length}"
                )
        for key, sources in (
            ("sources", self.sources),
            ("benchmark.sources", self.benchmark.sources),
        ):
            names = [s.name or stem(s.path) for s in sources]
            if len(set(names)) != len(names):
                raise ValueError(f'{key}: names must differ, got {names}; set name = "..."')
        return self

    def engine_for(self, stage: str) -> EngineSection:
        """Engine settings of a stage: `[engine]` with the stage's own keys laid over it."""
        own = getattr(getattr(self, stage), "engine", StageEngineSection())
        return self.engine.model_copy(update=own.model_dump(exclude_none=True))


def load(path: str | Path) -> Recipe:
    """Read and check a recipe file; relative paths become absolute.

    Raises UsageError naming file, key, what was expected and the nearest known key.
    """
    path = Path(path)
    if image_digest() and (asked := os.environ.get("KIMI_EAGLE_ASKED_RECIPE")):
        # Read outside: the links and homes in it mean nothing in an image (containers/start.py).
        return parse(json.loads(asked), where=path, base=path.parent)
    data = read_toml(path, "recipe", Path("jobs"))
    return parse(data, where=path, base=path.resolve().parent)


def input_paths(recipe: Recipe) -> dict[str, str]:
    """Every file and folder that the recipe reads, by the key that names it."""
    paths = {"verifier.path": recipe.verifier.path}
    paths |= recipe.benchmark.paths
    paths |= {f"sources.{s.name}.path": s.path for s in recipe.sources}
    if recipe.template.chat_template:
        paths["template.chat_template"] = recipe.template.chat_template
    if recipe.vocab.mapping:
        paths["vocab.mapping"] = recipe.vocab.mapping
    if recipe.train.from_:
        paths["train.from"] = recipe.train.from_
    return paths


def check_inputs(recipe: Recipe) -> None:
    """UsageError for the first path of the recipe that does not exist; reads no content."""
    for key, path in input_paths(recipe).items():
        if not Path(path).exists():
            raise UsageError(f"{key} names nothing: {path}", where=recipe.name)


def parse(data: dict[str, Any], *, where: object, base: Path) -> Recipe:
    """Check recipe data; `base` is the folder that relative paths count from."""
    return _absolute(validated(Recipe, data, where), base)


def _absolute(recipe: Recipe, base: Path) -> Recipe:
    def full(text: str) -> str:
        return absolute_path(text, base)

    template, vocab, train = recipe.template, recipe.vocab, recipe.train
    if template.chat_template:
        template = template.model_copy(update={"chat_template": full(template.chat_template)})
    if vocab.mapping:
        vocab = vocab.model_copy(update={"mapping": full(vocab.mapping)})
    if train.from_:
        train = train.model_copy(update={"from_": full(train.from_)})
    return recipe.model_copy(
        update={
            "verifier": recipe.verifier.model_copy(update={"path": full(recipe.verifier.path)}),
            "template": template,
            "vocab": vocab,
            "train": train,
            "sources": located(recipe.sources, full, stem),
            "benchmark": recipe.benchmark.absolute(full),
        }
    )
