"""Draw a list of horizontal bars, each with its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import SubElement

from txl_report.charts.figure import Chart, finished, new_figure, percent
from txl_report.visible import as_one_line

MOST_BARS = 40
"""Maximum number of bars that are drawn; the table below the chart lists all of them."""
LONGEST_NAME = 34
"""Maximum number of characters of a bar's name, because the name shares a line with the value."""
ROW = 40
"""Height in pixels of a bar with its name above it."""


@dataclass(frozen=True)
class Bar:
    """A bar: its name, its length, and its length as text."""

    name: str
    value: float
    written: str
    style: int = 1


def named_bars(name: str, title: str, description: str, bars: Sequence[Bar]) -> Chart:
    """Draw horizontal bars below each other, each with its name and its value above it."""
    figure = new_figure(name, title, description, "named")
    shown = list(bars[:MOST_BARS])
    figure.set("height", str(ROW * len(shown)))
    most = max((bar.value for bar in shown if bar.value > 0), default=1.0)
    for index, bar in enumerate(shown):
        top = index * ROW
        text = {"x": "0", "y": str(top + 14)}
        SubElement(figure, "text", text | {"class": "name"}).text = _cut(as_one_line(bar.name))
        SubElement(figure, "text", text | {"class": "value", "x": "100%"}).text = as_one_line(bar.written)
        row = {"x": "0", "y": str(top + 21), "height": "9", "rx": "2"}
        SubElement(figure, "rect", row | {"class": "trough", "width": "100%"})
        length = max(bar.value / most, 0.0)
        shape = SubElement(figure, "rect", row | {"class": f"bar point s{bar.style}", "width": percent(length)})
        SubElement(shape, "title").text = as_one_line(f"{bar.name}: {bar.written}")
    return finished(figure)


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
