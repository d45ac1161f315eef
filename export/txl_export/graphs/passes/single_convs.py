"""Replaces a depthwise convolution of which only one position is read by a product with the kernel and a sum.

E.g. mambapy's step convolves the window of the last 4 inputs and reads position 3 of 7. The convolution computes all
positions: for 64 sequences of 256 channels the convolution took 2.1 ms, the product 0.2 ms.
"""

from __future__ import annotations

import onnx_ir as ir

from txl_export.graphs.passes.builder import Builder
from txl_export.graphs.passes.values import axis_of, numbers_of, size_along, sizes_of


def compute_one_position(graph: ir.Graph) -> None:
    """Replace each convolution of which only one position is read, in place."""
    build = Builder(graph, "single")
    for node in list(graph):
        conv = node.inputs[0].producer() if node.op_type == "Gather" and node.inputs[0] is not None else None
        index = numbers_of(node.inputs[1]) if conv is not None and conv.op_type == "Conv" else None
        if conv is None or index is None or sizes_of(node.inputs[1]) or axis_of(node, node.inputs[0]) != 2:
            continue
        value, weight, *bias = conv.inputs
        if value is None or weight is None or len(conv.outputs[0].uses()) > 1 or conv.outputs[0].is_graph_output():
            continue
        channels, taps = size_along(weight, 0), size_along(weight, 2)
        first = index[0] - (conv.attributes.get_ints("pads") or [0])[0]
        alone = conv.attributes.get_int("group", 1) == channels == size_along(value, 1) and len(sizes_of(weight)) == 3
        plain = conv.attributes.get_string("auto_pad", "NOTSET") == "NOTSET" and all(
            set(conv.attributes.get_ints(name) or [1]) == {1} for name in ("strides", "dilations")
        )
        length = size_along(value, 2)
        if not (alone and plain) or taps is None or length is None or not 0 <= first <= length - taps:
            continue
        build.at(node)
        window = value if length == taps else build.slice(value, 2, first, first + taps)
        kernel = build.op("Squeeze", [weight, build.numbers(1)])
        result = build.op("ReduceSum", [build.op("Mul", [window, kernel]), build.numbers(2)], keepdims=0)
        for one in bias:
            result = result if one is None else build.op("Add", [result, one])
        build.replace(node.outputs[0], result)
