"""DFT and STFT as products, beside NumPy in float64 and ONNX Runtime's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from small_graphs import model, value
from txl_export.graphs import dft
from txl_export.graphs.settling import settle
from txl_export.graphs.unsettled import UnsettledError
from txl_runtime.bundle.tables import TensorSpec

CLOSE = 1e-6
"""The largest error of a product in float32, relative to a transform's largest number; 5e-7 for 320 samples."""


def pairs(numbers: Any) -> np.ndarray:
    return np.stack([numbers.real, numbers.imag], -1)


def given(shape: Sequence[int]) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def whole(x: np.ndarray) -> Any:
    """The numbers of a signal, complex where they have two parts."""
    wide = x.astype(np.float64)
    return wide[..., 0] if x.shape[-1] == 1 else wide[..., 0] + 1j * wide[..., 1]


def file(
    op: str, x: Sequence[Any], inputs: Mapping[str, Any], opset: int = 18, rank: int = 0, **attributes: int
) -> onnx.ModelProto:
    """One node; an input that is None is left out, one that is a word is a second input of the graph."""
    names = ["" if one is None else one if isinstance(one, str) else name for name, one in inputs.items()]
    tensors = [
        numpy_helper.from_array(np.asarray(one), name)
        for name, one in inputs.items()
        if one is not None and not isinstance(one, str)
    ]
    more = [value(one, [8]) for one in inputs.values() if isinstance(one, str)]
    node = helper.make_node(op, ["x", *names], ["y"], **attributes)
    return model([node], [value("x", x), *more], [value("y", [None] * (rank or len(x)))], tensors, opset)


def settled(made: onnx.ModelProto, shape: Sequence[int] = ()) -> onnx.ModelProto:
    def spec(port: onnx.ValueInfoProto) -> TensorSpec:
        dims = port.type.tensor_type.shape.dim
        return TensorSpec(name=port.name, dtype="float32", shape=tuple(dim.dim_param or dim.dim_value for dim in dims))

    taken = ir.from_proto(made)
    result = TensorSpec(name="y", dtype="float32", shape=tuple(shape))
    settle(taken, "step", [spec(port) for port in made.graph.input], [result], [made.opset_import[0].version])
    return ir.to_proto(taken)


def run(made: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return onnxruntime.InferenceSession(made.SerializeToString()).run(None, {"x": x})[0]


def compare(made: onnx.ModelProto, x: np.ndarray, expected: np.ndarray) -> onnx.ModelProto:
    """As NumPy in float64 has it, and as ONNX Runtime has it, whose own is 3e-5 off where no power of two is asked."""
    product = settled(made, expected.shape)
    assert not {"DFT", "STFT"} & {node.op_type for node in product.graph.node}
    largest = np.abs(expected).max()
    np.testing.assert_allclose(run(product, x), expected, rtol=0, atol=CLOSE * largest)
    np.testing.assert_allclose(run(made, x), expected, rtol=0, atol=1e-4 * largest)
    return product


@pytest.mark.parametrize("size", [1, 2, 15, 16, 320])
@pytest.mark.parametrize("kind", ["fft", "ifft", "rfft", "irfft"])
def test_a_transform_is_numpy_s(kind, size):
    samples = size // 2 + 1 if kind == "irfft" else size
    x = given((3, samples, 1 if kind == "rfft" else 2))
    made = getattr(np.fft, kind)(whole(x), size, axis=1)
    expected = made[..., None] if kind == "irfft" else pairs(made)
    inverse, onesided = int(kind.startswith("i")), int("r" in kind)
    compare(file("DFT", x.shape, {"n": np.int64(size)}, inverse=inverse, onesided=onesided), x, expected)


@pytest.mark.parametrize("length", [None, 12, 6])
def test_a_signal_is_filled_up_with_zeros_or_cut_off(length):
    x = given((2, 9, 2))
    said = {"n": None if length is None else np.int64(length)}
    compare(file("DFT", x.shape, said), x, pairs(np.fft.fft(whole(x), length, axis=1)))


@pytest.mark.parametrize("length", [None, 17])
def test_of_one_side_an_even_length_is_meant_where_none_is_said(length):
    x = given((2, 9, 2))
    made = file("DFT", x.shape, {"n": None if length is None else np.int64(length)}, inverse=1, onesided=1)
    compare(made, x, np.fft.irfft(whole(x), 16 if length is None else length, axis=1)[..., None])


def test_the_axis_is_an_attribute_at_first_and_an_input_since_opset_20():
    x = given((4, 5, 6, 1))
    for opset in (18, 20):
        for axis in (0, 1, 2, -2, -3):
            said = {"n": None, "axis": np.int64(axis)} if opset == 20 else {}
            attributes = {} if opset == 20 else {"axis": axis}
            turned = pairs(np.fft.fft(whole(x), axis=axis if axis >= 0 else axis + 1))
            compare(file("DFT", x.shape, said, opset, **attributes), x, turned)
    compare(file("DFT", x.shape, {}, 18), x, pairs(np.fft.fft(whole(x), axis=1)))
    compare(file("DFT", x.shape, {}, 20), x, pairs(np.fft.fft(whole(x), axis=2)))


def frames(x: np.ndarray, length: int, step: int) -> np.ndarray:
    numbers = whole(x)
    count = (numbers.shape[1] - length) // step + 1
    return np.stack([numbers[:, place * step : place * step + length] for place in range(count)], 1)


@pytest.mark.parametrize(
    ("parts", "onesided", "window", "length"),
    [(1, 1, True, 8), (1, 0, True, None), (1, 1, False, 9), (2, 0, True, 8), (1, None, True, None)],
)
def test_frames_of_a_signal_are_transformed_through_their_window(parts, onesided, window, length):
    x, size = given((2, 30, parts)), length or 8
    weights = np.hanning(size).astype(np.float32) + 0.1
    said = {"step": np.int64(3), "window": weights if window else None}
    said |= {} if length is None else {"length": np.int64(length)}
    cut = frames(x, size, 3) * (weights.astype(np.float64) if window else 1)
    expected = pairs(np.fft.rfft(cut) if onesided != 0 else np.fft.fft(cut))
    attributes = {} if onesided is None else {"onesided": onesided}
    compare(file("STFT", x.shape, said, rank=4, **attributes), x, expected)
    if parts == 1:  # as torch's older exporter writes a real signal
        compare(file("STFT", x.shape[:2], said, rank=4, **attributes), x[..., 0], expected)


def test_frames_may_be_of_a_signal_of_any_length():
    made = file("STFT", ["B", "samples", 1], {"step": np.int64(4), "window": np.ones(8, np.float32)}, rank=4)
    product = settled(made, ["B", "frames", 5, 2])
    for samples in (8, 21):
        x = given((2, samples, 1))
        np.testing.assert_allclose(run(product, x), pairs(np.fft.rfft(frames(x, 8, 4))), rtol=0, atol=1e-5)


def test_equal_transforms_of_a_graph_have_one_matrix_and_all_have_a_bound(monkeypatch):
    def chain(*kinds: int) -> onnx.ModelProto:
        names = ["x", *"abc"[: len(kinds) - 1], "y"]
        ends = zip(names, names[1:], kinds, strict=False)
        nodes = [helper.make_node("DFT", [one], [other], axis=1, inverse=kind) for one, other, kind in ends]
        return model(nodes, [value("x", [1, 8, 2])], [value("y", [1, 8, 2])])

    monkeypatch.setattr(dft, "MOST", 300)
    product = settled(chain(0, 0, 0), [1, 8, 2])
    assert [list(tensor.dims) for tensor in product.graph.initializer if tensor.dims[1:]] == [[16, 16]]
    with pytest.raises(UnsettledError, match="with matrices of 512 numbers, expected at most 300; take shorter frames"):
        settled(chain(0, 1), [1, 8, 2])


def test_float64_stays():
    x = given((3, 320, 1)).astype(np.float64)
    node = helper.make_node("DFT", ["wide"], ["far"], onesided=1)
    casts = [
        helper.make_node("Cast", [one], [other], to=kind) for one, other, kind in (("x", "wide", 11), ("far", "y", 1))
    ]
    made = model([casts[0], node, casts[1]], [value("x", x.shape)], [value("y", [3, 161, 2])])
    expected = pairs(np.fft.rfft(x[..., 0]))
    found = run(settled(made, expected.shape), x.astype(np.float32))
    np.testing.assert_allclose(found, expected.astype(np.float32), rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (file("DFT", [1, "n", 1], {}), "DFT over an axis of an open size, expected a number"),
        (
            file("STFT", [1, 8, 1], {"s": np.int64(1), "w": "window"}, rank=4),
            "STFT with a length, step or window compu",
        ),
        (file("STFT", [1, "n", 1], {"s": np.int64(1)}, rank=4), "STFT over an axis of an open size"),
    ],
)
def test_what_has_no_matrix_is_refused(made, found):
    with pytest.raises(UnsettledError, match=f"it becomes the operator {found}") as caught:
        settled(made, [1, 5, 2] if "DFT" in found else [1, 1, 5, 2])
    assert caught.value.final != ("window" in found), "torch can decompose an STFT whose window is computed"
