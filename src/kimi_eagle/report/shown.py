"""A value of results.json and where it lies: what a report shows can be held against the file.

The report computes nothing of the benchmark: each figure is one value of results.json, written with
its place there in `data-at` (a JSON pointer, RFC 6901). tests/report_room/test_browser.py
reads the page in a browser and compares every one of them.

A value that is missing, or of another kind than expected, shows as a dash: results of older and
newer versions, and of killed runs, are read alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any
from xml.etree.ElementTree import Element

from kimi_eagle.report.svg import h, number

MISSING = "—"


class Place:
    """A value (None: missing) and its JSON pointer. run: which of several results it is of."""

    def __init__(self, value: Any, at: str = "", run: str | None = None):
        self.value, self.at, self.run = value, at, run

    def __bool__(self) -> bool:
        """Whether there is anything to show: missing and empty are the same."""
        return self.value is not None and self.value != {} and self.value != []

    def to(self, *keys: str | int) -> Place:
        """The value below, by keys of objects and indices of arrays."""
        value, at = self.value, self.at
        for key in keys:
            inside = isinstance(value, Mapping) and key in value
            if isinstance(value, list) and isinstance(key, int):
                inside = 0 <= key < len(value)
            value = value[key] if inside else None
            at += "/" + str(key).replace("~", "~0").replace("/", "~1")
        return Place(value, at, self.run)

    def first(self, *paths: tuple[str | int, ...]) -> Place:
        """The first of these below that is there, else the last."""
        found = [self.to(*path) for path in paths]
        return next((p for p in found if p), found[-1])

    def each(self) -> Iterator[Place]:
        """The entries of an array; none where it is no array."""
        for i in range(len(self.value) if isinstance(self.value, list) else 0):
            yield self.to(i)

    def items(self) -> Iterator[tuple[str, Place]]:
        """The members of an object; none where it is no object."""
        for key in self.value if isinstance(self.value, Mapping) else ():
            yield key, self.to(key)

    @property
    def amount(self) -> float | None:
        """As a number; None for what is none, and for nan and inf."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return value if math.isfinite(value) else None

    @property
    def text(self) -> str:
        """As words; empty where it is missing."""
        return "" if self.value is None else str(self.value)

    def marks(self) -> dict[str, str]:
        """The attributes of an element that shows this value."""
        return {"data-at": self.at} | ({"data-run": self.run} if self.run else {})

    def figure(self, form: str = "", unit: str = "") -> Element:
        """The value as an element. form: a format specification such as `.2f` (`%` and `,` too);
        default three significant digits, counts in full. unit: written behind it."""
        value = self.amount
        if value is None:
            return h("span", MISSING, class_="quiet")
        if form:
            text = format(value, form)
        else:
            text = f"{value:,}" if isinstance(value, int) else number(value)
        made = h("span", text + unit)
        made.attrib.update(self.marks())
        return made

    def word(self, missing: str = "") -> Element | str:
        """Words, a number or yes and no as they are; `missing` where there is nothing to say."""
        if self.value is None or isinstance(self.value, Mapping | list):
            return missing
        if isinstance(self.value, bool):
            return h("span", "yes" if self.value else "no", **_attributes(self))
        return h("span", self.text, **_attributes(self))


def _attributes(place: Place) -> dict[str, str]:
    return {name.replace("-", "_"): value for name, value in place.marks().items()}
