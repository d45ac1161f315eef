"""Rewrites the operators DFT and STFT of a fixed size as products with constant matrices.

For example, a one-sided DFT of [1, 512, 1] becomes Reshape to [1, 512], MatMul with [512, 514], and Reshape to [1, 257,
2]. The matrix is NumPy's transform of the unit vectors in float64, rounded once. An STFT becomes a convolution whose
kernel is that matrix times the window; its signal may have any length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from txl_export.graphs.passes.builder import Builder
from txl_export.graphs.unsettled import STACK_TRACE, UnsettledError

MOST = 40_000_000
"""Maximum number of values of all constant matrices in a graph: enough for rfft and irfft of 4,096 samples."""


class _Transform(NamedTuple):
    """The transform of `samples` numbers along an axis; each number has one part (real) or two (complex)."""

    samples: int
    parts: int
    length: int
    inverse: bool
    onesided: bool

    @property
    def made(self) -> tuple[int, int]:
        """The number of results, and the number of parts of each result, e.g. 257 and 2 for `rfft` of 512 samples."""
        if self.onesided and self.inverse:
            return self.length, 1
        return (self.length // 2 + 1 if self.onesided else self.length), 2

    def matrix(self) -> NDArray[np.float64]:
        """Return the transform's matrix [samples · parts, results · parts]; the parts of a number are neighbours."""
        read = min(self.samples, self.length)
        unit = np.multiply.outer(np.eye(read), [1, 1j] if self.parts == 2 else [1.0])
        rows = unit.transpose(0, 2, 1).reshape(read * self.parts, read)
        if self.onesided:
            matrix: NDArray[Any] = np.fft.irfft(rows, self.length) if self.inverse else np.fft.rfft(rows, self.length)
        else:
            matrix = np.fft.ifft(rows, self.length) if self.inverse else np.fft.fft(rows, self.length)
        return np.pad(matrix.view(np.float64), ((0, (self.samples - read) * self.parts), (0, 0)))


def dft_as_product(graph: ir.Graph, node: ir.Node) -> None:
    """Replace a DFT, or an inverse DFT, along any axis by a product with a constant matrix.

    Raises:
        UnsettledError: the axis or the length is not a constant, or the matrices would have more than `MOST` values.
    """
    signal, shape = _signal(node)
    default = 1 if graph.opset_imports[""] < 20 else -2
    axis = _number(node, 2, node.attributes.get_int("axis", default)) % len(shape)
    samples, parts = _number(node, None, shape[axis]), _number(node, None, shape[-1])
    inverse, onesided = (bool(node.attributes.get_int(name, 0)) for name in ("inverse", "onesided"))
    length = _number(node, 1, 2 * (samples - 1) if inverse and onesided else samples)
    transform = _Transform(samples, parts, length, inverse, onesided)
    build, zeros = Builder(graph, "dft").at(node), [0] * (len(shape) - 2)
    matrix = _constant_of(
        graph, node, transform, None, lambda: build.constant(transform.matrix().astype(_kind(signal)))
    )
    order = [*(one for one in range(len(shape) - 1) if one != axis), axis, len(shape) - 1]
    flat = build.op("Reshape", [build.transpose(signal, order), build.numbers(*zeros, samples * parts)])
    product = build.op("MatMul", [flat, matrix])
    result = build.op("Reshape", [product, build.numbers(*zeros, *transform.made)])
    build.replace(node.outputs[0], build.transpose(result, [int(place) for place in np.argsort(order)]))


def stft_as_convolution(graph: ir.Graph, node: ir.Node) -> None:
    """Replace an STFT by a convolution with two filters per frequency, for the real and the imaginary part.

    Raises:
        UnsettledError: the frames' step, length or window is not constant, or the filters would have more than `MOST`
            values.
    """
    signal, shape = _signal(node)
    window_input = node.inputs[2] if len(node.inputs) > 2 else None
    window = None if window_input is None else _constant(node, window_input).astype(np.float64)
    length = _number(node, 3, shape[1] if window is None else len(window))
    if window is not None and len(window) != length:
        raise _refused(node, f"with a window of {len(window)} numbers for frames of {length}, expected as many")
    # torch's older exporter writes real signals as [B, samples]
    parts = _number(node, None, shape[2]) if len(shape) == 3 else 1
    transform = _Transform(length, parts, length, False, bool(node.attributes.get_int("onesided", 1)))
    build = Builder(graph, "stft").at(node)

    def kernel() -> ir.Value:
        weights = np.ones(length) if window is None else window
        filters = transform.matrix().reshape(length, parts, -1) * weights[:, None, None]
        return build.constant(np.ascontiguousarray(filters.T, _kind(signal)))

    filters = _constant_of(graph, node, transform, window_input, kernel)
    real = build.op("Reshape", [signal, build.numbers(0, 1, -1)]) if parts == 1 else build.transpose(signal, [0, 2, 1])
    filtered = build.op("Conv", [real, filters], strides=[_number(node, 1, None)])
    result = build.op("Reshape", [filtered, build.numbers(0, *transform.made, -1)])
    build.replace(node.outputs[0], build.transpose(result, [0, 3, 1, 2]))


def _constant_of(
    graph: ir.Graph, node: ir.Node, transform: _Transform, window: ir.Value | None, make: Callable[[], ir.Value]
) -> ir.Value:
    """Return a transform's constant, made once per graph; `MOST` limits all, because small files may ask for much."""
    parts = (2 if transform.inverse else 1,) if transform.onesided else (1, 2)
    if transform.parts not in parts or min(transform.samples, transform.length) < 1:
        expected = f"samples of {' or '.join(map(str, parts))} parts"
        raise _refused(node, f"of {transform.samples} samples of {transform.parts} parts, expected {expected}")
    stored: dict[Any, tuple[int, ir.Value]] = graph.meta.setdefault("transforms", {})
    key = transform, window, _kind(_signal(node)[0])
    if key not in stored:
        numbers = transform.samples * transform.parts * transform.made[0] * transform.made[1]
        if (total := numbers + sum(count for count, _ in stored.values())) > MOST:
            raise _refused(node, f"with matrices of {total} numbers, expected at most {MOST}; take shorter frames")
        stored[key] = numbers, make()
    return stored[key][1]


def _signal(node: ir.Node) -> tuple[ir.Value, ir.Shape]:
    signal = node.inputs[0]
    if signal is None or signal.dtype is None or signal.shape is None or len(signal.shape) < 2:
        raise _refused(node, "of a signal whose axes cannot be told")
    return signal, signal.shape


def _kind(signal: ir.Value) -> np.dtype[Any]:
    assert signal.dtype is not None
    return signal.dtype.numpy()


def _number(node: ir.Node, index: int | None, otherwise: Any) -> int:
    """Return input `index` of a node as a number; `otherwise` if the node has no such input."""
    value = node.inputs[index] if index is not None and index < len(node.inputs) else None
    size = otherwise if value is None else _constant(node, value).item()
    if not isinstance(size, int):
        raise _refused(node, "over an axis of an open size, expected a number; fix it, or cut the signal into frames")
    return size


def _constant(node: ir.Node, value: ir.Value) -> NDArray[Any]:
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None:
        raise _refused(node, "with a length, step or window computed from data, expected constants", final=False)
    return tensor.numpy()


def _refused(node: ir.Node, fault: str, final: bool = True) -> UnsettledError:
    """Return the error; `final` is False for a computed window: torch can decompose such an STFT into a DFT."""
    trace = node.metadata_props.get(STACK_TRACE, "")
    return UnsettledError(f"it becomes the operator {node.op_type} {fault}", trace, final)
