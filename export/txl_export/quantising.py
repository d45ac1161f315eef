"""int8 and int4 weights for the CPU: which matrices, how they are stored, how a graph multiplies by them.

Quantised are the four matrices of every layer: they are what a decode step reads. Embedding, softmax, norms, tables of
relative positions, attention and memory stay float32.

* **int8**: one scale per output column, symmetric. Activations become uint8 with one scale per ROW (token), so that no
  row's result depends on another's; products are MatMulInteger's. No kept tool writes this form: ONNX Runtime's dynamic
  quantiser takes one scale for a whole tensor, and then padding and neighbours change what a stream gets.
* **int4**: blocks of 32 along the input, a scale and a zero point each, by ONNX Runtime's MatMulNBits quantiser;
  products are its MatMulNBits, with activations in int8 per row and block.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor
from txl_runtime.errors import UsageError

from txl_export.weights import State

__all__ = ["MICROSOFT", "QUANTISED", "dequantise", "is_quantised", "multiply_quantised", "quantise"]

QUANTISED = ("int8", "int4")
BLOCK = 32
MICROSOFT = "com.microsoft"
MATRICES = (
    ".attention.query_key_value.weight",
    ".attention.output.weight",
    ".feed_forward.inner.weight",
    ".feed_forward.outer.weight",
)


def is_quantised(name: str) -> bool:
    """Whether a part from `quantise` holds codes."""
    return name.endswith(QUANTISED)


def _is_matrix(name: str) -> bool:
    return name.endswith(MATRICES)


def quantise(folded: Mapping[str, Tensor], precision: str, keep: Collection[str] = ()) -> State:
    """The parameters with the matrices replaced by their quantised parts, `NAME.int8` and `NAME.scale` or the like.

    Args:
        folded: from `txl_export.folding.fold`.
        precision: int8 or int4; any other leaves all as it is.
        keep: beginnings of names to leave in float32, such as "layers.03".

    Raises:
        UsageError: nothing begins like a name to keep.
    """
    for start in keep:
        if not any(_begins(name, start) for name in folded if _is_matrix(name)):
            raise UsageError(f"--keep {start} names no matrix; expected e.g. layers.00 or layers.00.feed_forward.inner")
    parts: State = {}
    for name, tensor in folded.items():
        if precision not in QUANTISED or not _is_matrix(name) or any(_begins(name, start) for start in keep):
            parts[name] = tensor
        elif precision == "int8":
            scale = tensor.abs().amax(dim=0).clamp_min(1e-30) / 127
            parts[f"{name}.int8"] = (tensor / scale).round().to(torch.int8)  # [in, out]
            parts[f"{name}.scale"] = scale
        else:
            codes, scale, zero = _four_bits(tensor.numpy())
            parts |= {f"{name}.int4": codes, f"{name}.scale": scale, f"{name}.zero": zero}
            parts[f"{name}.shape"] = torch.tensor(tensor.shape, dtype=torch.int32)
    return parts


def dequantise(parts: Mapping[str, Tensor]) -> State:
    """The inverse of `quantise`, to its rounding: what the quantised matrices stand for."""
    folded: State = {}
    for name, tensor in parts.items():
        base, _, kind = name.rpartition(".")
        if kind == "int8":
            folded[base] = tensor.float() * parts[f"{base}.scale"]
        elif kind == "int4":
            folded[base] = _from_four_bits(parts, base)
        elif not (_is_matrix(base) and kind in ("scale", "zero", "shape")):
            folded[name] = tensor
    return folded


def multiply_quantised(graph: ir.Graph, parts: Mapping[str, Tensor]) -> None:
    """Replace products with quantised matrices; the graph's initializers are named as the parameters, "/" for "."."""
    for node in list(graph):
        matrix = node.inputs[1] if node.op_type == "MatMul" else None
        if matrix is None or matrix.const_value is None or matrix.name is None:
            continue
        name = matrix.name.replace("/", ".")
        if f"{name}.int8" in parts:
            nodes = _by_rows(graph, node, name, parts)
        elif f"{name}.int4" in parts:
            nodes = _by_blocks(graph, node, name, parts)
        else:
            continue
        found, made = node.outputs[0], nodes[-1].outputs[0]
        made.name, made.type, made.shape = found.name, found.type, found.shape
        found.name = f"{found.name}.float"
        ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [found], [made])
        if not matrix.uses() and matrix.name in graph.initializers:
            del graph.initializers[matrix.name]


def _by_rows(graph: ir.Graph, node: ir.Node, name: str, parts: Mapping[str, Tensor]) -> list[ir.Node]:
    """X @ W as integers: x is scaled to 127 per row, W per column. A row of zeros stays one."""
    rows = node.inputs[0]
    assert rows is not None
    axis = _shared(graph, "quantising.axis", np.array([-1], np.int64))
    tiny = _shared(graph, "quantising.tiny", np.float32(1e-30))
    full = _shared(graph, "quantising.full", np.float32(127))
    unit = _shared(graph, "quantising.unit", np.float32(1))
    middle = _shared(graph, "quantising.middle", np.uint8(128))
    codes, scale = _parameter(graph, f"{name}.int8", parts), _parameter(graph, f"{name}.scale", parts)
    made: list[ir.Node] = []

    def add(operator: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        made.append(ir.node(operator, inputs, attributes=attributes or None))
        made[-1].outputs[0].name = f"{name}.{len(made)}"
        return made[-1].outputs[0]

    largest = add("Max", add("ReduceMax", add("Abs", rows), axis, keepdims=1), tiny)
    step = add("Div", largest, full)
    quantised = add("QuantizeLinear", add("Div", rows, step), unit, middle)
    product = add("Cast", add("MatMulInteger", quantised, codes, middle), to=ir.DataType.FLOAT)
    add("Mul", add("Mul", product, scale), step)
    return made


def _by_blocks(graph: ir.Graph, node: ir.Node, name: str, parts: Mapping[str, Tensor]) -> list[ir.Node]:
    size, width = (int(n) for n in parts[f"{name}.shape"])
    inputs = [node.inputs[0], *(_parameter(graph, f"{name}.{part}", parts) for part in ("int4", "scale", "zero"))]
    attributes = {"K": size, "N": width, "bits": 4, "block_size": BLOCK, "accuracy_level": 4}
    made = ir.node("MatMulNBits", inputs, attributes=attributes, domain=MICROSOFT)
    graph.opset_imports[MICROSOFT] = 1
    return [made]


def _parameter(graph: ir.Graph, name: str, parts: Mapping[str, Tensor]) -> ir.Value:
    """An initializer of that name, which `write_graph` lets point into the weight file."""
    return _shared(graph, name, parts[name].numpy())


def _shared(graph: ir.Graph, name: str, array: NDArray[np.generic] | np.generic) -> ir.Value:
    if name not in graph.initializers:
        tensor = ir.tensor(np.asarray(array), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        graph.register_initializer(value)
    return graph.initializers[name]


def _four_bits(matrix: NDArray[np.float32]) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [out, blocks, 16], scales and packed zero points, by ONNX Runtime's quantiser."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    size, width = matrix.shape
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "one product",
        [value("x", onnx.TensorProto.FLOAT, [1, size])],
        [value("y", onnx.TensorProto.FLOAT, [1, width])],
        [onnx.numpy_helper.from_array(matrix, "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])
    quantiser = MatMulNBitsQuantizer(model, bits=4, block_size=BLOCK, is_symmetric=False, accuracy_level=4)
    quantiser.process()
    (product,) = quantiser.model.model.graph.node
    found = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in quantiser.model.model.graph.initializer}
    codes, scale, zero = (torch.from_numpy(found[name].copy()) for name in product.input[1:4])
    return codes, scale, zero


def _from_four_bits(parts: Mapping[str, Tensor], base: str) -> Tensor:
    size, width = (int(n) for n in parts[f"{base}.shape"])
    codes, scale = parts[f"{base}.int4"], parts[f"{base}.scale"].reshape(width, -1, 1)
    values = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(start_dim=2)  # [out, blocks, 32], low half first
    packed = parts[f"{base}.zero"].reshape(width, -1)
    zero = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(start_dim=1)[:, : codes.shape[1], None]
    matrix = (values.float() - zero.float()) * scale
    return matrix.flatten(start_dim=1)[:, :size].T.contiguous()


def _begins(name: str, start: str) -> bool:
    return name.startswith(f"{start}.") or name == start
