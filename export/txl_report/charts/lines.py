"""Curves over a number."""

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
"""Points of a curve that each get a marker; of more, a curve is a line alone."""
MARKED_CURVES = 3
"""Curves whose points get one: the markers of more would hide each other."""


@dataclass(frozen=True)
class Series:
    """A curve: its name, and its points (x, y) from left to right; where y has no place, the curve is interrupted.

    `places` are what each point's x stands for, where that is not the number itself.
    """

    name: str
    points: Sequence[tuple[float, float]]
    places: Sequence[str] = ()


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
    """Curves over a number; beyond `STYLES` curves only the first ones are drawn.

    Args:
        name, title, description: as `new_figure`.
        series: the curves.
        across, up: the axes.
        across_label, up_label: what stands along them.
        level: a limit, and what to write on it.
    """
    figure = new_figure(name, title, description, "lines")
    add_axes(figure, across, up)
    if level is not None:
        add_level(figure, up, *level)
    stretched = add_stretched(figure)
    drawn = list(series[:STYLES])
    marked = len(drawn) <= MARKED_CURVES and all(len(each.points) <= MARKED for each in drawn)
    for style, each in enumerate(drawn, 1):
        _curve(figure, stretched, style, each, across, up, marked=marked)
    legend = [(style, each.name) for style, each in enumerate(drawn, 1)] if len(drawn) > 1 else []
    return finished(figure, legend, across_label, up_label)


def _curve(
    figure: Element, stretched: Element, style: int, series: Series, across: Scale, up: Scale, *, marked: bool
) -> None:
    pieces: list[list[tuple[float, float]]] = [[]]
    for index, (x, y) in enumerate(series.points):
        place = (across.at(x), up.at(y))
        if place[0] is None or place[1] is None:
            pieces.append([])
            continue
        pieces[-1].append((place[0], place[1]))
        if marked:
            group = SubElement(figure, "g", {"class": f"point s{style}"})
            SubElement(group, "circle", {"cx": percent(place[0]), "cy": percent(1 - place[1]), "r": "3.5"})
            at = series.places[index] if series.places else whole(int(x)) if float(x).is_integer() else number(x)
            SubElement(group, "title").text = as_one_line(f"{series.name}: {at}, {number(y)}")
    for piece in pieces:
        points = " ".join(f"{units(x)},{units(1 - y)}" for x, y in piece)
        if len(piece) == 1 and not marked:
            x, y = piece[0]
            points = f"{units(x)},{units(1 - y)} {units(x)},{units(1 - y)}"
        if len(piece) > 1 or (not marked and piece):
            line = {"class": f"line s{style}", "points": points, "vector-effect": "non-scaling-stroke"}
            SubElement(stretched, "polyline", line)
