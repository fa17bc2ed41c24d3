"""Four small charts as SVG elements: columns, stacked horizontal bars, lines, values with ranges.

Pure functions from numbers to `xml.etree` elements, which escape whatever text they are given; no
plotting library, because a report must be one file that opens anywhere and a figure of thirty
marks needs no more. The price: no zoom, no legends beyond what is drawn here.

Every mark carries its value in `data-value` and in a `title` (the browser's tooltip); one that
stands for a value of results.json carries in `data-at` where it lies there (shown.py). Colours come
from CSS classes (`s0`, `c1`, ...), so that light and dark are the page's matter. One unit is one
CSS pixel at full width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element

WIDTH = 400
"""Of a chart that has a row of its own on a phone: 390 px less margins, so that text stays text."""


@dataclass(frozen=True)
class Series:
    """One line: name at its end, (x, y) points in ascending x, CSS class, dots at the points.

    at: the attributes of each point's dot (Place.marks()), where it stands for a result.
    """

    name: str
    points: Sequence[tuple[float, float]]
    style: str = "s0"
    dots: bool = False
    at: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True)
class Bar:
    """One column, or one row of `ranges`. marker: a second value, a short line across the column.

    low, high: the ends of its interval. at: attributes of the value's mark and text.
    """

    label: str
    value: float
    marker: float | None = None
    low: float | None = None
    high: float | None = None
    at: Mapping[str, str] = field(default_factory=dict)
    style: str = "s0"


def h(tag: str, *children: Element | str | None, **attributes: object) -> Element:
    """An element; text children are escaped when written. `class_` gives `class`, _ gives -."""
    made = Element(tag)
    for key, value in attributes.items():
        name = key.rstrip("_").replace("_", "-")
        made.set(name, _text(value, exact=name == "data-value"))
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
        rect = h(
            "rect", h("title", f"{bar.label}: {bar.value:.4f}"), x=x - width / 2, y=base - tall,
            width=width, height=tall, rx=min(3, tall), class_="bar s0", data_value=bar.value,
        )  # fmt: skip
        plot.append(_marked(rect, bar))
        above = tall
        if bar.low is not None and bar.high is not None:
            ends = [base - v / top * 140 for v in (bar.low, bar.high)]
            title = h("title", f"{bar.label}: {bar.low:.4f} to {bar.high:.4f}")
            plot.append(h("line", title, x1=x, x2=x, y1=ends[0], y2=ends[1], class_="range"))
            above = max(tall, base - ends[1])
        if bar.marker is not None:
            y = base - bar.marker / top * 140
            above = max(above, bar.marker / top * 140)
            plot.append(
                h(
                    "line", h("title", f"{marker_name}: {bar.marker:.4f}"), x1=x - width / 2 - 6,
                    x2=x + width / 2 + 6, y1=y, y2=y, class_="marker", data_value=bar.marker,
                )
            )  # fmt: skip
        text = h("text", number(bar.value), x=x, y=base - above - 7, class_="value mid")
        plot.append(_marked(text, bar))
        plot.append(h("text", bar.label, x=x, y=base + 18, class_="tick mid"))
    return plot


def ranges(
    bars: Sequence[Bar], x_label: str, *, low: float, digits: int = 2, unit: str = ""
) -> Element:
    """One row a value: a dot, its interval as a line through it, the value at the right.

    The axis begins at `low`, the value that means nothing gained (1 for acceptance and speed-up):
    a dot's distance from the left edge is the gain. unit: written after each value.
    """
    row_height, right = 26, 52
    left = 16 + 6.4 * min(22, max((len(b.label) for b in bars), default=0))
    base = len(bars) * row_height + 4
    plot = _frame(base + 36, f"{x_label}: {', '.join(f'{b.label} {b.value:.2f}' for b in bars)}")
    ends = [v for b in bars for v in (b.value, b.low, b.high) if v is not None]
    first, last = min([low, *ends]), max([low, *ends])
    marks = ticks(first, last if last > first else first + 1)
    last = max(last, marks[-1])
    first = min(first, marks[0])
    scale = (WIDTH - left - right) / ((last - first) or 1)

    def place(value: float) -> float:
        return left + (value - first) * scale

    for tick in marks:
        plot.append(h("line", x1=place(tick), x2=place(tick), y1=0, y2=base, class_="grid"))
        plot.append(h("text", number(tick), x=place(tick), y=base + 14, class_="tick mid"))
    middle = (left + WIDTH - right) / 2
    plot.append(h("text", x_label, x=middle, y=base + 31, class_="tick mid"))
    for i, bar in enumerate(bars):
        y = i * row_height + row_height / 2
        plot.append(h("text", h("title", bar.label), x=left - 8, y=y + 4, class_="tick end"))
        plot[-1][0].tail = _short(bar.label, 22)
        if bar.low is not None and bar.high is not None:
            title = h("title", f"{bar.label}: {bar.low:.4f} to {bar.high:.4f}")
            plot.append(
                h("line", title, x1=place(bar.low), x2=place(bar.high), y1=y, y2=y, class_="range")
            )
        dot = h(
            "circle", h("title", f"{bar.label}: {bar.value:.4f}"), cx=place(bar.value), cy=y, r=5,
            class_=f"dot {bar.style}", data_value=bar.value,
        )  # fmt: skip
        plot.append(_marked(dot, bar))
        text = h("text", f"{bar.value:.{digits}f}{unit}", x=WIDTH, y=y + 4, class_="value end")
        plot.append(_marked(text, bar))
    return plot


def stacked(
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str, label: str = "Time by stage"
) -> Element:
    """One horizontal bar a row, its parts side by side; part names choose the CSS classes.

    rows: (label, [(part name, value >= 0), ...]); a part has the same place in every row.
    """
    row_height, left, right = 26, 78, 62
    plot = _frame(len(rows) * row_height + 4, f"{label}, {unit}")
    longest = max((sum(v for _, v in parts) for _, parts in rows), default=0) or 1
    scale = (WIDTH - left - right) / longest
    for i, (row, parts) in enumerate(rows):
        y, x = i * row_height + 2, float(left)
        plot.append(h("text", row, x=left - 8, y=y + 15, class_="tick end"))
        for j, (name, value) in enumerate(parts):
            if value <= 0:
                continue
            plot.append(
                h(
                    "rect", h("title", f"{row}, {name}: {number(value)} {unit}"), x=x, y=y,
                    width=max(0.5, value * scale - 1), height=row_height - 6,
                    class_=f"bar s{j}", data_value=value,
                )
            )  # fmt: skip
            x += value * scale
        total = sum(v for _, v in parts)
        plot.append(h("text", f"{number(total)} {unit}", x=x + 6, y=y + 15, class_="value"))
    return plot


def shares(rows: Sequence[tuple[str, Sequence[tuple[str, float, Mapping[str, str]]]]]) -> Element:
    """One horizontal bar a row, as long as all others, its parts the shares of a whole.

    rows: (label, [(part name, share 0..1, attributes of its mark), ...]); the n-th part has the
    colour b<n>. A share that has room for it is written into its part.
    """
    row_height, left = 34, 92
    plot = _frame(len(rows) * row_height, f"Shares of {', '.join(label for label, _ in rows)}")
    for i, (label, parts) in enumerate(rows):
        y, x = i * row_height + 4, float(left)
        plot.append(h("text", label, x=left - 8, y=y + 17, class_="tick end"))
        for j, (name, share, at) in enumerate(parts):
            wide = share * (WIDTH - left)
            if share > 0:
                title = h("title", f"{label}, {name}: {share:.1%}")
                plot.append(
                    h(
                        "rect", title, x=x, y=y, width=max(0.5, wide - 1), height=row_height - 8,
                        class_=f"bar b{j}", data_value=share,
                    )
                )  # fmt: skip
                plot[-1].attrib.update(at)
            if wide >= 34:
                text = h("text", f"{share:.0%}", x=x + wide / 2, y=y + 17, class_="mid inside")
                text.attrib.update(at)
                plot.append(text)
            x += wide
    return plot


def lines(
    series: Sequence[Series],
    x_label: str,
    *,
    zero: bool = False,
    top: float | None = None,
    x_names: Sequence[tuple[float, str]] = (),
    level: float | None = None,
    width: float = WIDTH,
    height: float = 220,
) -> Element:
    """Lines over a common x axis, each named at its right end where there are several.

    zero: the y axis begins at 0. top: the y axis ends there, else at the largest value. x_names:
    (x, text) of the x axis in place of round numbers. level: a value with a line of its own, such
    as the 1 of a speed-up. width, height: of the drawing; a small one stands beside others.
    """
    left, base, tall = 42, height - 40, height - 54
    names = [_short(s.name, 14) for s in series]
    right = 12 if len(series) < 2 else 20 + 6.4 * max(map(len, names))
    plot = _frame(height, "Lines: " + ", ".join(s.name for s in series), width)
    points = [p for s in series for p in s.points if math.isfinite(p[1])]
    if not points:
        return plot
    x0, x1 = min(p[0] for p in points), max(p[0] for p in points)
    heights = [p[1] for p in points] + ([] if level is None else [level])
    y0, y1 = min(heights), max(heights)
    y0, y1 = (0.0 if zero else y0), (y1 if top is None else top)
    marks = ticks(y0, y1, about=4 if tall > 120 else 3)
    y0, y1 = min(y0, marks[0]), max(y1, marks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
        return left + across * (width - left - right), base - (y - y0) / ((y1 - y0) or 1) * tall

    for tick in marks:
        y = place(x0, tick)[1]
        plot.append(h("line", x1=left, x2=width - right, y1=y, y2=y, class_="grid"))
        plot.append(h("text", number(tick), x=left - 6, y=y + 4, class_="tick end"))
    if level is not None:
        y = place(x0, level)[1]
        plot.append(h("line", x1=left, x2=width - right, y1=y, y2=y, class_="level"))
    for tick, text in x_names or [(t, number(t)) for t in ticks(x0, x1, round(width / 90))]:
        if x0 <= tick <= x1:
            x = place(tick, y0)[0]
            plot.append(h("text", text, x=x, y=base + 16, class_="tick mid"))
    plot.append(h("text", x_label, x=(left + width - right) / 2, y=base + 34, class_="tick mid"))
    ends: list[tuple[float, Series]] = []
    for one in series:
        marked = one.at or [{}] * len(one.points)
        spots = [
            (p, place(*p), at)
            for p, at in zip(one.points, marked, strict=True)
            if math.isfinite(p[1])
        ]
        if not spots:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for _, (x, y), _ in spots)
        title = f"{one.name}: {number(spots[0][0][1])} to {number(spots[-1][0][1])}"
        plot.append(h("polyline", h("title", title), points=path, class_=f"line {one.style}"))
        for (px, py), (x, y), at in spots if one.dots else ():
            title = h("title", f"{one.name}, {x_label} {number(px)}: {py:.4f}")
            dot = h("circle", title, cx=x, cy=y, r=3.5, class_=f"dot {one.style}", data_value=py)
            dot.attrib.update(at)
            plot.append(dot)
        ends.append((spots[-1][1][1], one))
    for y, one in _apart(ends, 14, base) if len(series) > 1 else ():
        name = h("text", h("title", one.name), x=width - right + 8, y=y + 4)
        name.set("class", f"name {one.style}")
        name[0].tail = _short(one.name, 14)
        plot.append(name)
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


def _apart(ends: list[tuple[float, Series]], gap: float, base: float) -> list[tuple[float, Series]]:
    """Labels moved apart until they do not cover each other, the lowest not below `base`."""
    placed: list[tuple[float, Series]] = []
    for y, one in sorted(ends, key=lambda e: e[0]):
        placed.append((max(y, placed[-1][0] + gap) if placed else y, one))
    limit = base + 4
    for i in reversed(range(len(placed))):
        y, one = placed[i]
        placed[i] = (min(y, limit), one)
        limit = placed[i][0] - gap
    return placed


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _marked(element: Element, bar: Bar) -> Element:
    element.attrib.update(bar.at)
    return element


def _frame(height: float, label: str, width: float = WIDTH) -> Element:
    box = {"viewBox": f"0 0 {width:g} {height:g}", "xmlns": "http://www.w3.org/2000/svg"}
    frame = h("svg", role="img", aria_label=label, style=f"max-width: {1.2 * width:g}px")
    frame.attrib.update(box)
    return frame


def _text(value: object, exact: bool) -> str:
    """exact: the shortest text that reads back as the same number; places need less."""
    if not isinstance(value, float):
        return str(value)
    return repr(value) if exact else f"{value:.6g}"
