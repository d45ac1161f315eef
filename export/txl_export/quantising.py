"""int8 and int4 weights for the CPU: which matrices, how they are stored, how a graph multiplies by them.

Quantised are the four matrices of every layer: they are what a decode step reads. Embedding, softmax, norms, tables of
relative positions, attention and memory stay float32.

Both are ONNX Runtime's MatMulNBits, weights by its own quantiser: blocks along the input, a scale and a zero point
each, in blocks of 128 where the width allows. Activations become int8 per row (token)
and block, so that no row's result depends on another's. Tried instead: ONNX Runtime's dynamic quantiser takes one scale
for a whole tensor, and then padding and neighbours change what a stream gets; scales per row written out around an
integer product are exact in that, faster for whole segments and slower for single tokens (docs/performance.md).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import onnx
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor
from txl_runtime.errors import UsageError

from txl_export.weights import State

__all__ = ["MICROSOFT", "QUANTISED", "dequantise", "gain_error", "is_quantised", "multiply_quantised", "quantise"]

QUANTISED = ("int8", "int4")
BITS = {"int8": 8, "int4": 4}
BLOCKS = (128, 64, 32)
MICROSOFT = "com.microsoft"
MATRICES = (
    ".attention.query_key_value.weight",
    ".attention.output.weight",
    ".feed_forward.inner.weight",
    ".feed_forward.outer.weight",
)


def gain_error(folded: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> float:
    """How far quantised matrices are from standing for the originals at full size: the largest |gain - 1|.

    The gain is the slope of a line through the origin from original to quantised values. Rounding cancels out in it
    and a wrong scale does not, which the loose limits of few bits would let pass.
    """
    worst = 0.0
    for name, found in dequantise({name: part for name, part in parts.items() if _is_part(name)}).items():
        original = folded[name].double()
        slope = float((found.double() * original).sum() / original.square().sum().clamp_min(1e-30))
        worst = max(worst, abs(slope - 1))
    return worst


def _is_part(name: str) -> bool:
    return _is_matrix(name.rpartition(".")[0])


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
        else:
            codes, scale, zero = _blocks(tensor.numpy(), precision)
            parts |= {f"{name}.{precision}": codes, f"{name}.scale": scale, f"{name}.zero": zero}
            parts[f"{name}.shape"] = torch.tensor(tensor.shape, dtype=torch.int32)
    return parts


def dequantise(parts: Mapping[str, Tensor]) -> State:
    """The inverse of `quantise`, to its rounding: what the quantised matrices stand for."""
    folded: State = {}
    for name, tensor in parts.items():
        base, _, kind = name.rpartition(".")
        if kind in QUANTISED:
            folded[base] = _from_blocks(parts, base, kind)
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
        precision = next((precision for precision in QUANTISED if f"{name}.{precision}" in parts), None)
        if precision is None:
            continue
        product = _product(graph, node, name, precision, parts)
        found, made = node.outputs[0], product.outputs[0]
        made.name, made.type, made.shape = found.name, found.type, found.shape
        found.name = f"{found.name}.float"
        ir.convenience.replace_nodes_and_values(graph, node, [node], [product], [found], [made])
        if not matrix.uses() and matrix.name in graph.initializers:
            del graph.initializers[matrix.name]


def _product(graph: ir.Graph, node: ir.Node, name: str, precision: str, parts: Mapping[str, Tensor]) -> ir.Node:
    size, width = (int(n) for n in parts[f"{name}.shape"])
    inputs = [node.inputs[0], *(_parameter(graph, f"{name}.{part}", parts) for part in (precision, "scale", "zero"))]
    # accuracy_level 4: products of integers, the activations' scales per row and block.
    attributes = {"K": size, "N": width, "bits": BITS[precision], "block_size": _block(size)}
    graph.opset_imports[MICROSOFT] = 1
    return ir.node("MatMulNBits", inputs, attributes=attributes | {"accuracy_level": 4}, domain=MICROSOFT)


def _block(size: int) -> int:
    """How many inputs share a scale: as many as divide them all, or else as few as there can be."""
    return next((block for block in BLOCKS if size % block == 0), BLOCKS[-1])


def _parameter(graph: ir.Graph, name: str, parts: Mapping[str, Tensor]) -> ir.Value:
    """An initializer of that name, which `write_graph` lets point into the weight file."""
    if name not in graph.initializers:
        tensor = ir.tensor(parts[name].numpy(), name=name)
        shape, kind = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
        graph.register_initializer(ir.Value(name=name, type=kind, shape=shape, const_value=tensor))
    return graph.initializers[name]


def _blocks(matrix: NDArray[np.float32], precision: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [out, blocks, bytes of a block], scales and packed zero points, by ONNX Runtime's quantiser."""
    with _quiet_logging():
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
    quantiser = MatMulNBitsQuantizer(
        model, bits=BITS[precision], block_size=_block(size), is_symmetric=False, accuracy_level=4
    )
    with _quiet_logging():
        quantiser.process()
    (product,) = quantiser.model.model.graph.node
    found = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in quantiser.model.model.graph.initializer}
    codes, scale, zero = (torch.from_numpy(found[name].copy()) for name in product.input[1:4])
    return codes, scale, zero


@contextlib.contextmanager
def _quiet_logging() -> Iterator[None]:
    """The quantiser sets up the whole process's logging when it is imported, and says what nobody asked."""
    root = logging.getLogger()
    handlers, level, off = list(root.handlers), root.level, logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(off)
        root.handlers[:] = handlers
        root.setLevel(level)


def _from_blocks(parts: Mapping[str, Tensor], base: str, precision: str) -> Tensor:
    size, width = (int(n) for n in parts[f"{base}.shape"])
    codes, zero = parts[f"{base}.{precision}"], parts[f"{base}.zero"].reshape(width, -1)
    if BITS[precision] == 4:  # two to a byte, the low half first
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(start_dim=2)
        zero = torch.stack([zero & 15, zero >> 4], dim=-1).flatten(start_dim=1)
    zero, scale = zero[:, : codes.shape[1], None], parts[f"{base}.scale"].reshape(width, -1, 1)
    matrix = (codes.float() - zero.float()) * scale  # [out, blocks, inputs of a block]
    return matrix.flatten(start_dim=1)[:, :size].T.contiguous()


def _begins(name: str, start: str) -> bool:
    return name.startswith(f"{start}.") or name == start
