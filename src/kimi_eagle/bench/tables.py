"""The report's tables: how one is laid out, and those of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from kimi_eagle.bench.svg import h, number


def speed_table(results: Mapping[str, Any] | None) -> Element | None:
    sizes = ((results or {}).get("details") or {}).get("batch_sizes")
    if not sizes:
        return None
    rows = [
        [
            row["batch_size"],
            f"{row['acceptance_length']:.3f}",
            number(row["tokens_per_second"]["baseline"]),
            number(row["tokens_per_second"]["draft"]),
            f"{row['speedup']:.2f}×",
            f"{row['output_tokens']['draft']:,}",
            row["identical_prompts"],
        ]
        for row in sizes
    ]
    titles = (
        "batch", "acceptance length", "tokens/s without", "tokens/s with", "speed-up", "tokens",
        "identical prompts",
    )  # fmt: skip
    return section("Speed by batch size", table(titles, rows, words=0))


def prompt_table(results: Mapping[str, Any] | None) -> Element | None:
    prompts = ((results or {}).get("details") or {}).get("prompts")
    if not prompts:
        return None
    rows = [
        [
            p["name"],
            p.get("category", ""),
            p["tokens"]["draft"],
            f"{length:.2f}" if (length := p.get("acceptance_length")) else "",
            p["finish_reason"],
            "yes" if p["identical"] else f"differs at token {p['first_difference'] + 1}",
        ]
        for p in prompts
    ]
    titles = ("prompt", "category", "tokens", "acceptance length", "ended", "identical")
    found = table(titles, rows, words=2)
    return h("details", h("summary", f"Benchmark prompts ({len(rows)})"), found)


def group_tables(results: Mapping[str, Any] | None) -> Element | None:
    """Acceptance by category, and by source where there are several."""
    details = (results or {}).get("details") or {}
    groups = {name: details.get(f"by_{name}") or {} for name in ("category", "source")}
    if groups["source"].keys() == groups["category"].keys() or len(groups["source"]) == 1:
        del groups["source"]
    tables = [_group_table(name, found) for name, found in groups.items() if found]
    if not tables:
        return None
    note = None
    if later := details.get("later_turns"):
        text = f"{later} of the prompts are later turns, after the verifier's own answers."
        note = h("p", text, class_="quiet")
    return section("Acceptance by category", *tables, note)


def duplicate_note(results: Mapping[str, Any] | None) -> Element | None:
    """Benchmark prompts that share runs of words with the training data, if any."""
    found = ((results or {}).get("details") or {}).get("near_duplicates") or {}
    if not found.get("prompts"):
        return None
    titles = ("prompt", "as in", "words in common")
    rows = [[e["prompt"], e["trained"], e["words"]] for e in found["examples"]]
    note = (
        f"{found['prompts']} of {found['compared']} prompts share 13 words in a row, or all they"
        " have, with a prompt of the training data."
    )
    return section("Trained on what was asked", h("p", note, class_="bad"), table(titles, rows, 3))


def _group_table(name: str, groups: Mapping[str, Mapping[str, Any]]) -> Element:
    rows = []
    for group, found in groups.items():
        length, positions = found["acceptance_length"], found["acceptance_per_position"] or ()
        rows.append(
            [
                group,
                found["prompts"],
                "" if length is None else f"{length:.3f}",
                " ".join(f"{share:.2f}" for share in positions),
                found["drafts"],
                f"{found['output_tokens']:,}",
                found["identical_prompts"],
            ]
        )
    titles = (
        name, "prompts", "acceptance length", "by position", "drafts", "tokens",
        "identical prompts",
    )  # fmt: skip
    return table(titles, rows, words=1)


def section(title: str, *content: Element) -> Element:
    return h("section", h("h2", title), *content)


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]], words: int) -> Element:
    """A table whose first `words` columns are text and the others numbers."""

    def cells(tag: str, values: Sequence[Any]) -> list[Element]:
        return [
            h(tag, plain(v), class_="word" if i < words else "num") for i, v in enumerate(values)
        ]

    head = h("thead", h("tr", *cells("th", titles))) if any(titles) else None
    body = h("tbody", *(h("tr", *cells("td", row)) for row in rows))
    return h("div", h("table", head, body), class_="scroll" if head is not None else "facts")


def flat(values: Mapping[str, Any], prefix: str = "") -> list[list[str]]:
    rows: list[list[str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            rows += flat(value, f"{name} ")
        elif value is not None and value != "":
            rows.append([name, plain(value)])
    return rows


def plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
