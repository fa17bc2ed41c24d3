"""What every stage is given: the run, its recipe, its verifier, and the gates.

A gate reads the records of the upstream stages under their *current* keys and has three answers:
open (the records are returned), not yet (`Waiting`), shut (`GateShut`: too much was lost).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle import accepted, files
from kimi_eagle.errors import RunError
from kimi_eagle.ledger import Ledger, Record, Unit
from kimi_eagle.recipe import EngineSection, Recipe
from kimi_eagle.record import RIGHTS, of_the_machine
from kimi_eagle.rundir import RunDir, open_run
from kimi_eagle.stages import module

if TYPE_CHECKING:
    from kimi_eagle.data.sources import Selection
    from kimi_eagle.data.template import ChatTemplate
    from kimi_eagle.verifier import Verifier


class Waiting(RunError):
    """The gate is not open yet: an upstream stage has open units."""

    def __init__(self, stage: str, open_units: int):
        self.stage, self.open_units = stage, open_units
        super().__init__(f"{stage} has {open_units} open units", where="gate")


class GateShut(RunError):
    """The gate stays shut: more was rejected or failed than the recipe allows."""


@dataclass
class Context:
    """One look at a run: inputs are read once, records afresh each time."""

    run: RunDir
    recipe: Recipe
    reading: tuple[str, ...] = ()
    """Stages whose files are about to be read: their gates also look whether all are there."""

    @cached_property
    def verifier(self) -> Verifier:
        from kimi_eagle.verifier import open_verifier

        section = self.recipe.verifier
        return open_verifier(section.path, trust_remote_code=section.trust_remote_code)

    @cached_property
    def template(self) -> ChatTemplate:
        from kimi_eagle.data.template import ChatTemplate

        return ChatTemplate(self.verifier, self.recipe.template)

    @cached_property
    def selection(self) -> Selection:
        """The rows of the sources that this run takes, in the seeded order."""
        from kimi_eagle.data.sources import select

        return select(
            self.recipe.sources,
            self.recipe.seed,
            vocab_size=self.verifier.vocab_size,
            by_prompt=self.recipe.regenerate.enabled,
        )

    def ledger(self, stage: str) -> Ledger:
        return Ledger(self.run.stage(stage))

    def plan(self, stage: str) -> list[Unit]:
        """The units of a stage under the recipe as it is; Waiting while they cannot be known."""
        return module(stage).plan(self)

    def engine(self, stage: str) -> EngineSection:
        return self.recipe.engine_for(stage)

    def engine_parts(self, stage: str) -> dict[str, Any]:
        """The engine settings that belong into keys: what vLLM gets, and its version."""
        from kimi_eagle.capture.engine import settings

        return settings(self.engine(stage))

    def preflight(self) -> None:
        """Open everything that the recipe names, so that no fault shows after an hour's work."""
        from kimi_eagle.bench.plan import check_sampling, open_against
        from kimi_eagle.bench.workload import load_workload

        load_workload(self.recipe, self.template)
        open_against(self.recipe, self.verifier)
        check_sampling(self.recipe)
        if not self.selection.rows:
            faults = {r.rule for r in self.selection.rejects}
            raise RunError(f"no usable row in the sources: {', '.join(sorted(faults)) or 'empty'}")

    def gate(self, stage: str) -> list[Record]:
        """Records of all units of an upstream stage, or Waiting / GateShut."""
        units, ledger = self.plan(stage), self.ledger(stage)
        if open_units := ledger.open_units(units):
            raise Waiting(stage, len(open_units))
        again = f"kimi-eagle retry {self.run.path} makes that unit again"
        try:
            records = ledger.records(units)
        except RunError as e:
            raise GateShut(e.what, where=e.where, fix=again) from None
        self._judge(stage, units, records)
        if stage in self.reading and (fault := self._fault(stage, records)):
            raise GateShut(fault, fix=RIGHTS if of_the_machine(fault) else again)
        return [r for r in records if r.state == "done"]

    def _fault(self, stage: str, records: list[Record]) -> str | None:
        """What is wrong with the files of these records, as far as sizes and marks tell."""
        if fault := next(filter(None, (r.files_whole() for r in records)), None):
            return fault
        if stage == "extract" and self.recipe.train.on_damage == "skip":
            return None  # the reader leaves damaged samples out, one by one
        for record, mark in self.ledger(stage).damaged(records):
            reasons = mark["reasons"]
            more = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
            return f"{stage} unit {record.unit} is damaged: {''.join(reasons[:1])}{more}"
        return None

    def _judge(self, stage: str, units: list[Unit], records: list[Record]) -> None:
        """Compare what was lost with `allow_rejected`, or with what a person accepted since.

        Losses are counted in samples.
        """
        failed = [r for r in records if r.state == "failed"]
        lost = sum(r.counts.get("rejected", 0) for r in records if r.state == "done")
        kept = sum(r.counts.get("samples", 0) for r in records if r.state == "done")
        by_name = {u.name: u for u in units}
        lost += sum(by_name[r.unit].samples for r in failed)
        share = lost / max(1, lost + kept)
        if share > max(self.recipe.allow_rejected, accepted.share_of(self.run, stage)):
            why = f"; unit {failed[0].unit}: {failed[0].info['reasons'][-1]}" if failed else ""
            raise GateShut(
                f"{lost} of {lost + kept} samples rejected or in failed units{why}",
                where=f"gate after {stage}",
                expected=f"a share of at most allow_rejected = {self.recipe.allow_rejected}",
                fix=f"look at {self.run.stage(stage).log}, then kimi-eagle retry {self.run.path};"
                f" to go on without them: kimi-eagle accept {self.run.path} {stage}"
                f" --share {math.ceil(1e4 * share) / 1e4:g} --reason TEXT",
            )


def open_context(path: str | Path) -> Context:
    """An existing run under the recipe that it follows."""
    run = open_run(path)
    return Context(run, run.recipe())


def recipe_digest(recipe: Recipe) -> str:
    """Stands for what a recipe makes: tells a worker of an earlier recipe from one of this.

    How many jobs do it, in what, who is told, and what cards say may change in the middle of a run.
    """
    made_elsewhere: dict[str, Any] = dict.fromkeys(
        ("slurm", "notify", "container", "contracts", "card"), True
    )
    made_elsewhere["sources"] = {"__all__": {"license"}}
    return files.digest(recipe.model_dump(mode="json", exclude=made_elsewhere))


def cut(sizes: list[int], limit: int) -> list[slice]:
    """Cut a sequence into runs whose sizes add up to at most `limit` (a larger item stands alone).

    Depends on the sizes alone, never on workers or timing (DESIGN promise 3).
    """
    slices, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > limit:
            slices.append(slice(start, i))
            start, total = i, 0
        total += size
    if len(sizes) > start:
        slices.append(slice(start, len(sizes)))
    return slices
