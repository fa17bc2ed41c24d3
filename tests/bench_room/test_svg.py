"""The charts are well-formed XML and carry exactly the values they were given."""

from __future__ import annotations

from xml.etree.ElementTree import Element, fromstring, tostring

import pytest

from kimi_eagle.bench.svg import Bar, Series, columns, h, lines, number, stacked, ticks

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
