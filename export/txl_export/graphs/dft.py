"""DFT and STFT of a fixed size, written as products with constant matrices.

For example, a one-sided DFT of [1, 512, 1] becomes Reshape to [1, 512], MatMul with [512, 514], and Reshape to
[1, 257, 2]. The matrix is what NumPy's transform makes of the unit vectors in float64, rounded once. An STFT becomes a
convolution whose kernel is that matrix times the window; its signal may have any length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from txl_export.graphs.passes.builder import Builder
from txl_export.graphs.unsettled import STACK_TRACE, UnsettledError

MOST = 4096
"""Samples of a transform; the matrix of a complex one has 4 · MOST² numbers."""


def dft_as_product(graph: ir.Graph, node: ir.Node) -> None:
    """Replace a DFT or its inverse along any axis.

    Raises:
        UnsettledError: the axis or the length is not a constant, or there are more samples than MOST.
    """
    signal, shape = _signal(node)
    default = 1 if graph.opset_imports[""] < 20 else -2
    axis = _number(node, 2, node.attributes.get_int("axis", default)) % len(shape)
    samples, parts = _number(node, None, shape[axis]), _number(node, None, shape[-1])
    inverse, onesided = (bool(node.attributes.get_int(name, 0)) for name in ("inverse", "onesided"))
    length = _number(node, 1, 2 * (samples - 1) if inverse and onesided else samples)
    matrix = _matrix(node, samples, parts, length, inverse, onesided)
    build = Builder(graph, "dft").at(node)
    order = [*(one for one in range(len(shape) - 1) if one != axis), axis, len(shape) - 1]
    kept, made = [0] * (len(shape) - 2), 1 if inverse and onesided else 2
    flat = build.op("Reshape", [build.transpose(signal, order), build.numbers(*kept, samples * parts)])
    product = build.op("MatMul", [flat, build.constant(matrix.astype(_kind(signal)))])
    pairs = build.op("Reshape", [product, build.numbers(*kept, matrix.shape[1] // made, made)])
    build.replace(node.outputs[0], build.transpose(pairs, [int(place) for place in np.argsort(order)]))


def stft_as_convolution(graph: ir.Graph, node: ir.Node) -> None:
    """Replace an STFT: each frequency has one filter for its real and one for its imaginary part.

    Raises:
        UnsettledError: the frames' step, length or window is not constant, or a frame is longer than MOST.
    """
    signal, shape = _signal(node)
    given = node.inputs[2] if len(node.inputs) > 2 else None
    window = None if given is None else _constant(node, given).astype(np.float64)
    length = _number(node, 3, shape[1] if window is None else len(window))
    if window is not None and len(window) != length:
        raise _refused(node, f"with a window of {len(window)} numbers for frames of {length}, expected as many")
    parts = _number(node, None, shape[2]) if len(shape) == 3 else 1  # torch's older exporter writes [B, samples]
    matrix = _matrix(node, length, parts, length, False, bool(node.attributes.get_int("onesided", 1)))
    filters = matrix.reshape(length, parts, -1) * (np.ones(length) if window is None else window)[:, None, None]
    build = Builder(graph, "stft").at(node)
    kernel = build.constant(np.ascontiguousarray(filters.T, _kind(signal)))
    real = build.op("Reshape", [signal, build.numbers(0, 1, -1)]) if parts == 1 else build.transpose(signal, [0, 2, 1])
    filtered = build.op("Conv", [real, kernel], strides=[_number(node, 1, None)])
    pairs = build.op("Reshape", [filtered, build.numbers(0, matrix.shape[1] // 2, 2, -1)])
    build.replace(node.outputs[0], build.transpose(pairs, [0, 3, 1, 2]))


def _matrix(
    node: ir.Node, samples: int, parts: int, length: int, inverse: bool, onesided: bool
) -> NDArray[np.float64]:
    """The transform of each unit vector, [samples · parts, …]; a complex number is its two parts in a row."""
    if not 0 < max(samples, length) <= MOST or length < 1:
        raise _refused(node, f"of {max(samples, length)} samples, expected 1 … {MOST}; take shorter frames")
    if onesided and parts != (2 if inverse else 1):
        raise _refused(node, f"with one side and numbers of {parts} parts, expected {2 if inverse else 1}")
    unit = np.multiply.outer(np.eye(samples), [1, 1j] if parts == 2 else [1.0])
    rows = unit.transpose(0, 2, 1).reshape(samples * parts, samples)
    if onesided:
        transform: Any = np.fft.irfft if inverse else np.fft.rfft
    else:
        transform = np.fft.ifft if inverse else np.fft.fft
    made: NDArray[np.float64] = transform(rows, length).view(np.float64)
    return made


def _signal(node: ir.Node) -> tuple[ir.Value, ir.Shape]:
    signal = node.inputs[0]
    if signal is None or signal.dtype is None or signal.shape is None or len(signal.shape) < 2:
        raise _refused(node, "of a signal whose axes cannot be told")
    return signal, signal.shape


def _kind(signal: ir.Value) -> np.dtype[Any]:
    assert signal.dtype is not None
    return signal.dtype.numpy()


def _number(node: ir.Node, index: int | None, otherwise: Any) -> int:
    """A size: that of an input where there is one, else the other."""
    given = node.inputs[index] if index is not None and index < len(node.inputs) else None
    size = otherwise if given is None else _constant(node, given).item()
    if not isinstance(size, int):
        raise _refused(node, "over an axis of an open size, expected a number; fix it, or cut the signal into frames")
    return size


def _constant(node: ir.Node, value: ir.Value) -> NDArray[Any]:
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None:
        raise _refused(node, "with a length, step or window computed from data, expected constants", final=False)
    return tensor.numpy()


def _refused(node: ir.Node, found: str, final: bool = True) -> UnsettledError:
    """Final, but for a window computed from data: torch decomposes that STFT into a product with it and a DFT."""
    trace = node.metadata_props.get(STACK_TRACE, "")
    return UnsettledError(f"it becomes the operator {node.op_type} {found}", trace, final)
