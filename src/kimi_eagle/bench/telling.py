"""results.json as lines for a person at a terminal; the page for everybody is the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def summary(results: Mapping[str, Any]) -> list[str]:
    """The headline, what else was measured, and acceptance by category."""
    details = results["details"]
    row, speed = details["batch_sizes"][0], results["tokens_per_second"]
    told = [
        f"acceptance length {results['acceptance_length']:.2f}"
        f"{_range(row['intervals']['acceptance_length'])} at k={results['k']}, batch"
        f" {row['batch_size']}, greedy, {row['prompts']} prompts",
        *_loops(details["loops"]),
        f"outputs identical: {results['identical_outputs']}"
        f" ({details['identical_outputs_reason']})",
        f"{speed['baseline']:.1f} -> {speed['draft']:.1f} tok/s, {row['speedup']:.2f}x"
        f"{_range(row['intervals']['speedup'])}; medians: {_latency(row)}",
    ]
    rows = [*details["batch_sizes"][1:], *details["sweeps"]]
    return [*told, *map(_row, rows), *by_category(results)]


def by_category(results: Mapping[str, Any]) -> Iterator[str]:
    """Acceptance length by category and by source, where there are several."""
    details = results["details"]
    for kind in ("category", "source"):
        for name, found in details[f"by_{kind}"].items() if len(details[f"by_{kind}"]) > 1 else ():
            length = found["acceptance_length"]
            told = "no draft" if length is None else f"{length:.2f}, {found['prompts']} prompts"
            if not found["prompts"]:
                told = "loops only"
            yield f"  {kind} {name}: {told}"


def _loops(found: Mapping[str, Any]) -> list[str]:
    if not found["prompts"]:
        return []
    alone, every = found["acceptance_length"], found["acceptance_length_all"]
    how = "left out" if found["left_out"] else "not left out: too few others"
    return [
        f"{found['prompts']} of {found['of']} answers are loops, {how}; acceptance length"
        f" {_figure(alone)} of them alone, {_figure(every)} of all"
    ]


def _latency(row: Mapping[str, Any]) -> str:
    parts = []
    for name, what in (("time_to_first_token", "to the first token"),
                       ("time_per_output_token", "a token then")):  # fmt: skip
        each = [row[name][kind] for kind in ("baseline", "draft")]
        if all(each):
            before, after = (1000 * one["median"] for one in each)
            parts.append(f"{before:.0f} -> {after:.0f} ms {what}")
    return ", ".join(parts)


def _row(row: Mapping[str, Any]) -> str:
    how = f"{row['draft']} k={row['k']} batch {row['batch_size']}"
    if row["temperature"]:
        how += f" temperature {row['temperature']:g} top-p {row['top_p']:g}"
    same = "" if row["identity"] is None else f", {row['identity']['share']:.0%} identical"
    return (
        f"  {how}: {_figure(row['acceptance_length'])}"
        f"{_range(row['intervals']['acceptance_length'])}, {row['speedup']:.2f}x{same}"
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _range(values: Sequence[float] | None) -> str:
    return f" ({values[0]:.2f}-{values[1]:.2f})" if values else ""
