"""Print errors and times of Fourier transforms as matrix products, the table of docs/own-models-reference.md.

python benchmarks/parity/transforms.py [SAMPLES…]
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from onnx import helper
from txl_export.graphs.settling import settle
from txl_runtime.bundle.tables import TensorSpec

ROWS = 64


def main(sizes: list[int]) -> None:
    """Print a row for each number of samples: times, and the largest error against NumPy in float64.

    An error is divided by the largest number of NumPy's result.
    """
    print("| samples | matrix, MB | rfft, irfft | ONNX Runtime's DFT | torch | ms a frame | ONNX Runtime's DFT |")
    print("|---|---|---|---|---|---|---|")
    for samples in sizes:
        errors, times = list[list[float]](), list[float]()
        for inverse in (False, True):
            x = np.random.default_rng(0).normal(size=(ROWS, samples)).astype(np.float32)
            inputs: Any = np.fft.rfft(x).astype(np.complex64) if inverse else x
            wide, own = inputs.astype(complex if inverse else float), torch.tensor(inputs)
            exact: Any = np.fft.irfft(wide, samples) if inverse else np.fft.rfft(wide)
            own = torch.fft.irfft(own, samples) if inverse else torch.fft.rfft(own)
            results = [_run(result, inputs, exact) for result in _graphs(samples, inverse, ROWS)]
            errors.append([float(np.abs(one - exact).max() / np.abs(exact).max()) for one in (*results, own.numpy())])
            times = times or [_time(result, samples) for result in _graphs(samples, inverse, 1)]
        pairs = [", ".join(f"{one:.1e}" for one in both) for both in zip(*errors, strict=True)]
        size = 4 * samples * 2 * (samples // 2 + 1) / 1e6
        cells = [samples, f"{size:.2g}", *pairs, *(f"{one:.2g}" for one in times)]
        print(f"| {' | '.join(map(str, cells))} |")


def _graphs(samples: int, inverse: bool, rows: int) -> list[bytes]:
    """Return two serialized graphs of the same transform: a matrix product, and ONNX's operator DFT."""
    steps = samples // 2 + 1
    shapes = [(rows, steps, 2), (rows, samples, 1)] if inverse else [(rows, samples, 1), (rows, steps, 2)]
    node = helper.make_node("DFT", ["x", "n"], ["y"], axis=1, onesided=1, inverse=int(inverse))
    inputs, result = ([helper.make_tensor_value_info(name, 1, shape)] for name, shape in zip("xy", shapes, strict=True))
    graph = helper.make_graph([node], "transform", inputs, result, [helper.make_tensor("n", 7, [], [samples])])
    whole = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    model = ir.from_proto(whole)
    x, y = (TensorSpec(name=name, dtype="float32", shape=shape) for name, shape in zip("xy", shapes, strict=True))
    settle(model, "transform", [x], [y])
    return [ir.to_proto(model).SerializeToString(), whole.SerializeToString()]


def _run(graph: bytes, inputs: Any, exact: Any) -> Any:
    parts = np.stack([inputs.real, inputs.imag], -1) if np.iscomplexobj(inputs) else inputs[..., None]
    (result,) = onnxruntime.InferenceSession(graph).run(None, {"x": parts})
    return result[..., 0] + 1j * result[..., 1] if np.iscomplexobj(exact) else result[..., 0]


def _time(graph: bytes, samples: int) -> float:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session, x, taken = onnxruntime.InferenceSession(graph, options), np.ones((1, samples, 1), np.float32), []
    for _ in range(200):
        begun = time.perf_counter()
        session.run(None, {"x": x})
        taken.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(taken)


if __name__ == "__main__":
    main([int(one) for one in sys.argv[1:]] or [16, 320, 512, 2048])
