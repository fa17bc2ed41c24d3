"""Three small charts as SVG elements: bars, stacked horizontal bars, lines.

Pure functions from numbers to `xml.etree` elements, which escape whatever text they are given; no
plotting library, because a report must be one file that opens anywhere and a figure of thirty
marks needs no more. The price: no zoom, no legends beyond what is drawn here.

Every mark carries its value in `data-value` and in a `title` (the browser's tooltip). Colours come
from CSS classes (`s0`, `s1`, ...), so that light and dark are the page's matter. One unit is one
CSS pixel at full width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

WIDTH = 440


@dataclass(frozen=True)
class Series:
    """One line: name at its end, (x, y) points in ascending x, CSS class, dots at the points."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str = "s0"
    dots: bool = False


@dataclass(frozen=True)
class Bar:
    """One column. marker: a second value shown as a short line across it, None for none."""

    label: str
    value: float
    marker: float | None = None


def h(tag: str, *children: Element | str | None, **attributes: object) -> Element:
    """An element; text children are escaped when written. `class_` gives `class`, _ gives -."""
    made = Element(tag, {k.rstrip("_").replace("_", "-"): _text(v) for k, v in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif child is not None and len(made):
            made[-1].tail = (made[-1].tail or "") + child
        elif child is not None:
            made.text = (made.text or "") + child
    return made


def number(value: float) -> str:
    """Three significant digits for people: 0.412, 12.3, 1,540."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def columns(bars: Sequence[Bar], top: float = 1.0, marker_name: str = "") -> Element:
    """Vertical bars from 0 to `top`, each with its value above it."""
    height, left, base = 200, 34, 168
    plot = _frame(height, f"Bar chart: {', '.join(f'{b.label} {number(b.value)}' for b in bars)}")
    for tick in ticks(0, top):
        y = base - tick / top * 140
        plot.append(h("line", x1=left, x2=WIDTH, y1=y, y2=y, class_="grid"))
        plot.append(h("text", number(tick), x=left - 6, y=y + 4, class_="tick end"))
    slot = (WIDTH - left) / max(1, len(bars))
    width = min(64.0, slot * 0.6)
    for i, bar in enumerate(bars):
        x, tall = left + slot * (i + 0.5), bar.value / top * 140
        plot.append(
            h(
                "rect", h("title", f"{bar.label}: {bar.value:.4f}"), x=x - width / 2,
                y=base - tall, width=width, height=tall, rx=min(3, tall), class_="bar s0",
                data_value=bar.value,
            )
        )  # fmt: skip
        above = tall
        if bar.marker is not None:
            y = base - bar.marker / top * 140
            above = max(tall, bar.marker / top * 140)
            plot.append(
                h(
                    "line", h("title", f"{marker_name}: {bar.marker:.4f}"), x1=x - width / 2 - 6,
                    x2=x + width / 2 + 6, y1=y, y2=y, class_="marker", data_value=bar.marker,
                )
            )  # fmt: skip
        plot.append(h("text", number(bar.value), x=x, y=base - above - 7, class_="value mid"))
        plot.append(h("text", bar.label, x=x, y=base + 18, class_="tick mid"))
    return plot


def stacked(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str) -> Element:
    """One horizontal bar a row, its parts side by side; part names choose the CSS classes.

    rows: (label, [(part name, value >= 0), ...]); a part has the same place in every row.
    """
    row_height, left, right = 26, 82, 62
    plot = _frame(len(rows) * row_height + 4, f"Time by stage, {unit}")
    longest = max((sum(v for _, v in parts) for _, parts in rows), default=0) or 1
    scale = (WIDTH - left - right) / longest
    for i, (label, parts) in enumerate(rows):
        y, x = i * row_height + 2, float(left)
        plot.append(h("text", label, x=left - 8, y=y + 15, class_="tick end"))
        for j, (name, value) in enumerate(parts):
            if value <= 0:
                continue
            plot.append(
                h(
                    "rect", h("title", f"{label}, {name}: {number(value)} {unit}"), x=x, y=y,
                    width=max(0.5, value * scale - 1), height=row_height - 6,
                    class_=f"bar s{j}", data_value=value,
                )
            )  # fmt: skip
            x += value * scale
        total = sum(v for _, v in parts)
        plot.append(h("text", f"{number(total)} {unit}", x=x + 6, y=y + 15, class_="value"))
    return plot


def lines(
    series: Sequence[Series], x_label: str, *, zero: bool = False, top: float | None = None
) -> Element:
    """Lines over a common x axis, each named at its right end.

    zero: the y axis begins at 0. top: the y axis ends there, else at the largest value.
    """
    height, left, base, right = 220, 40, 180, 78
    plot = _frame(height, "Lines: " + ", ".join(s.name for s in series))
    points = [p for s in series for p in s.points if math.isfinite(p[1])]
    if not points:
        return plot
    x0, x1 = min(p[0] for p in points), max(p[0] for p in points)
    y0, y1 = min(p[1] for p in points), max(p[1] for p in points)
    y0, y1 = (0.0 if zero else y0), (y1 if top is None else top)
    marks = ticks(y0, y1)
    y0, y1 = min(y0, marks[0]), max(y1, marks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x0) / ((x1 - x0) or 1)
        return left + across * (WIDTH - left - right), base - (y - y0) / ((y1 - y0) or 1) * 166

    for tick in marks:
        y = place(x0, tick)[1]
        plot.append(h("line", x1=left, x2=WIDTH - right, y1=y, y2=y, class_="grid"))
        plot.append(h("text", number(tick), x=left - 6, y=y + 4, class_="tick end"))
    for tick in ticks(x0, x1):
        if x0 <= tick <= x1:
            x = place(tick, y0)[0]
            plot.append(h("text", number(tick), x=x, y=base + 16, class_="tick mid"))
    plot.append(h("text", x_label, x=(left + WIDTH - right) / 2, y=base + 34, class_="tick mid"))
    ends: list[tuple[float, Series]] = []
    for one in series:
        spots = [(p, place(*p)) for p in one.points if math.isfinite(p[1])]
        if not spots:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for _, (x, y) in spots)
        title = f"{one.name}: {number(spots[0][0][1])} to {number(spots[-1][0][1])}"
        plot.append(h("polyline", h("title", title), points=path, class_=f"line {one.style}"))
        for (px, py), (x, y) in spots if one.dots else ():
            title = h("title", f"{one.name}, {x_label} {number(px)}: {py:.4f}")
            plot.append(
                h("circle", title, cx=x, cy=y, r=3.5, class_=f"dot {one.style}", data_value=py)
            )
        ends.append((spots[-1][1][1], one))
    for y, one in _apart(ends, 14):
        plot.append(h("text", one.name, x=WIDTH - right + 8, y=y + 4, class_=f"name {one.style}"))
    return plot


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round values from at or below `low` to at or above the last step before `high`."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = unit * next(f for f in (1, 2, 2.5, 5, 10) if f * unit >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    count = math.floor((high - first * step) / step + 1e-9)
    return [round((first + i) * step, 12) for i in range(count + 1)]


def _apart(ends: list[tuple[float, Series]], gap: float) -> list[tuple[float, Series]]:
    """Labels moved down until they do not cover each other."""
    placed: list[tuple[float, Series]] = []
    for y, one in sorted(ends, key=lambda e: e[0]):
        placed.append((max(y, placed[-1][0] + gap) if placed else y, one))
    return placed


def _frame(height: float, label: str) -> Element:
    box = {"viewBox": f"0 0 {WIDTH} {height:g}", "xmlns": "http://www.w3.org/2000/svg"}
    frame = h("svg", role="img", aria_label=label)
    frame.attrib.update(box)
    return frame


def _text(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)
