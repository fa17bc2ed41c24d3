"""The report's part on where the time of decoding goes: `details.breakdown` of results.json, which
bench/breakdown.py writes when the recipe asks for it ([benchmark] profile)."""

from __future__ import annotations

from typing import Any
from xml.etree.ElementTree import Element

from kimi_eagle.bench.trace import KINDS
from kimi_eagle.report.shown import Place
from kimi_eagle.report.svg import h, shares
from kimi_eagle.report.tables import figure, folded, quiet, section, table

ENGINES = (("baseline", "verifier alone"), ("draft", "with the draft"))


def _engines(results: Place) -> list[tuple[str, Place]]:
    found = results.to("details", "breakdown")
    return [(name, found.to(key)) for key, name in ENGINES if found.to(key)]


def breakdown_figure(results: Place) -> Element | None:
    """Shares of the kinds of work, one bar an engine."""
    bars = []
    for name, of in _engines(results):
        found = [(kind, of.to("shares", kind)) for kind in KINDS]
        if all(place.amount is not None for _, place in found):
            bars.append((name, [(kind, p.amount or 0.0, p.marks()) for kind, p in found]))
    if not bars:
        return None
    legend = h("p", class_="legend quiet")
    for i, kind in enumerate(KINDS):
        legend.append(h("span", h("i", class_=f"key b{i}"), kind))
    note = "Shares of the time of all kernels while decoding; on a CPU, of all operators"
    return figure("Where a decode step goes", note, shares(bars), legend)


def breakdown_table(results: Place) -> Element | None:
    """The same as figures, with what was recorded; why there is none, where it failed."""
    rows: list[list[Any]] = []
    failed: list[Element] = []
    for name, of in _engines(results):
        if of.to("error"):
            failed.append(h("p", f"{name}: not profiled: ", of.to("error").word(), class_="bad"))
            continue
        if of.to("missing_ranks").value:
            lost = of.to("missing_ranks").figure()
            words = " ranks left no trace; the shares are those of the others."
            failed.append(h("p", f"{name}: ", lost, words, class_="bad"))
        rows.append(
            [
                name,
                *(of.to("shares", kind).figure(".1%") for kind in KINDS),
                of.to("communication_least").figure(".1%"),
                of.to("idle_share").figure(".1%"),
                of.to("device").word("—"),
                of.to("steps", "number").figure(),
                of.to("batch_size").figure(),
                of.to("wall_seconds").figure(),
            ]
        )
    if not rows and not failed:
        return None
    titles = (
        "", *KINDS, "communication, least of any rank", "nothing runs", "device", "steps", "batch",
        "seconds",
    )  # fmt: skip
    note = quiet(
        "Shares, of steps under the profiler, which are slower than the measured ones. On GPUs"
        " communication holds the waiting for other ranks: the least of any rank is without most"
        " of it."
    )
    found = table(titles, rows, words=1) if rows else None
    return section("Decode breakdown", note, *failed, found, *_longest(results))


def _longest(results: Place) -> list[Element]:
    """The kernels or operators that took longest, folded away."""
    found = []
    for name, of in _engines(results):
        rows = [
            [e.to("name").word(), e.to("kind").word(), e.to("seconds").figure(),
             e.to("calls").figure()]
            for e in of.to("longest").each()
        ]  # fmt: skip
        if rows:
            titles = ("kernel or operator", "kind", "seconds", "calls")
            found.append(folded(f"What took longest, {name}", table(titles, rows, words=2)))
    return found


def missing(results: Place) -> list[tuple[str, str]]:
    """(part, why it is not shown)."""
    if not results or _engines(results):
        return []
    return [("Decode breakdown", "[benchmark] profile is off")]
