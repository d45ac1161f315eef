"""Graphs of an opset that no bundle holds, which files may have, written in one that all engines read.

From opset 24 to 27 no operator that bundles hold changed its meaning: Reshape, Cast and the like took more types, such
as int2, and Range an attribute that the forms refuse. So a graph is the same graph under an older number, once what is
new is rewritten: LinearAttention and CausalConvWithState. The rehearsal and the proof run it beside the file.
"""

from __future__ import annotations

import onnx_ir as ir
from txl_runtime.guard.forms import MICROSOFT, OPSETS

READABLE = range(OPSETS[0], 28)
"""Opsets that files may have."""
_NEWER = """
AveragePool DequantizeLinear Gelu GridSample GroupNormalization IsInf QuantizeLinear ReduceMax ReduceMin
Resize RMSNormalization Swish TensorScatter
"""
_CHANGED = frozenset(_NEWER.split())
"""Operators that came, or changed their meaning or types that bundles have, from opset 19 to 24."""
_ATTRIBUTES = frozenset(("saturate", "round_mode"))
"""Attributes that Cast and CastLike took meanwhile."""
_TAKEN_OVER = {
    "CausalConvWithState": {"activation"},
    "LinearAttention": {"chunk_size", "kv_num_heads", "q_num_heads", "scale", "update_rule"},
}


def as_standard(graph: ir.Graph) -> None:
    """Give ONNX Runtime's own LinearAttention and CausalConvWithState, which opset 27 took over, their standard names.

    Exporters such as mobius write these for ONNX Runtime from 1.26 on. One with more attributes stays, and is refused.
    """
    for node in graph:
        if node.domain == MICROSOFT and node.attributes.keys() <= _TAKEN_OVER.get(node.op_type, set()):
            node.domain, graph.opset_imports[""] = "", READABLE[-1]


def lower(graph: ir.Graph) -> None:
    """Give a graph of opset 25 … 27 the oldest number under which it is the same: 18, or 24 where a node needs that."""
    if graph.opset_imports.get("", 0) > OPSETS[-1]:
        newer = any(node.op_type in _CHANGED or node.attributes.keys() & _ATTRIBUTES for node in graph)
        graph.opset_imports[""] = OPSETS[-1 if newer else 0]
