"""Input rows that were left out: why, where, how many; and when that is too many.

Writes rejects.jsonl, one JSON object a row: source, file, row (from 1), rule, detail. All rejects
are kept in memory: at the default share of 1% that is nothing, and the file is then written whole.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from kimi_eagle.errors import RowError, RunError

DUPLICATE = "duplicate"
"""Rule of rows seen before: merged data sets have many, and nothing is wrong with them."""


@dataclass(frozen=True)
class Reject:
    """One row that was left out. row counts from 1 (line of a JSONL file, row of a table)."""

    rule: str
    detail: str
    file: str = ""
    row: int = 0
    source: str = ""

    @classmethod
    def of(cls, error: RowError, where: tuple[str, int], source: str) -> Reject:
        """The reject that a RowError raised for the row at `where` (file, row) amounts to."""
        return cls(error.rule, error.detail, where[0], where[1], source)


class RejectLog:
    """Collects rejects and the number of rows read; one log a stage."""

    def __init__(self, max_share: float):
        self.max_share = max_share
        self.rejects: list[Reject] = []
        self.rows = 0

    def count_rows(self, rows: int) -> None:
        """Add to the number of input rows that the share is taken of (good and bad ones)."""
        self.rows += rows

    def add(self, reject: Reject) -> None:
        self.rejects.append(reject)

    def extend(self, rejects: Iterable[Reject]) -> None:
        self.rejects.extend(rejects)

    @property
    def by_rule(self) -> dict[str, int]:
        """Rule -> number of rejects, most frequent first (ties by name)."""
        counts = Counter(r.rule for r in self.rejects)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    @property
    def by_source(self) -> dict[str, dict[str, int]]:
        """Source -> rule -> number of rejects."""
        result: dict[str, Counter[str]] = {}
        for reject in self.rejects:
            result.setdefault(reject.source, Counter())[reject.rule] += 1
        return {name: dict(sorted(counts.items())) for name, counts in sorted(result.items())}

    @property
    def share(self) -> float:
        """Share of input rows with at least one fault: a row may lose several samples. Rejects
        that name no row count one by one; a row seen before is left out but no fault."""
        faults = [r for r in self.rejects if r.rule != DUPLICATE]
        rows = {(r.source, r.file, r.row) for r in faults if r.row}
        lost = len(rows) + sum(not r.row for r in faults)
        return lost / max(self.rows, lost, 1)

    def check(self) -> None:
        """RunError when more than max_share of the rows were rejected; names the three most
        frequent rules, each with an example."""
        if self.share <= self.max_share:
            return
        first = {}
        for reject in self.rejects:
            first.setdefault(reject.rule, reject)
        rules = [
            f"{rule} x{count} (first: {first[rule].file} row {first[rule].row}: "
            f"{first[rule].detail})"
            for rule, count in list(self.by_rule.items())[:3]
        ]
        raise RunError(
            f"{self.share:.1%} of {self.rows} rows rejected: {'; '.join(rules)}",
            expected=f"at most {self.max_share:.1%}",
            fix="mend the rows (rejects.jsonl lists them) or raise prepare.max_reject_share",
        )

    def write(self, path: Path) -> None:
        """Write rejects.jsonl atomically; an empty file says that there were none."""
        from kimi_eagle.files import write_atomic

        lines = [json.dumps(asdict(r), ensure_ascii=False) + "\n" for r in self.rejects]
        write_atomic(path, "".join(lines).encode("utf-8", "backslashreplace"))
