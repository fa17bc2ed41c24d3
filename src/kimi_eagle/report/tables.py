"""How the report's parts are laid out: a section, a figure, a table, a list of facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from kimi_eagle.report.svg import h


def section(title: str, *content: Element | None) -> Element:
    return h("section", h("h2", title), *content)


def folded(title: str, *content: Element | None) -> Element:
    """A section that opens at a touch: what few look for, out of the way of those who scroll."""
    return h("details", h("summary", title), *content)


def figure(title: str, note: str, *content: Element | None) -> Element:
    return h("figure", h("figcaption", h("h2", title), h("p", note, class_="quiet")), *content)


def quiet(text: str) -> Element:
    """A sentence beside what it explains."""
    return h("p", text, class_="quiet")


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]], words: int) -> Element:
    """A table whose first `words` columns are text and the others numbers.

    A cell is an element (Place.figure) or a plain value. Without titles: a list of facts, whose
    second column takes what room there is.
    """

    def cells(tag: str, values: Sequence[Any]) -> list[Element]:
        return [
            h(
                tag, v if isinstance(v, Element) else plain(v),
                class_="word" if i < words else "num",
            )
            for i, v in enumerate(values)
        ]  # fmt: skip

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
