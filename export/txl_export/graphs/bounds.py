"""Clips integers with operators that every engine supports.

torch writes Clip for every clamp, and onnxscript makes one Clip of a Max and a Min. But ONNX Runtime has no CUDA kernel
of Clip for int32, and TensorRT documents none. All engines have Max and Min for int32, which compute the same.
"""

from __future__ import annotations

import onnx_ir as ir


def bound_by_max_and_min(graph: ir.Graph) -> None:
    """Replace each Clip of integers by Max and Min."""
    for node in list(graph):
        result = node.outputs[0]
        if node.op_type != "Clip" or result.dtype is None or not result.dtype.is_integer():
            continue
        value, least, most = (*node.inputs, None, None)[:3]
        assert value is not None
        bounds = [(kind, bound) for kind, bound in (("Max", least), ("Min", most)) if bound is not None]
        nodes: list[ir.Node] = []
        nothing: list[tuple[str, ir.Value | None]] = [("Identity", None)]
        for kind, bound in bounds or nothing:
            part = ir.node(kind, [value, *([] if bound is None else [bound])], name=f"{node.name}.{kind}")
            value = part.outputs[0]
            value.name, value.type, value.shape = f"{result.name}.{kind}", result.type, result.shape
            nodes.append(part)
        name, result.name = result.name, None
        value.name = name
        ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [result], [value])
