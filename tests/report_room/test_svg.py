"""The charts are well-formed XML and carry exactly the values they were given."""

from __future__ import annotations

from xml.etree.ElementTree import Element, fromstring, tostring

import pytest

from kimi_eagle.report.svg import (
    Bar,
    Series,
    columns,
    h,
    lines,
    number,
    ranges,
    shares,
    stacked,
    ticks,
)

NS = "{http://www.w3.org/2000/svg}"


def parsed(element: Element) -> Element:
    return fromstring(tostring(element, encoding="unicode"))


def values(svg: Element, tag: str) -> list[float]:
    found = [e.get("data-value") for e in svg.iter(NS + tag)]
    return [float(v) for v in found if v is not None]


def test_columns_show_the_data_in_height_and_text() -> None:
    svg = parsed(columns([Bar("position 1", 0.4, 0.5), Bar("<2>", 0.1)], 0.5, "validation"))
    assert values(svg, "rect") == [0.4, 0.1]
    assert values(svg, "line") == [0.5]
    heights = [float(r.get("height")) for r in svg.iter(NS + "rect")]
    assert heights[0] / heights[1] == pytest.approx(4)
    texts = [t.text for t in svg.iter(NS + "text")]
    assert {"0.4", "0.1", "position 1", "<2>"} <= set(texts)


def test_stacked_widths_are_proportional_and_empty_parts_left_out() -> None:
    svg = parsed(stacked([("a", [("work", 30.0), ("load", 0.0)]), ("b", [("work", 60.0)])], "s"))
    assert values(svg, "rect") == [30.0, 60.0]
    widths = [float(r.get("width")) + 1 for r in svg.iter(NS + "rect")]
    assert widths[1] / widths[0] == pytest.approx(2)


def test_lines_keep_every_point_and_its_order() -> None:
    points = [(0.0, 3.0), (10.0, 1.0), (20.0, 2.0)]
    svg = parsed(lines([Series("loss", points, dots=True)], "step"))
    assert values(svg, "circle") == [3.0, 1.0, 2.0]
    (line,) = svg.iter(NS + "polyline")
    xy = [tuple(float(v) for v in p.split(",")) for p in line.get("points").split()]
    assert xy[1][0] - xy[0][0] == pytest.approx(xy[2][0] - xy[1][0])
    assert xy[0][1] < xy[2][1] < xy[1][1]  # larger values lie higher, at smaller y


def test_points_that_are_no_numbers_do_not_break_a_figure() -> None:
    svg = parsed(lines([Series("loss", [(0, float("nan")), (1, 2.0)])], "step"))
    (line,) = svg.iter(NS + "polyline")
    assert len(line.get("points").split()) == 1
    assert not list(parsed(lines([], "step")).iter(NS + "polyline"))


def test_ranges_place_values_by_their_gain() -> None:
    """The axis begins at what means nothing gained; the interval's line goes from end to end."""
    bars = [
        Bar("chat", 1.5, low=1.25, high=1.75, at={"data-at": "/x"}),
        Bar("a name too long for its place", 2.0),
    ]
    svg = parsed(ranges(bars, "acceptance length", low=1.0))
    dots = {float(c.get("data-value")): float(c.get("cx")) for c in svg.iter(NS + "circle")}
    (line,) = [e for e in svg.iter(NS + "line") if e.get("class") == "range"]
    left = min(float(e.get("x1")) for e in svg.iter(NS + "line") if e.get("class") == "grid")
    assert dots[2.0] - left == pytest.approx(2 * (dots[1.5] - left), rel=1e-3)
    ends = float(line.get("x1")) - left, float(line.get("x2")) - left
    assert ends[1] == pytest.approx(3 * ends[0], rel=1e-3)
    marked = [e for e in svg.iter() if e.get("data-at") == "/x"]
    assert [e.tag for e in marked] == [NS + "circle", NS + "text"] and marked[1].text == "1.50"
    labels = [e[0].text for e in svg.iter(NS + "text") if len(e)]
    assert labels == ["chat", "a name too long for its place"]  # whole in the tooltip


def test_shares_fill_their_row() -> None:
    at = {"data-at": "/shares/moe"}
    row = [("communication", 0.5, {}), ("moe", 0.48, at), ("rest", 0.02, {}), ("none", 0.0, {})]
    svg = parsed(shares([("alone", row)]))
    assert values(svg, "rect") == [0.5, 0.48, 0.02]
    assert [t.text for t in svg.iter(NS + "text")] == ["alone", "50%", "48%"]
    assert [e.tag for e in svg.iter() if e.get("data-at")] == [NS + "rect", NS + "text"]
    assert sum(float(r.get("width")) + 1 for r in svg.iter(NS + "rect")) == pytest.approx(308)


def test_named_ticks_and_a_level_of_its_own() -> None:
    one = Series("a", [(0.0, 1.5), (4.0, 0.8)], dots=True, at=[{"data-at": "/0"}, {}])
    other = Series("b", [(0.0, 1.5), (4.0, 0.8)])
    svg = parsed(lines([one, other], "batch", x_names=[(0, "1"), (4, "16")], level=1.0))
    ticks_shown = [t.text for t in svg.iter(NS + "text") if t.get("class") == "tick mid"]
    assert ticks_shown == ["1", "16", "batch"]
    (level,) = [e for e in svg.iter(NS + "line") if e.get("class") == "level"]
    high, low = (float(c.get("cy")) for c in svg.iter(NS + "circle"))
    assert high < float(level.get("y1")) < low
    assert [c.get("data-at") for c in svg.iter(NS + "circle")] == ["/0", None]
    names = [float(t.get("y")) for t in svg.iter(NS + "text") if t.get("class", "")[:4] == "name"]
    assert abs(names[0] - names[1]) >= 14  # equal ends, and both can be read


def test_text_is_escaped_wherever_it_goes() -> None:
    evil = '"><script>alert(1)</script>'
    text = tostring(h("p", evil, title=evil), encoding="unicode")
    assert "<script" not in text and fromstring(text).text == evil


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.25, 0.5, 0.75, 1]), (0, 0.37, [0, 0.1, 0.2, 0.3]), (3, 3, [3])],
)
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_numbers_for_people() -> None:
    assert [number(v) for v in (0.41234, 12.34, 1540.0, 0)] == ["0.412", "12.3", "1,540", "0"]
