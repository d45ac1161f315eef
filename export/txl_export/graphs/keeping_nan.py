"""NaN kept where ONNX Runtime loses it: what PyTorch shows as NaN is no plausible number in the bundle.

ONNX Runtime bounds the gates of LSTM, GRU and RNN, and a largest or least value passes over NaN; so does Erf in older
versions. Sums keep NaN. So a sum over the values that a result depends on decides: where it is NaN, so is the result.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from txl_export.graphs.half import RECURRENT
from txl_export.graphs.quantised_matmul import initializer
from txl_export.graphs.settling import infer_shapes

SUMS = {"ReduceMax": "ReduceSum", "ReduceMin": "ReduceSum", "MaxPool": "AveragePool", "Erf": "Identity"}
"""Operators that lose NaN, and what sums over the same values."""
OF_MAXPOOL_ALONE = ("dilations", "storage_order")


def keep_nan(model: ir.Model) -> None:
    """Guard such operators in place, in a graph of float32 whose values have types and shapes."""
    graph = model.graph
    for node in list(graph):
        tape, sums = Tape(), list[ir.Value]()
        if node.outputs[0].dtype != ir.DataType.FLOAT:
            continue
        if node.op_type in RECURRENT:
            sums = _of_recurrent(tape, graph, node)
        elif node.op_type in SUMS and not _in_gelu(node):
            attributes = {name: one for name, one in node.attributes.items() if name not in OF_MAXPOOL_ALONE}
            sums = [tape.op(SUMS[node.op_type], node.inputs, attributes)]
        for result, total in zip(list(node.outputs), sums, strict=False):
            if result.uses() or result.is_graph_output():
                kept = tape.op("Where", [tape.op("IsNaN", [total]), total, result])
                ir.convenience.replace_all_uses_with(result, kept, replace_graph_outputs=True)
                tape.nodes[-1].replace_input_with(2, result)
                kept.name, result.name = result.name, f"{result.name}.bounded"
                kept.type, kept.shape = result.type, result.shape
        for number, one in enumerate(tape.nodes):
            one.name = f"{node.name}.nan.{number}"
            one.outputs[0].name = one.outputs[0].name or one.name
        graph.insert_after(node, tape.nodes)
    infer_shapes(model)


def _of_recurrent(tape: Tape, graph: ir.Graph, node: ir.Node) -> list[ir.Value]:
    """Sums of what Y [L, D, B, H] depends on, where the layer is causal of no later position, and Y_h and Y_c [D, B, H]."""
    x, direction = node.inputs[0], node.attributes.get_string("direction", "forward")
    if node.inputs[4:5] not in ((), (None,)):  # sequences that end earlier depend on less
        return []
    assert x is not None
    single = x.shape is not None and x.shape[0] == 1  # then each value of a cell concerns itself alone

    def axes(*which: int) -> ir.Value:
        return initializer(graph, f"nan.axes.{'.'.join(map(str, which))}", np.array(which, np.int64))

    def from_start(total: ir.Value) -> ir.Value:
        for state in node.inputs[5 : 6 if single else 7]:
            if state is not None:
                total = tape.op("Add", [total, tape.op("ReduceSum", [state, axes(2)])])
        return total

    whole = from_start(tape.op("ReduceSum", [x, axes(0, 2)]))
    if single or direction != "forward":
        return [tape.op("Unsqueeze", [whole, axes(0)]), whole, whole]
    so_far = tape.op("CumSum", [tape.op("ReduceSum", [x, axes(2)]), axes(0)])
    return [from_start(tape.op("Unsqueeze", [so_far, axes(1)])), whole, whole]


def _in_gelu(node: ir.Node) -> bool:
    """Whether it is an Erf of something scaled that is read elsewhere, too: GELU multiplies by it, so NaN stays."""
    scaled = node.inputs[0].producer() if node.op_type == "Erf" and node.inputs[0] is not None else None
    return scaled is not None and any(one is not None and len(one.uses()) > 1 for one in scaled.inputs[:1])
