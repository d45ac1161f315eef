"""NaN kept where ONNX Runtime loses it, so that what PyTorch shows as NaN is no plausible number in the bundle.

ONNX Runtime bounds the gates of LSTM, GRU and RNN; largest and least values pass over NaN; so does Erf in older
versions. Sums keep NaN. So each such result gets a mark added: NaN where the sum of what it depends on is NaN, else 0.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from txl_export.graphs.half import RECURRENT
from txl_export.graphs.quantised_matmul import initializer
from txl_export.graphs.settling import infer_shapes

SUMS = {"ReduceMax": "ReduceSum", "ReduceMin": "ReduceSum", "MaxPool": "AveragePool", "Erf": "", "Shrink": ""}
"""Operators that lose NaN, and what sums over the same values; "" where each value has its own result."""
OF_MAXPOOL_ALONE = ("dilations", "storage_order")


def keep_nan(model: ir.Model) -> None:
    """Guard such operators in place, in a graph of float32 whose values have types and shapes."""
    graph = model.graph
    for node in list(graph):
        tape, marks = Tape(), list[ir.Value]()
        if node.op_type in RECURRENT:
            marks = _of_recurrent(tape, graph, node)
        elif node.op_type == "TopK":  # which of a row's values are NaN is not known, so all of them are
            along = _axes(graph, node.attributes.get_int("axis", -1))
            marks = [_mark(tape, graph, tape.op("ReduceSum", [node.inputs[0], along]))]
        elif node.op_type in SUMS and not _in_gelu(node) and set(node.attributes.get_ints("dilations", [])) <= {1}:
            attributes = {name: one for name, one in node.attributes.items() if name not in OF_MAXPOOL_ALONE}
            kind = SUMS[node.op_type]
            marks = [_mark(tape, graph, tape.op(kind, node.inputs, attributes) if kind else node.inputs[0])]
        for result, mark in zip(node.outputs, marks, strict=False):
            if result.dtype == ir.DataType.FLOAT and (result.uses() or result.is_graph_output()):
                kept = tape.op("Add", [mark, result])
                ir.convenience.replace_all_uses_with(result, kept, replace_graph_outputs=True)
                tape.nodes[-1].replace_input_with(1, result)
                kept.name, result.name = result.name, f"{result.name}.bounded"
                kept.type, kept.shape = result.type, result.shape
        for number, one in enumerate(tape.nodes):
            one.name = f"{node.name}.nan.{number}"
            one.outputs[0].name = one.outputs[0].name or one.name
        graph.insert_after(node, tape.nodes)
    RemoveUnusedNodesPass()(model)  # results of whole numbers, or unread, have no mark
    infer_shapes(model)


def _mark(tape: Tape, graph: ir.Graph, total: ir.Value | None) -> ir.Value:
    return tape.op("Where", [tape.op("IsNaN", [total]), total, initializer(graph, "nan.none", np.float32(0))])


def _axes(graph: ir.Graph, *which: int) -> ir.Value:
    return initializer(graph, f"nan.axes.{'.'.join(map(str, which))}", np.array(which, np.int64))


def _of_recurrent(tape: Tape, graph: ir.Graph, node: ir.Node) -> list[ir.Value]:
    """Marks of Y [L, D, B, H], and of Y_h and Y_c [D, B, H]. A causal layer's Y depends on no later position."""
    x, causal = node.inputs[0], node.attributes.get_string("direction", "forward") == "forward"
    if node.inputs[4:5] not in ((), (None,)):  # sequences that end earlier depend on less
        return []
    assert x is not None
    single = x.shape is not None and x.shape[0] == 1  # then each value of a cell concerns itself alone
    total = tape.op("ReduceSum", [x, _axes(graph, *((2,) if causal else (0, 2)))])
    for state in node.inputs[5 : 6 if single else 7]:
        if state is not None:
            total = tape.op("Add", [total, tape.op("ReduceSum", [state, _axes(graph, 2)])])
    if single or not causal:
        return [_mark(tape, graph, total)] * 3
    so_far = tape.op("Unsqueeze", [tape.op("CumSum", [total, _axes(graph, 0)]), _axes(graph, 1)])
    whole = _mark(tape, graph, tape.op("ReduceSum", [total, _axes(graph, 0)]))
    return [_mark(tape, graph, so_far), whole, whole]


def _in_gelu(node: ir.Node) -> bool:
    """Whether it is an Erf of something scaled that is read elsewhere, too: GELU multiplies by it, so NaN stays."""
    scaled = node.inputs[0].producer() if node.op_type == "Erf" and node.inputs[0] is not None else None
    return scaled is not None and any(one is not None and len(one.uses()) > 1 for one in scaled.inputs[:1])
