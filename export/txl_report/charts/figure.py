"""Build a picture for a page: SVG whose data stretch with the page's width, while text keeps its size.

The outer element is the area of the data. Its coordinates are percentages, so it can have any width; ticks and names
are outside it, where the style sheet leaves a margin. Lines are drawn in an inner element of 1000 × 1000 units, which
is stretched without changing the width of strokes. ElementTree writes all text, and escapes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

from txl_report.charts.scales import Scale
from txl_report.visible import as_one_line

UNITS = 1000
"""Size of the inner element in its own units, along both axes."""
STYLES = 6
"""Maximum number of curves in a chart: each has its own colour, dash pattern and marker."""


@dataclass(frozen=True)
class Chart:
    """A finished picture.

    Attributes:
        drawing: an <svg> element as text; text from strangers is escaped.
        legend: (number of the style, name) of each curve; empty if there is only one curve.
        across, up: labels of the horizontal and the vertical axis, which the page writes beside the picture.
    """

    drawing: str
    legend: tuple[tuple[int, str], ...] = ()
    across: str = ""
    up: str = ""


def percent(part: float) -> str:
    """Write a coordinate in the form that SVG expects: 0.125 as "12.5%"."""
    return f"{part * 100:.2f}".rstrip("0").rstrip(".") + "%"


def units(part: float) -> str:
    """Write a coordinate in units of the inner element: 0.125 as "125"."""
    return f"{part * UNITS:.1f}".rstrip("0").rstrip(".")


def new_figure(name: str, title: str, description: str, kind: str) -> Element:
    """Create an empty picture, with a title and a description for readers who cannot see it.

    Args:
        name: prefix of the picture's ids; unique in a page, of letters, digits and hyphens.
        title, description: the picture's title, and its content in words.
        kind: kind of chart, a class of the style sheet.
    """
    figure = Element("svg", {"class": f"chart {kind}", "role": "img", "aria-labelledby": f"{name}-title {name}-desc"})
    SubElement(figure, "title", {"id": f"{name}-title"}).text = as_one_line(title)
    SubElement(figure, "desc", {"id": f"{name}-desc"}).text = as_one_line(description)
    return figure


def add_axes(figure: Element, across: Scale, up: Scale) -> None:
    """Draw the grid lines of the vertical axis, and the ticks and labels of both axes."""
    axes = SubElement(figure, "g", {"class": "axes", "aria-hidden": "true"})
    for value, label in up.ticks:
        if (part := up.at(value)) is not None:
            place = percent(1 - part)
            SubElement(axes, "line", {"class": "grid", "x1": "0", "x2": "100%", "y1": place, "y2": place})
            SubElement(axes, "text", {"class": "up", "x": "-8", "y": place, "dy": "0.32em"}).text = label
    for value, label in across.ticks:
        if (part := across.at(value)) is not None:
            place = percent(part)
            SubElement(axes, "line", {"class": "tick", "x1": place, "x2": place, "y1": "100%", "y2": "100%"})
            SubElement(axes, "text", {"class": "across", "x": place, "y": "100%", "dy": "1.5em"}).text = label
    SubElement(axes, "line", {"class": "axis", "x1": "0", "x2": "100%", "y1": "100%", "y2": "100%"})


def add_stretched(figure: Element) -> Element:
    """Create the inner element, in which lines are drawn in units."""
    return SubElement(
        figure,
        "svg",
        {"viewBox": f"0 0 {UNITS} {UNITS}", "preserveAspectRatio": "none", "width": "100%", "height": "100%"},
    )


def add_level(figure: Element, scale: Scale, value: float, label: str) -> None:
    """Draw a horizontal line at a limit, with the limit's name."""
    if (part := scale.at(value)) is None:
        return
    place = percent(1 - part)
    SubElement(figure, "line", {"class": "level", "x1": "0", "x2": "100%", "y1": place, "y2": place})
    # Put the name below the line if there is no room above it.
    text = {"class": "level", "x": "100%", "y": place, "dy": "1.2em" if part > 0.9 else "-0.4em"}
    SubElement(figure, "text", text).text = as_one_line(label)


def finished(figure: Element, legend: Sequence[tuple[int, str]] = (), across: str = "", up: str = "") -> Chart:
    """Return the picture as a `Chart`, with its legend and axis labels."""
    return Chart(tostring(figure, encoding="unicode"), tuple(legend), across, up)
