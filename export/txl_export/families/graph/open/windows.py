"""Reads convolutions along positions: the earlier positions that they need, and results that overlap the next call's.

For example, a kernel of 5 over [B, C, L] with 4 zeros in front needs 4 positions of the call before. A transposed
convolution with a kernel of 8 and a stride of 4 returns [B, C, 4 · L + 4]; its last 4 results have to be added to the
next call's first 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from txl_export.families.graph.find.nodes import numbers
from txl_export.families.graph.open.measuring import Sizes


@dataclass
class Window:
    """A Conv or ConvTranspose; each list has a number for each axis from the third on.

    Attributes:
        source: the input of the Conv, or of a Pad before it.
        spans, strides: the number of positions that a result covers, and the step from one result to the next. For a
            ConvTranspose, results and positions change places.
        front, behind: positions that a Conv adds in front and behind (`spans` if the numbers are computed), or results
            that a ConvTranspose drops.
        other: a phrase for padding that is not a fixed number of zeros, e.g. "auto_pad"; else "".
        cut: a Slice after the node that drops the end of one axis, or None.
    """

    source: ir.Value | None
    spans: list[int]
    strides: list[int]
    front: list[int]
    behind: list[int]
    other: str = ""
    cut: ir.Node | None = None

    def fault(self, at: int) -> str:
        """Return the reason why the positions before the first cannot be a state along an axis; "" if they can."""
        front, least = self.front[at], self.spans[at] - self.strides[at]
        if self.other:
            return f"is padded by {self.other}, expected a fixed number of zeros in front of the positions"
        if self.behind[at]:
            return f"reads up to {self.behind[at]} positions that come later, expected zeros in front alone"
        if not least <= front < self.spans[at]:
            return f"has {front} zeros in front, expected {least}, so that there are as many results as positions"
        return ""


def read_window(node: ir.Node, sizes: Sizes) -> Window | None:
    """Read a Conv with the Pad before it and the Slice after it; None if its kernel is unknown."""
    if (window := _read(node, sizes)) is None:
        return None
    if node.attributes.get_string("auto_pad", "NOTSET").startswith("SAME"):
        window.front, window.behind, window.other = [*window.spans], [*window.spans], "auto_pad"
    _add_pad(window)
    at, dropped, cut = _cut(node, sizes) or (0, 0, None)
    if window.strides[at] == 1 and dropped == window.behind[at] > 0:
        window.behind[at], window.cut = 0, cut
    return window


def read_tail(node: ir.Node, sizes: Sizes) -> tuple[Window, int, str] | None:
    """Read a ConvTranspose whose results overlap those of the next call; None if nothing overlaps.

    A Slice after the node may drop a wrong number of results; then the chain's length differs from the file's.

    Returns:
        The window; the axis along which results overlap, counted from the third; the reason why the overlap cannot be
            carried, or "".
    """
    if (window := _read(node, sizes)) is None:
        return None
    wider = [at for at, span in enumerate(window.spans) if span > window.strides[at]]
    if not (along := [at for at in wider if sizes.follows(window.source, at + 2)]):
        return None
    at, attributes, fault = along[0], node.attributes, ""
    if (
        len(along) > 1
        or "output_shape" in attributes
        or attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    ):
        fault = "gives sizes of its own, expected a kernel and a stride along one axis of positions"
    elif window.front[at]:
        fault = f"drops its first {window.front[at]} results, expected none: it needs positions that come later"
    elif (cut := _cut(node, sizes)) is not None and cut[0] == at:
        window.cut = cut[2]
    return window, at, fault


def _read(node: ir.Node, sizes: Sizes) -> Window | None:
    kernel, attributes = sizes.of(node.inputs[1])[2:], node.attributes
    ones, none = [1] * len(kernel), [0] * 2 * len(kernel)
    steps, strides, pads = (
        [*attributes.get_ints(name, each)] for name, each in (("dilations", ones), ("strides", ones), ("pads", none))
    )
    spans = [(n - 1) * step + 1 for n, step in zip(kernel, steps, strict=False) if isinstance(n, int)]
    if not len(kernel) == len(spans) == len(steps) == len(strides) == len(pads) / 2 > 0:
        return None
    return Window(node.inputs[0], spans, strides, pads[: len(spans)], pads[len(spans) :])


def _add_pad(window: Window) -> None:
    """Add the zeros of a Pad before a Conv to the zeros that the Conv itself adds."""
    pad = None if window.source is None else window.source.producer()
    if pad is None or pad.op_type != "Pad":
        return
    window.source, pads, value, axes = (*pad.inputs, None, None)[:4]
    filled = None if value is None else ir.convenience.get_const_tensor(value)
    mode, rank = pad.attributes.get_string("mode", "constant"), len(window.spans) + 2
    zeros, along = numbers(pads), [*range(rank)] if axes is None else numbers(axes)
    if zeros is None or along is None:
        window.front, window.behind, window.other = [*window.spans], [*window.spans], "computed sizes"
        return
    if mode != "constant" or (value is not None and (filled is None or filled.numpy().any())):
        window.other = "a number other than 0" if mode == "constant" else mode
    for at, axis in enumerate(along):
        front, behind = zeros[at], zeros[at + len(along)]
        if axis % rank < 2 or min(front, behind) < 0:
            window.other = window.other or ("more than positions" if front or behind else "")
        if axis % rank >= 2:
            window.front[axis % rank - 2] += front
            window.behind[axis % rank - 2] += behind


def _cut(node: ir.Node, sizes: Sizes) -> tuple[int, int, ir.Node] | None:
    """Return the axis from the third that a Slice after a node cuts at its end, the number it drops, and the Slice.

    Convolutions are often padded on both sides, and the surplus is cut off.
    """
    result = node.outputs[0]
    users = [user for user, _ in result.uses() if user.op_type != "Shape"]  # a Shape may serve the Slice
    if len(users) != 1 or users[0].op_type != "Slice":
        return None
    starts, _, axes = (numbers(value) for value in (*users[0].inputs, None)[1:4])
    at = axes[0] % len(sizes.of(result)) if axes and sizes.of(result) else 0
    dropped = sizes.less(result, users[0].outputs[0], at)
    right = at >= 2 and starts == [0]
    return (at - 2, dropped, users[0]) if right and isinstance(dropped, int) and dropped > 0 else None
