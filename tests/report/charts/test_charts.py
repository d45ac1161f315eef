"""Charts: places and ticks; every number somebody could hand in; the same numbers give the same bytes."""

from __future__ import annotations

import math
from xml.etree.ElementTree import fromstring

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from txl_report.charts.bars import Bar, named_bars
from txl_report.charts.figure import STYLES
from txl_report.charts.lines import Series, line_chart
from txl_report.charts.scales import exact_scale, linear_scale, log_scale

HOSTILE = "<script>\"'&\x00\u202e]]>"


def drawn(*series: Series, level: tuple[float, str] | None = None) -> str:
    ys = [y for each in series for _, y in each.points]
    axes = exact_scale(0, 10), linear_scale(ys)
    chart = line_chart("n", "t", "d", series, *axes, across_label="x", up_label="y", level=level)
    return chart.drawing


def test_axes_end_at_round_numbers_and_label_them_alike():
    scale = linear_scale([0.2, 6.9])
    assert [label for _, label in scale.ticks] == ["0", "2", "4", "6", "8"]
    assert (scale.low, scale.high) == (0, 8)
    assert [label for _, label in linear_scale([4.22, 5.3]).ticks][:2] == ["4.0", "4.5"]
    assert [label for _, label in exact_scale(0, 63).ticks] == ["0", "20", "40", "60"]
    assert [label for _, label in log_scale([2e-7, 1e-4]).ticks] == ["10⁻⁷", "10⁻⁶", "10⁻⁵", "10⁻⁴"]
    assert len(log_scale([1e-30, 1.0]).ticks) <= 7


def test_equal_factors_are_equal_distances_of_a_logarithmic_axis():
    scale = log_scale([1e-6, 1e-2])
    assert [scale.at(value) for value in (1e-6, 1e-5, 1e-4, 1e-2)] == pytest.approx([0, 0.25, 0.5, 1])
    assert linear_scale([0, 8]).at(2) == 0.25


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(width=64), max_size=5), st.booleans())
def test_axes_take_any_numbers(values: list[float], zero: bool):
    finite = [value for value in values if math.isfinite(value) and abs(value) < 1e100]
    scale, log = linear_scale(finite, zero=zero), log_scale([value for value in values if value < 1e100])
    for value in finite:
        place = scale.at(value)
        assert place is not None
        assert 0 <= place <= 1
        assert log.at(value) is None or 0 <= log.at(value) <= 1
    assert log.at(math.nan) is log.at(0.0) is scale.at(math.inf) is None


def test_curves_are_drawn_where_their_numbers_are():
    root = fromstring(drawn(Series("a", [(0, 0.0), (5, 1.0), (10, 0.0)])))
    circles = [circle.attrib for circle in root.iter("circle")]
    assert [(each["cx"], each["cy"]) for each in circles] == [("0%", "100%"), ("50%", "0%"), ("100%", "100%")]
    (line,) = root.iter("polyline")
    assert line.attrib["points"] == "0,1000 500,0 1000,1000"


def test_a_curve_is_interrupted_where_there_is_no_number():
    points = [(0, 1.0), (1, 2.0), (2, math.nan), (3, 1.0), (4, math.inf), (5, 2.0), (6, 1.0)]
    root = fromstring(drawn(Series("a", points)))
    assert len(list(root.iter("polyline"))) == 2
    assert len(list(root.iter("circle"))) == 5


def test_texts_in_charts_are_escaped_and_visible():
    for drawing in (
        drawn(Series(HOSTILE, [(0, 1.0)]), level=(1.0, HOSTILE)),
        named_bars("n", HOSTILE, HOSTILE, [Bar(HOSTILE, 1.0, HOSTILE)]).drawing,
    ):
        root = fromstring(drawing)
        assert "script" not in {element.tag for element in root.iter()}
        assert "<script" not in drawing
        assert "U+202E" in drawing
        assert "\x00" not in drawing


def test_bars_are_as_long_as_their_numbers():
    root = fromstring(named_bars("n", "t", "d", [Bar("a", 4.0, "4"), Bar("b", 1.0, "1"), Bar("c", 0.0, "0")]).drawing)
    assert [bar.attrib["width"] for bar in root.iter("rect") if "point" in bar.attrib["class"]] == ["100%", "25%", "0%"]


def test_nothing_is_drawn_of_nothing():
    fromstring(drawn())
    fromstring(named_bars("n", "t", "d", []).drawing)


def test_a_point_says_what_its_place_stands_for():
    points = [(0.0, 1.0), (1.0, 2.0), (1.5, 3.0)]
    titles = [title.text for title in fromstring(drawn(Series("a", points))).iter("title")]
    assert titles[-3:] == ["a: 0, 1.00", "a: 1, 2.00", "a: 1.50, 3.00"]
    named = Series("a", points, ["0", "1", "2 … 3"])
    assert [title.text for title in fromstring(drawn(named)).iter("title")][-1] == "a: 2 … 3, 3.00"


def test_what_lies_between_the_ends_of_points_is_drawn_once_along_the_curve():
    points = [(float(x), 2.0) for x in range(10)]
    ends = [(1.0, 3.0)] * 9 + [(0.0, 4.0)]
    root = fromstring(drawn(Series("a", points, ends=ends)))
    (band,) = root.iter("polygon")
    corners = [tuple(map(float, corner.split(","))) for corner in band.attrib["points"].split()]
    scale = linear_scale([2.0])
    lower, upper = (1000 - 1000 * scale.at(value) for value in (1.0, 3.0))
    assert corners[:9] == [(x * 100, lower) for x in range(9)], "there along the lower ends"
    assert corners[11:] == [(x * 100, upper) for x in reversed(range(9))], "and back along the upper ones"
    broken = [*points[:4], (4.0, math.nan), *points[5:]]
    assert len(list(fromstring(drawn(Series("a", broken, ends=ends))).iter("polygon"))) == 2


def test_more_curves_than_can_be_told_apart_are_refused():
    curves = [Series(str(n), [(0, 1.0)]) for n in range(STYLES + 1)]
    assert drawn(*curves[:STYLES])
    with pytest.raises(ValueError, match="7 curves in one chart, expected at most 6; draw several charts"):
        drawn(*curves)


@pytest.mark.parametrize(
    ("values", "told"), [([4.6, 5.1], "perplexity; the axis begins at 4.6, not at 0"), ([0.0, 5.0], "perplexity")]
)
def test_an_axis_that_does_not_begin_at_zero_says_so(values: list[float], told: str):
    points = list(enumerate(values))
    scales = exact_scale(0, 1), linear_scale(values)
    chart = line_chart("n", "t", "d", [Series("a", points)], *scales, across_label="x", up_label="perplexity")
    assert chart.up == told
