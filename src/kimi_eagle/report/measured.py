"""The report's tables on the benchmark: every cell is one value of results.json (shown.Place)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from kimi_eagle.report.acceptance import name_of, rows, sampling, spread
from kimi_eagle.report.shown import MISSING, Place
from kimi_eagle.report.svg import h
from kimi_eagle.report.tables import folded, quiet, section, table


def _by_load(results: Place) -> list[tuple[Element, list[Place]]]:
    """(heading, rows) of each draft and k: what one engine load measured."""
    loads: dict[tuple[str, str], list[Place]] = {}
    for row in rows(results):
        loads.setdefault((row.to("draft").text, row.to("k").text), []).append(row)
    found = []
    for (draft, _), of in loads.items():
        k = [", k = ", of[0].to("k").figure()] if of[0].to("k") else []
        found.append((h("h3", name_of(draft), *k), of))
    return found


def _case(row: Place) -> Element:
    """What the row is of, in one short cell that stays in sight."""
    how = sampling(row)
    more = f", {how}" if how != "greedy" else ""
    return h("span", "batch ", row.to("batch_size").figure(), more)


def _tables(
    results: Place, titles: Sequence[str], cells: Callable[[Place], list[Any]]
) -> list[Element]:
    """One table a load, each with its heading; rows of which there is nothing to tell left out."""
    found: list[Element] = []
    for heading, of in _by_load(results):
        told = [[_case(row), *of_row] for row in of if (of_row := cells(row))]
        if told:
            found += [heading, table(("", *titles), told, words=1)]
    return found


def speed_table(results: Place) -> Element | None:
    """Acceptance and speed of every row."""

    def cells(row: Place) -> list[Any]:
        return [
            row.to("acceptance_length").figure(".3f"),
            spread(row, ".3f", "acceptance_length"),
            row.to("speedup").figure(".2f", "×"),
            spread(row, ".2f", "speedup"),
            row.to("tokens_per_second", "baseline").figure(),
            row.to("tokens_per_second", "draft").figure(),
            _share(row),
            row.to("prompts").figure(),
            row.to("left_out").figure(),
            row.to("output_tokens", "draft").figure(),
        ]

    titles = (
        "acceptance length", "95 %", "speed-up", "95 %", "tokens/s without", "tokens/s with",
        "identical", "prompts", "loops left out", "tokens",
    )  # fmt: skip
    found = _tables(results, titles, cells)
    return section("Acceptance and speed", *found) if found else None


def _share(row: Place) -> Element | str:
    same = row.to("identical_prompts")
    if same.amount is None:
        return MISSING
    of = row.to("identity", "prompts")
    return h("span", same.figure(), *([" of ", of.figure()] if of else []))


def latency_table(results: Place) -> Element | None:
    """Time to the first token and per further token, without and with the draft."""

    def cells(row: Place) -> list[Any]:
        names = [n for n in ("time_to_first_token", "time_per_output_token") if row.to(n)]
        return [cell for n in names for cell in _times(row, n)] if len(names) == 2 else []

    titles = []
    for what in ("first token", "each further"):
        titles += [f"{what}, without", "p90", f"{what}, with", "p90"]
    found = _tables(results, titles, cells)
    note = quiet("Seconds: median and 90th percentile over prompts.")
    return folded("Latency", note, *found) if found else None


def _times(row: Place, name: str) -> list[Element]:
    kinds = [row.to(name, kind) for kind in ("baseline", "draft")]
    return [kind.to(which).figure() for kind in kinds for which in ("median", "p90")]


def position_table(results: Place) -> Element | None:
    """Acceptance at each position: of all drafts, and of those accepted so far."""
    head = results.to("details", "batch_sizes", 0)
    source = results if results.to("intervals") else head
    found = []
    for i, place in enumerate(results.to("acceptance_per_position").each()):
        found.append(
            [
                f"position {i + 1}",
                place.figure(".3f"),
                spread(source, ".3f", "acceptance_per_position", i),
                results.to("details", "conditional_acceptance", i).figure(".3f"),
                spread(source, ".3f", "conditional_acceptance", i),
            ]
        )
    titles = ("", "accepted up to here", "95 %", "where all before were", "95 %")
    return section("Acceptance by position", table(titles, found, words=1)) if found else None


def draft_table(results: Place) -> Element | None:
    """The drafts that were measured beside each other."""
    found = [
        [name_of(name), about.to("architecture").word(), about.to("path").word(),
         about.to("digest").word()]
        for name, about in results.to("details", "drafts").items()
    ]  # fmt: skip
    if len(found) < 2:
        return None
    return section("Drafts", table(("draft", "architecture", "where", "digest"), found, words=4))


def group_tables(results: Place) -> Element | None:
    """Acceptance by category, and by source where there are several."""
    details = results.to("details")
    groups = {name: details.to(f"by_{name}") for name in ("category", "source")}
    names = {name: [key for key, _ in found.items()] for name, found in groups.items()}
    if names["source"] == names["category"] or len(names["source"]) == 1:
        del groups["source"]
    tables = [_group_table(name, found) for name, found in groups.items() if found]
    if not tables:
        return None
    note = None
    if (later := details.to("later_turns")).value:
        note = h("p", later.figure(), " of the prompts are later turns, after the verifier's own"
                 " answers.", class_="quiet")  # fmt: skip
    return section("Prompts by category", *tables, note)


def _group_table(name: str, groups: Place) -> Element:
    found = []
    for group, of in groups.items():
        found.append(
            [
                group,
                of.to("prompts").figure(),
                of.to("left_out").figure(),
                of.to("acceptance_length").figure(".3f"),
                h("span", *_spaced(of.to("acceptance_per_position").each())),
                of.to("drafts").figure(),
                of.to("output_tokens").figure(),
                of.to("identical_prompts").figure(),
            ]
        )
    titles = (
        name, "prompts", "loops left out", "acceptance length", "by position", "drafts", "tokens",
        "identical prompts",
    )  # fmt: skip
    return table(titles, found, words=1)


def _spaced(places: Iterable[Place]) -> list[Element | str]:
    return [piece for place in places for piece in (place.figure(".2f"), " ")][:-1]


def loop_table(results: Place) -> Element | None:
    """The prompts whose answers repeat themselves, and what they would have made of the figures."""
    looped = [p for p in results.to("details", "prompts").each() if p.to("loop")]
    found = [
        [p.to("name").word(), p.to("acceptance_length").figure(".2f"),
         p.to("loop", "period").figure(), p.to("loop", "start").figure(),
         p.to("loop", "tokens").figure(), p.to("tokens", "draft").figure()]
        for p in looped
    ]  # fmt: skip
    titles = (
        "prompt", "acceptance length", "tokens repeated", "from token", "tokens in the loop",
        "tokens of the answer",
    )  # fmt: skip
    note = quiet("Text that goes round in circles is easily guessed, and not what a server is for.")
    return (
        section("Answers that repeat themselves", note, table(titles, found, 1)) if found else None
    )


def duplicate_table(results: Place) -> Element | None:
    """Benchmark prompts that share runs of words with the training data, if any."""
    near = results.to("details", "near_duplicates")
    if not near.to("prompts").value:
        return None
    found = [
        [e.to("prompt").word(), e.to("trained").word(), e.to("words").word()]
        for e in near.to("examples").each()
    ]
    note = h(
        "p", near.to("prompts").figure(), " of ", near.to("compared").figure(),
        " prompts share 13 words in a row, or all they have, with a prompt of the training data.",
        class_="bad",
    )  # fmt: skip
    titles = ("prompt", "as in", "words in common")
    return section("Trained on what was asked", note, table(titles, found, 3))


def floor_table(results: Place) -> Element | None:
    """How often answers are the same: with the draft, and of the verifier alone."""

    def cells(row: Place) -> list[Any]:
        return _agreement(row.to("identity")) if row.to("identity") else []

    titles = ("identical", "of prompts", "share", "first difference, least", "median")
    found = _tables(results, titles, cells)
    alone = [
        [h("span", "batch ", f.to("batch_size").figure(), " against ", f.to("than").figure()),
         *_agreement(f)]
        for f in results.to("details", "floor").each()
    ]  # fmt: skip
    if alone:
        found += [h("h3", "The verifier alone"), table(("", *titles), alone, words=1)]
    note = quiet(
        "Answers with the draft against those of the verifier alone. A difference is told as the"
        " index of the first token that is another one."
    )
    return folded("Are the outputs the same?", note, *found) if found else None


def _agreement(place: Place) -> list[Element]:
    return [
        place.to("identical_prompts").figure(),
        place.to("prompts").figure(),
        place.to("share").figure(".1%"),
        place.to("first_difference", "least").figure(),
        place.to("first_difference", "median").figure(),
    ]


def count_table(results: Place) -> Element | None:
    """What the figures were made of, and what was left out of them."""

    def cells(row: Place) -> list[Any]:
        kinds = ("baseline", "draft")
        return [
            row.to("drafts").figure(),
            row.to("draft_tokens").figure(),
            row.to("accepted_tokens").figure(),
            row.to("all_prompts", "acceptance_length").figure(".3f"),
            row.to("all_prompts", "speedup").figure(".2f", "×"),
            *(row.to("output_tokens", kind).figure() for kind in kinds),
            *(row.to("seconds", kind).figure() for kind in kinds),
            *(row.to("mean_in_flight", kind).figure() for kind in kinds),
            row.to("warm_up", "draft", "prompts").figure(),
            row.to("warm_up", "draft", "tokens").figure(),
        ]

    titles = (
        "drafts", "tokens drafted", "accepted", "length with loops", "speed-up with loops",
        "tokens without", "tokens with", "seconds without", "seconds with", "in flight without",
        "in flight with", "prompts of the warm-up", "its tokens",
    )  # fmt: skip
    note = quiet("Of all prompts. In flight: requests on average. A warm-up is counted nowhere.")
    found = _tables(results, titles, cells)
    return folded("Counts", note, *found) if found else None


def engine_table(results: Place) -> Element | None:
    """The engine loads, and what the figures were measured with."""
    details = results.to("details")
    found = [
        [name_of(e.to("draft").text) if e.to("draft") else "verifier alone", e.to("k").figure(),
         e.to("load_seconds").figure(), e.to("measure_seconds").figure(),
         e.to("peak_memory_bytes").figure()]
        for e in details.to("engines").each()
    ]  # fmt: skip
    facts = [
        [name.replace("_", " "), details.to(name).word()]
        for name in ("dtype", "max_tokens", "threads", "verifier", "verifier_id", "draft",
                     "draft_digest", "draft_architecture")
        if details.to(name)
    ]  # fmt: skip
    for of in ("machine", "versions"):
        facts += [[name, found.word()] for name, found in details.to(of).items()]
    facts += [["workload", results.to("workload").word()]] if results.to("workload") else []
    if not found and not facts:
        return None
    titles = ("engine", "k", "load s", "measure s", "peak bytes")
    loads = table(titles, found, 1) if found else None
    return folded("Measured with", loads, table(("", ""), facts, words=2) if facts else None)


def prompt_table(results: Place) -> Element | None:
    """Each prompt, folded away."""
    found = [_prompt(p) for p in results.to("details", "prompts").each()]
    if not found:
        return None
    titles = ("prompt", "category", "tokens", "acceptance length", "ended", "identical", "loop")
    whole = table(titles, found, words=2)
    return folded(f"Benchmark prompts ({len(found)})", whole)


def _prompt(place: Place) -> list[Any]:
    differs = place.to("first_difference")
    same: Any = place.to("identical").word()
    if differs.amount is not None:
        same = h("span", "differs at token ", differs.figure())
    return [
        place.to("name").word(),
        place.to("category").word(),
        place.to("tokens", "draft").figure(),
        place.to("acceptance_length").figure(".2f"),
        place.to("finish_reason").word(),
        same,
        "yes" if place.to("loop") else "",
    ]
