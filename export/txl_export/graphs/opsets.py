"""Lowers graphs of opsets 25 to 27, which no bundle may have, to opset 18 or 24.

From opset 24 to 27 no operator of a bundle changed its meaning: Reshape, Cast and others took more types, e.g. int2,
and Range got an attribute that bundles may not have. So once the new LinearAttention and CausalConvWithState are
rewritten, the graph means the same under an older number. The rehearsal and the proof compare the graph with the file.
"""

from __future__ import annotations

import onnx_ir as ir
from txl_runtime.guard.forms import MICROSOFT, OPSETS

READABLE = range(OPSETS[0], 28)
"""Opsets of ONNX files that can be read."""
_NEWER = """
AveragePool DequantizeLinear Gelu GridSample GroupNormalization IsInf QuantizeLinear ReduceMax ReduceMin
Resize RMSNormalization Swish TensorScatter
"""
_CHANGED = frozenset(_NEWER.split())
"""Operators that are new in opsets 19 to 24, or changed there in meaning or in types that a bundle may have."""
_ATTRIBUTES = frozenset(("saturate", "round_mode"))
"""Attributes that Cast and CastLike got after opset 18."""
_TAKEN_OVER = {
    "CausalConvWithState": {"activation"},
    "LinearAttention": {"chunk_size", "kv_num_heads", "q_num_heads", "scale", "update_rule"},
}


def as_standard(graph: ir.Graph) -> None:
    """Give ONNX Runtime's own LinearAttention and CausalConvWithState their standard names of opset 27.

    Exporters such as mobius write these operators for ONNX Runtime 1.26 and later. A node with attributes that the
    standard lacks stays, and is refused later.
    """
    for node in graph:
        if node.domain == MICROSOFT and node.attributes.keys() <= _TAKEN_OVER.get(node.op_type, set()):
            node.domain, graph.opset_imports[""] = "", READABLE[-1]


def lower(graph: ir.Graph) -> None:
    """Lower a graph of opset 25 … 27 to the oldest opset in which it means the same: 18, or 24 if a node needs that."""
    if graph.opset_imports.get("", 0) > OPSETS[-1]:
        newer = any(node.op_type in _CHANGED or node.attributes.keys() & _ATTRIBUTES for node in graph)
        graph.opset_imports[""] = OPSETS[-1 if newer else 0]
