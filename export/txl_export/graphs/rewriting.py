"""Rewrites operators that bundles may not have into operators that they may have; each rewrite has a differential test.

A rewrite is a function of a graph and a node. `REWRITES` lists it by the operator's name, e.g. "DFT" or
"com.microsoft::QGemm"; large rewrites are separate modules. Types and shapes are inferred before a rewrite runs. A
rewrite leaves a node that it does not support, or raises an `UnsettledError`. A node that was left is refused by
`settling`, like any operator that bundles may not have. Operators that the standard defines by simpler ones, e.g.
MeanVarianceNormalization, are expanded by onnx when the graph is folded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import onnx_ir as ir

from txl_export.graphs.between_quantisers import OPERATORS, between_quantisers
from txl_export.graphs.dft import dft_as_product, stft_as_convolution
from txl_export.graphs.linear_attention import rewrite_attention, rewrite_convolution
from txl_export.graphs.passes.builder import Builder


def full_name(node: ir.Node) -> str:
    """Return an operator's name, after its domain if that is not the standard's: "Add", "com.microsoft::QGemm"."""
    return f"{node.domain.removeprefix('ai.onnx')}::{node.op_type}".removeprefix("::")


def to_forms(model: ir.Model) -> None:
    """Rewrite the nodes that are in `REWRITES`, in place; types and shapes have been inferred."""
    for node in list(model.graph):
        if (rewrite := REWRITES.get(full_name(node))) is not None:
            rewrite(model.graph, node)


def _without_dropout(graph: ir.Graph, node: ir.Node) -> None:
    """Replace a Dropout that is off by Identity."""
    training = node.inputs[2] if len(node.inputs) > 2 else None
    value = None if training is None else ir.convenience.get_const_tensor(training)
    off = training is None or (value is not None and not value.numpy().any())
    if off and node.inputs[0] is not None and not (len(node.outputs) > 1 and node.outputs[1].uses()):
        passed = ir.node("Identity", [node.inputs[0]])
        ir.convenience.replace_nodes_and_values(graph, node, [node], [passed], node.outputs[:1], passed.outputs)


_USUAL = MappingProxyType({"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]})


def _as_usual(_: ir.Graph, node: ir.Node) -> None:
    """Remove attributes that only state a default: usual activations, and layout 0."""
    if (layout := node.attributes.get("layout")) is not None and layout.as_int() == 0:
        del node.attributes["layout"]  # the forms of a bundle's RNN do not include it
    activations = node.attributes.get("activations")
    one = _USUAL[node.op_type]
    if activations is not None and list(activations.as_strings()) in (one, one * 2):
        del node.attributes["activations"]


def _bias_apart(graph: ir.Graph, node: ir.Node) -> None:
    """Move a convolution's bias to a separate Add if bias or weight is computed, because bundles need known sizes."""
    weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    shape = node.outputs[0].shape
    if bias is None or shape is None or (_is_known(weight) and _is_known(bias)):
        return
    build = Builder(graph, "bias").at(node)
    result = build.op(node.op_type, node.inputs[:2], shape, **node.attributes)
    rows = build.op("Reshape", [bias, build.numbers(-1, *[1] * (len(shape) - 2))])
    build.replace(node.outputs[0], build.op("Add", [result, rows], shape))
    graph.remove(node, safe=True)


def _is_known(value: ir.Value | None) -> bool:
    while value is not None and (maker := value.producer()) is not None:
        value = maker.inputs[0] if maker.op_type in ("Cast", "DequantizeLinear", "Identity") else None
    return value is not None and value.is_initializer()


REWRITES: Mapping[str, Callable[[ir.Graph, ir.Node], None]] = MappingProxyType(
    {
        "CausalConvWithState": rewrite_convolution,
        "Conv": _bias_apart,
        "ConvTranspose": _bias_apart,
        "Dropout": _without_dropout,
        "DFT": dft_as_product,
        "LinearAttention": rewrite_attention,
        "STFT": stft_as_convolution,
        **dict.fromkeys(_USUAL, _as_usual),
        **dict.fromkeys(OPERATORS, between_quantisers),
    }
)
