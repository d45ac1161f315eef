"""What a convolution reads around its positions: zeros of its own, of a Pad in front, and what is cut off behind it."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from txl_export.families.graph.open.lengths import Sizes, whole_numbers


@dataclass
class Window:
    """A Conv; a list has a number for each axis from the third.

    Attributes:
        source: what it reads, without a Pad in front.
        spans, strides: how many positions a result spans, and how far results are apart.
        front, behind: how many positions stand in front of the first one and behind the last one that counts; as many
            as a result spans where that is computed.
        other: what stands there if not zeros, or "".
        cut: a Slice that drops what stands behind along one axis, or None.
    """

    source: ir.Value | None
    spans: list[int]
    strides: list[int]
    front: list[int]
    behind: list[int]
    other: str = ""
    cut: ir.Node | None = None

    def fault(self, at: int) -> str:
        """Why what stands in front along an axis cannot be a state; "" where it can."""
        front, least = self.front[at], self.spans[at] - self.strides[at]
        if self.other:
            return f"is padded by {self.other}, expected a fixed number of zeros in front of the positions"
        if self.behind[at]:
            return f"reads up to {self.behind[at]} positions that come later, expected zeros in front alone"
        if not least <= front < self.spans[at]:
            return f"has {front} zeros in front, expected {least}, so that there are as many results as positions"
        return ""


def read_window(node: ir.Node, sizes: Sizes) -> Window | None:
    """A Conv with what stands around it; None where its kernel is not known."""
    kernel, said = sizes.of(node.inputs[1])[2:], node.attributes
    ones, none = [1] * len(kernel), [0] * 2 * len(kernel)
    steps, strides, pads = (
        [*said.get_ints(name, each)] for name, each in (("dilations", ones), ("strides", ones), ("pads", none))
    )
    spans = [(n - 1) * step + 1 for n, step in zip(kernel, steps, strict=False) if isinstance(n, int)]
    if not len(kernel) == len(spans) == len(steps) == len(strides) == len(pads) / 2 > 0:
        return None
    window = Window(node.inputs[0], spans, strides, pads[: len(spans)], pads[len(spans) :])
    if said.get_string("auto_pad", "NOTSET").startswith("SAME"):
        window.front, window.behind, window.other = [*spans], [*spans], "auto_pad"
    _add_pad(window)
    _take_cut(window, node, sizes)
    return window


def _add_pad(window: Window) -> None:
    """Zeros of a Pad are as good as those of the Conv behind it."""
    pad = None if window.source is None else window.source.producer()
    if pad is None or pad.op_type != "Pad":
        return
    window.source, pads, value, axes = (*pad.inputs, None, None)[:4]
    filled = None if value is None else ir.convenience.get_const_tensor(value)
    mode, rank = pad.attributes.get_string("mode", "constant"), len(window.spans) + 2
    numbers, named = whole_numbers(pads), [*range(rank)] if axes is None else whole_numbers(axes)
    if numbers is None or named is None or len(numbers) != 2 * len(named):
        window.front, window.behind, window.other = [*window.spans], [*window.spans], "computed sizes"
        return
    if mode != "constant" or (value is not None and (filled is None or filled.numpy().any())):
        window.other = "another number" if mode == "constant" else mode
    for at, axis in enumerate(named):
        front, behind = numbers[at], numbers[at + len(named)]
        if axis % rank < 2 or min(front, behind) < 0:
            window.other = window.other or ("more than positions" if front or behind else "")
        if axis % rank >= 2:
            window.front[axis % rank - 2] += front
            window.behind[axis % rank - 2] += behind


def _take_cut(window: Window, node: ir.Node, sizes: Sizes) -> None:
    """Convolutions without a stride are often padded on both sides, and what is too much is cut off on the right."""
    made = node.outputs[0]
    users = [user for user, _ in made.uses()]
    if len(users) != 1 or users[0].op_type != "Slice" or users[0].graph is not node.graph or made.is_graph_output():
        return
    starts, ends, axes, steps = (whole_numbers(value) for value in (*users[0].inputs, None, None)[1:5])
    if starts != [0] or not ends or not axes or steps not in (None, [1]):
        return
    at = axes[0] % (len(window.spans) + 2) - 2
    size = (*sizes.of(made), *[None] * 9)[at + 2]
    dropped = -ends[0] if ends[0] < 0 else size - ends[0] if isinstance(size, int) else 0
    if at >= 0 and window.strides[at] == 1 and dropped == window.behind[at] > 0:
        window.behind[at], window.cut = 0, users[0]
