"""Build a picture for a page: SVG whose data stretch with the page and whose text does not.

The outer element is the area of the data. Its coordinates are percents, so it can have any width; ticks and names stand
outside of it, where the style sheet leaves a margin. Lines are drawn in an inner element of 1000 × 1000 units that is
stretched, with strokes that are not. Text goes through ElementTree, which escapes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

from txl_report.charts.scales import Scale
from txl_report.visible import as_one_line

UNITS = 1000
"""Units of the inner element, along both axes."""
STYLES = 6
"""Most series of a chart: each has a colour, a dash pattern and a marker of its own."""


@dataclass(frozen=True)
class Chart:
    """A finished picture.

    Attributes:
        drawing: an <svg> element as text; every text of a stranger's is escaped in it.
        legend: number of the style and name of each series; empty for a single one.
        across, up: the labels of the axes, which the page writes beside the picture.
    """

    drawing: str
    legend: tuple[tuple[int, str], ...] = ()
    across: str = ""
    up: str = ""


def percent(part: float) -> str:
    """Write a coordinate as SVG has it: 0.125 as "12.5%"."""
    return f"{part * 100:.2f}".rstrip("0").rstrip(".") + "%"


def units(part: float) -> str:
    """Write a coordinate in the inner element: 0.125 as "125"."""
    return f"{part * UNITS:.1f}".rstrip("0").rstrip(".")


def new_figure(name: str, title: str, description: str, kind: str) -> Element:
    """Create an empty picture with its name and description for readers who do not see it.

    Args:
        name: for its ids; unique in a page, of letters, digits and hyphens.
        title, description: its title, and what a reader would see in it.
        kind: kind of chart, a class of the style sheet.
    """
    figure = Element("svg", {"class": f"chart {kind}", "role": "img", "aria-labelledby": f"{name}-title {name}-desc"})
    SubElement(figure, "title", {"id": f"{name}-title"}).text = as_one_line(title)
    SubElement(figure, "desc", {"id": f"{name}-desc"}).text = as_one_line(description)
    return figure


def add_axes(figure: Element, across: Scale, up: Scale) -> None:
    """Draw grid lines, ticks and their labels."""
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
    """Draw a horizontal line at a limit, with its name."""
    if (part := scale.at(value)) is None:
        return
    place = percent(1 - part)
    SubElement(figure, "line", {"class": "level", "x1": "0", "x2": "100%", "y1": place, "y2": place})
    # Below the line if there is no room above it.
    text = {"class": "level", "x": "100%", "y": place, "dy": "1.2em" if part > 0.9 else "-0.4em"}
    SubElement(figure, "text", text).text = as_one_line(label)


def finished(figure: Element, legend: Sequence[tuple[int, str]] = (), across: str = "", up: str = "") -> Chart:
    """Return the picture as text, with its legend and labels."""
    return Chart(tostring(figure, encoding="unicode"), tuple(legend), across, up)
