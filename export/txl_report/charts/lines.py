"""Draw line charts: one or several curves over a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement

from txl_report.charts.figure import (
    STYLES,
    Chart,
    add_axes,
    add_level,
    add_stretched,
    finished,
    new_figure,
    percent,
    units,
)
from txl_report.charts.scales import Scale
from txl_report.numbers import number, whole
from txl_report.visible import as_one_line

MARKED = 40
"""Maximum number of points of a curve that has markers; a longer curve is drawn as a plain line."""
BARS = 8
"""Maximum number of points of a curve whose errors are drawn as bars; a longer curve has a band."""
MARKED_CURVES = 3
"""Maximum number of curves with markers in a chart: more would hide each other."""


@dataclass(frozen=True)
class Series:
    """A curve: its name, and its points (x, y) from left to right; a y that cannot be drawn, e.g. NaN, leaves a gap.

    `places` are names for each point's x, e.g. "token 12", or empty if the number says enough. `ends` are the lower and
    upper end of each point's error bar, or empty if the errors are unknown.
    """

    name: str
    points: Sequence[tuple[float, float]]
    places: Sequence[str] = ()
    ends: Sequence[tuple[float, float]] = ()


def heights(series: Sequence[Series]) -> list[float]:
    """List all values that the vertical axis has to include: values of points, and ends of error bars."""
    return [y for each in series for pair in (*((y,) for _, y in each.points), *each.ends) for y in pair]


def line_chart(
    name: str,
    title: str,
    description: str,
    series: Sequence[Series],
    across: Scale,
    up: Scale,
    *,
    across_label: str,
    up_label: str,
    level: tuple[float, str] | None = None,
) -> Chart:
    """Draw curves over a number, each with its errors as bars or a band. If an axis does not begin at 0, its label says
    so.

    Args:
        name, title, description: as in `new_figure`.
        series: the curves, at most `STYLES`.
        across_label, up_label: the labels of the axes.
        level: a limit and its name, drawn as a horizontal line; None for no line.

    Raises:
        ValueError: there are more curves than styles.
    """
    if len(series) > STYLES:
        raise ValueError(f"{len(series)} curves in one chart, expected at most {STYLES}; draw several charts")
    figure = new_figure(name, title, description, "lines")
    add_axes(figure, across, up)
    if level is not None:
        add_level(figure, up, *level)
    stretched = add_stretched(figure)
    marked = len(series) <= MARKED_CURVES and all(len(each.points) <= MARKED for each in series)
    for style, each in enumerate(series, 1):
        _curve(figure, stretched, style, each, across, up, marked=marked)
    legend = [(style, each.name) for style, each in enumerate(series, 1)] if len(series) > 1 else []
    if not up.log and up.low > 0:
        up_label += f"; the axis begins at {up.ticks[0][1]}, not at 0"
    return finished(figure, legend, across_label, up_label)


def _curve(
    figure: Element, stretched: Element, style: int, series: Series, across: Scale, up: Scale, *, marked: bool
) -> None:
    pieces: list[list[tuple[float, float]]] = [[]]
    # Each band's outline runs along the lower ends, and back along the upper ends.
    bands: list[list[tuple[float, float]]] = [[]]
    for index, (x, y) in enumerate(series.points):
        place = (across.at(x), up.at(y))
        if place[0] is None or place[1] is None:
            pieces.append([])
            bands.append([])
            continue
        pieces[-1].append((place[0], place[1]))
        low, high = map(up.at, series.ends[index]) if series.ends else (None, None)
        if low is not None and high is not None and len(series.points) <= BARS:
            ends = {"x1": percent(place[0]), "x2": percent(place[0]), "y1": percent(1 - low), "y2": percent(1 - high)}
            SubElement(figure, "line", {"class": f"spread s{style}"} | ends)
        elif low is not None and high is not None:
            middle = len(bands[-1]) // 2
            bands[-1][middle:middle] = [(place[0], low), (place[0], high)]
        if marked:
            group = SubElement(figure, "g", {"class": f"point s{style}"})
            SubElement(group, "circle", {"cx": percent(place[0]), "cy": percent(1 - place[1]), "r": "3.5"})
            at = series.places[index] if series.places else whole(int(x)) if float(x).is_integer() else number(x)
            SubElement(group, "title").text = as_one_line(f"{series.name}: {at}, {number(y)}")
    for band in filter(None, bands):
        SubElement(stretched, "polygon", {"class": f"band s{style}", "points": _joined(band)})
    for piece in pieces:
        if len(piece) > 1 or (not marked and piece):
            points = _joined(piece if len(piece) > 1 else piece * 2)
            line = {"class": f"line s{style}", "points": points, "vector-effect": "non-scaling-stroke"}
            SubElement(stretched, "polyline", line)


def _joined(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{units(x)},{units(1 - y)}" for x, y in places)
