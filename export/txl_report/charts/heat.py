"""Maps of values as pictures of one pixel per value, on one scale from light to dark of one hue."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from xml.etree.ElementTree import SubElement

import numpy as np
from numpy.typing import NDArray

from txl_report.charts.figure import Chart, add_axes, finished, new_figure, percent
from txl_report.charts.scales import Scale

LEVELS = 64
LIGHT, MIDDLE, DARK = (250, 251, 253), (88, 140, 205), (8, 26, 64)
"""Of nothing, of half, and of the most. In the dark theme the style sheet turns light and dark round, hue kept."""


def png(levels: NDArray[np.integer]) -> bytes:
    """A picture of levels [height, width], each 0 … LEVELS - 1; the same levels give the same bytes."""
    rows = np.ascontiguousarray(levels, np.uint8)
    height, width = rows.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1).tobytes()  # every line: filter 0
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits that are indices of a palette
    parts = [(b"IHDR", header), (b"PLTE", _palette()), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def data_address(levels: NDArray[np.integer]) -> str:
    """A picture as an address that holds it."""
    return "data:image/png;base64," + base64.b64encode(png(levels)).decode()


def to_levels(values: NDArray[np.uint8], fine: int = 1) -> NDArray[np.uint8]:
    """Values 0 … 255 as levels; with `fine` only every so manyth level is used, and the picture takes fewer bytes."""
    steps = (LEVELS - 1) // fine
    found: NDArray[np.uint8] = (np.rint(values.astype(np.float64) / 255 * steps) * fine).astype(np.uint8)
    return found


def map_address(values: NDArray[np.uint8], fine: int = 1) -> str:
    """A small map without axes as an address; see `to_levels`."""
    return data_address(to_levels(values, fine))


def heat_map(
    name: str,
    title: str,
    description: str,
    values: NDArray[np.uint8],
    across: Scale,
    up: Scale,
    *,
    across_label: str,
    up_label: str,
    divider: float | None = None,
) -> Chart:
    """One map with axes: rows of `values`, 0 … 255, from top to bottom; `divider` is where across a line parts it."""
    figure = new_figure(name, title, description, "map")
    place = {"x": "0", "y": "0", "width": "100%", "height": "100%", "preserveAspectRatio": "none", "class": "heat"}
    SubElement(figure, "image", place | {"href": data_address(to_levels(values))})
    add_axes(figure, across, up)
    if divider is not None and (part := across.at(divider)) is not None:
        line = {"class": "divider", "x1": percent(part), "x2": percent(part), "y1": "0", "y2": "100%"}
        SubElement(figure, "line", line)
    return finished(figure, (), across_label, up_label)


def legend_address() -> str:
    """The scale itself as a picture: from nothing to the most, evenly in values, whose levels are square roots."""
    return map_address(np.rint(np.sqrt(np.linspace(0, 1, 128))[None, :] * 255).astype(np.uint8))


def _palette() -> bytes:
    return bytes(_mixed(index / (LEVELS - 1))[channel] for index in range(LEVELS) for channel in range(3))


def _mixed(part: float) -> Sequence[int]:
    first, last, along = (LIGHT, MIDDLE, part * 2) if part < 0.5 else (MIDDLE, DARK, part * 2 - 1)
    return [round(a + (b - a) * along) for a, b in zip(first, last, strict=True)]


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
