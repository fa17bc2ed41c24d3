"""The report's figures on the benchmark; its tables are in measured.py.

Every figure is one value of results.json (format bench/3, documented in bench/results.py), shown
through shown.Place: this page computes nothing. Results of older formats show what they have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from kimi_eagle.report.shown import MISSING, Place
from kimi_eagle.report.svg import Bar, Series, columns, h, lines, ranges
from kimi_eagle.report.tables import figure, quiet
from kimi_eagle.report.trained import shares

GAIN = "Tokens a verifier step; 1 is what the verifier does alone"
INTERVAL = "; the line through a dot is the 95 % interval over prompts"


# ------------------------------------------------------------------------- headline and notes


def headline(results: Place) -> Element:
    """Three tiles: acceptance, speed, identity."""
    if not results:
        return quiet("Not benchmarked yet.")
    details, speed = results.to("details"), results.to("tokens_per_second")
    row, same = details.to("batch_sizes", 0), results.to("identical_outputs").value
    batch = row.to("batch_size")
    rates = [speed.to("baseline").figure(), " → ", speed.to("draft").figure(), " tokens/s"]
    return h(
        "div",
        _tile(
            "acceptance length",
            results.to("acceptance_length").figure(".2f"),
            _spread_line(results, "acceptance_length", ".2f"),
            h("div", "tokens a verifier step, k = ", results.to("k").figure(), *_over(row)),
        ),
        _tile(
            "speed with the draft",
            details.to("speedup").figure(".2f", "×"),
            _spread_line(results, "speedup", ".2f"),
            h("div", *rates, *([", batch ", batch.figure()] if batch else [])),
        ),
        _tile(
            "identical outputs",
            h("span", "yes" if same is True else "no" if same is False else MISSING),
            h("div", details.to("identical_outputs_reason").text),
            style="good" if same is True else "bad" if same is False else "",
        ),
        class_="tiles",
    )


def _over(row: Place) -> list[Element | str]:
    count = row.to("prompts")
    return [", ", count.figure(), " prompts"] if count.amount is not None else []


def _tile(name: str, value: Element, *more: Element | None, style: str = "") -> Element:
    return h(
        "div",
        h("div", name, class_="quiet"),
        h("div", value, class_=f"big {style}".strip()),
        h("div", *more, class_="quiet"),
        class_="tile",
    )


def _spread_line(results: Place, name: str, form: str) -> Element | None:
    found = spread(results, form, name)
    return h("div", found, " (95 %)") if isinstance(found, Element) else None


def spread(place: Place, form: str, *figure: str | int) -> Element | str:
    """The interval of a figure of results.json or of one of its rows as `low to high`; a dash
    where it has none."""
    low, high = (place.to("intervals", *figure, i) for i in (0, 1))
    if low.amount is None or high.amount is None:
        return MISSING
    return h("span", low.figure(form), " to ", high.figure(form))


def notes(results: Place) -> Element | None:
    """What must be known beside the headline: loops, near-duplicates, the floor."""
    if not results:
        return None
    found = [*_loop_note(results), *_duplicate_note(results), *_floor_notes(results)]
    return h("ul", *found, class_="notes quiet") if found else None


def _loop_note(results: Place) -> Iterable[Element]:
    loops = results.to("details", "loops")
    if not loops.to("prompts").value:
        return
    out = "left out of these figures" if loops.to("left_out").value else "in these figures"
    yield h(
        "li", loops.to("prompts").figure(), " of ", loops.to("of").figure(),
        f" answers repeat themselves and are {out}: alone they have an acceptance length of ",
        loops.to("acceptance_length").figure(".2f"), ", all prompts together ",
        loops.to("acceptance_length_all").figure(".2f"), ". A loop is ",
        loops.to("rule").word(), ".",
    )  # fmt: skip


def _duplicate_note(results: Place) -> Iterable[Element]:
    near = results.to("details", "near_duplicates")
    if not near:
        yield h("li", "Not compared with the training data: near-duplicates are not known.")
    elif near.to("prompts").value:
        yield h(
            "li", near.to("prompts").figure(), " of ", near.to("compared").figure(),
            " prompts are near-duplicates of training data; see below.", class_="bad",
        )  # fmt: skip


def _floor_notes(results: Place) -> Iterable[Element]:
    """Where outputs cannot be claimed identical: how far the verifier agrees with itself."""
    if results.to("identical_outputs").value is not None:
        return
    for floor in results.to("details", "floor").each():
        yield h(
            "li", "The verifier alone gives ", floor.to("identical_prompts").figure(), " of ",
            floor.to("prompts").figure(), " answers unchanged at batch ",
            floor.to("batch_size").figure(), " instead of ", floor.to("than").figure(),
            ": what differs so is not the draft's doing.",
        )  # fmt: skip


# ------------------------------------------------------------------------------------- figures


def by_position(results: Place, validation: Sequence[Mapping[str, Any]]) -> Element | None:
    """Share of drafts accepted up to each position, beside the accuracy in validation."""
    served = [p for p in results.to("acceptance_per_position").each() if p.amount is not None]
    if not served:
        return None
    tested = (shares(line, "val_accuracy") for line in reversed(validation))
    trained = next(filter(None, tested), [])
    markers = [*trained, *[None] * len(served)]
    bars = [
        Bar(
            f"position {i + 1}" if len(served) < 6 else str(i + 1),
            place.amount,
            markers[i],
            *_ends(results.to("intervals", "acceptance_per_position", i)),
            at=place.marks(),
        )
        for i, place in enumerate(served)
    ]
    # A rounded top: drafts of a small model rarely reach half of 1.
    top = math.ceil(10 * max(0.01, *(v for b in bars for v in (b.value, b.high or 0)), *trained))
    note = "Share of drafts whose tokens were accepted up to this position"
    if trained:
        note += "; the line across is the accuracy in validation"
    return figure("Acceptance by position", note, columns(bars, top / 10, "validation"))


def bar_of(label: str, place: Place, style: str = "s0") -> Bar | None:
    """The acceptance length of results.json, or of one of its rows, with its interval."""
    length = place.to("acceptance_length")
    if length.amount is None:
        return None
    low, high = _ends(place.to("intervals", "acceptance_length"))
    return Bar(label, length.amount, low=low, high=high, at=length.marks(), style=style)


def _ends(interval: Place) -> tuple[float | None, float | None]:
    return interval.to(0).amount, interval.to(1).amount


def lengths(title: str, named: Iterable[tuple[str, Place]], *, many: bool = True) -> Element | None:
    """Acceptance lengths as dots, one a row. many: nothing where there is one alone."""
    bars = [bar for name, place in named if (bar := bar_of(name, place))]
    if len(bars) <= many:
        return None
    note = GAIN + (INTERVAL if any(b.low is not None for b in bars) else "")
    return figure(title, note, ranges(bars, "acceptance length", low=1.0))


def by_category(results: Place) -> Element | None:
    groups = results.to("details", "by_category").items()
    return lengths("Acceptance by category", groups, many=False)


def rows(results: Place) -> list[Place]:
    """Every measured row: the own draft by batch size, then all else."""
    details = results.to("details")
    return [*details.to("batch_sizes").each(), *details.to("sweeps").each()]


def greedy(row: Place) -> bool:
    return not row.to("temperature").value


def _at_first_batch(results: Place, keep: Callable[[Place], bool]) -> list[Place]:
    every = rows(results)
    first = every[0].to("batch_size").value if every else None
    return [r for r in every if r.to("batch_size").value == first and keep(r)]


def by_k(results: Place) -> Element | None:
    """Acceptance of the own draft by the number of tokens drafted a step."""
    own = results.to("details", "batch_sizes", 0, "draft").value
    found = _at_first_batch(results, lambda r: greedy(r) and r.to("draft").value == own)
    found.sort(key=lambda r: r.to("k").amount or 0)
    return lengths("Acceptance by k", ((f"k = {r.to('k').text}", r) for r in found))


def by_sampling(results: Place) -> Element | None:
    """Acceptance of the own draft, greedy and sampled."""
    head = results.to("details", "batch_sizes", 0)
    same = [head.to(name).value for name in ("draft", "k")]
    found = _at_first_batch(results, lambda r: [r.to(n).value for n in ("draft", "k")] == same)
    return lengths("Acceptance by sampling", ((sampling(r), r) for r in found))


def by_draft(results: Place) -> Element | None:
    """Acceptance of the own draft and those of `against`."""
    k = results.to("details", "batch_sizes", 0, "k").value
    found = _at_first_batch(results, lambda r: greedy(r) and r.to("k").value == k)
    named = ((r.to("draft").text, r) for r in found)
    return lengths("Drafts compared", ((name_of(name), r) for name, r in named))


def by_batch(results: Place) -> Element | None:
    """Speed-up of each draft against the batch size, at the headline's k, greedy."""
    k = results.to("details", "batch_sizes", 0, "k").value
    drafts: dict[str, list[Place]] = {}
    for row in rows(results):
        sized = row.to("batch_size").amount and row.to("speedup").amount is not None
        if sized and greedy(row) and row.to("k").value == k:
            drafts.setdefault(row.to("draft").text, []).append(row)
    series, sizes = [], set()
    for i, (name, found) in enumerate(drafts.items()):
        found.sort(key=lambda r: r.to("batch_size").amount or 0)
        batches = [r.to("batch_size").amount for r in found]
        points = [
            (math.log2(b), r.to("speedup").amount) for b, r in zip(batches, found, strict=True)
        ]
        sizes |= set(batches)
        at = [r.to("speedup").marks() for r in found]
        series.append(Series(name_of(name), points, f"c{i % 6}", dots=True, at=at))
    if len(sizes) < 2:
        return None
    names = [(math.log2(size), f"{size:g}") for size in sorted(sizes)]
    chart = lines(series, "requests in flight (batch size)", x_names=names, level=1.0)
    return figure(
        "Speed-up against batch size", "Below the dashed line the draft slows down", chart
    )


def sampling(row: Place) -> str:
    """`greedy`, or `T 0.6, top-p 0.95`."""
    if greedy(row):
        return "greedy"
    top = row.to("top_p").amount
    return f"T {row.to('temperature').text}" + (f", top-p {top:g}" if top not in (None, 1) else "")


def name_of(draft: str) -> str:
    """A draft's name for people: the run's own has none of its own in results."""
    return "this draft" if draft in ("", "draft") else draft


def missing(results: Place) -> list[tuple[str, str]]:
    """(part, why it is not shown)."""
    if not results:
        return [("Benchmark", "the stage has not run, or not ended")]
    found = []
    if not results.to("intervals"):
        found.append(("Intervals", "results of an older format, or fewer than two prompts"))
    for part, made, why in (
        ("Acceptance by category", by_category(results), "the prompts have none"),
        ("Speed-up against batch size", by_batch(results), "[benchmark] batch_sizes has one size"),
        ("Acceptance by k", by_k(results), "[benchmark] sweep_k names no other k"),
        ("Acceptance by sampling", by_sampling(results), "[benchmark] sampling is empty"),
        ("Drafts compared", by_draft(results), "[benchmark] against names no other draft"),
    ):
        if made is None:
            found.append((part, why))
    return found
