"""Time LinearAttention as plain operators beside ONNX Runtime's two kernels: of opset 27, and of its own domain.

    python benchmarks/cpu/linear_attention.py [--threads 1]

ONNX Runtime has the operator of opset 27 from 1.32 on, and com.microsoft's from 1.26 on. Each of the three forms is run
on 1, 16 and 64 positions of one sequence. The script prints the milliseconds of the fastest run, and the largest
difference from the recurrence in float64, divided by the largest result.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto, helper
from txl_export.graphs.opsets import lower
from txl_export.graphs.rewriting import to_forms
from txl_export.graphs.settling import infer_shapes

SIZES = {
    "retention, 8 × 64 × 64": ("gated", 8, 64, 64, 1),
    "linear, 8 × 64 × 64": ("linear", 8, 64, 64, 0),
    "decays of keys, 4 × 64 × 128": ("gated", 4, 64, 128, 64),
    "gated delta, 8 × 128 × 128": ("gated_delta", 8, 128, 128, 1),
    "Mamba, 512 × 16 × 1": ("gated", 512, 16, 1, 16),
}


def graph(rule: str, heads: int, keys: int, values: int, rates: int, length: int, own: bool = False) -> onnx.ModelProto:
    """Return a graph of one LinearAttention node, of opset 27, or with `own` of ONNX Runtime's domain com.microsoft.

    Args:
        rule: the operator's update rule, e.g. "gated_delta".
        heads: the number of heads.
        keys, values: the widths of a head's keys and values.
        rates: decays for each head: 0, 1 or one per key.
        length: positions.
        own: True for ONNX Runtime's own operator.
    """
    sizes = {
        "q": heads * keys,
        "k": heads * keys,
        "v": heads * values,
        "g": heads * rates,
        "b": heads * ("delta" in rule),
    }
    given = {name: [1, length, size] for name, size in sizes.items() if size} | {"s": [1, heads, keys, values]}
    names = ["q", "k", "v", "s", "g" * bool(rates), "b" * ("delta" in rule)]
    while not names[-1]:
        names.pop()
    text: dict[str, Any] = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": rule}
    node = helper.make_node("LinearAttention", names, ["y", "new_s"], "node", domain="com.microsoft" * own, **text)
    returned = {"y": [1, length, heads * values], "new_s": given["s"]}
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in side.items()]
        for side in (given, returned)
    )
    opsets = [helper.make_opsetid("", 18 if own else 27), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "one", inputs, outputs), opset_imports=opsets, ir_version=10)


def plain(made: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph of plain operators that computes the same as a graph of `graph`."""
    taken = ir.from_proto(made)
    infer_shapes(taken)
    to_forms(taken)
    lower(taken.graph)
    return ir.to_proto(taken)


def drawn(made: onnx.ModelProto, heads: int) -> dict[str, Any]:
    """Draw inputs by name: keys of norm 1, logarithms of decays below 0, rates of the delta rule between 0 and 1."""
    draws, results = np.random.default_rng(0), {}
    for given in made.graph.input:
        sizes = [dim.dim_value for dim in given.type.tensor_type.shape.dim]
        array = draws.normal(size=sizes)
        if given.name == "k":
            array = array.reshape(*sizes[:2], heads, -1)
            array = (array / np.linalg.norm(array, axis=-1, keepdims=True)).reshape(sizes)
        results[given.name] = {"g": -np.abs(array) / 10, "b": 1 / (1 + np.exp(-array))}.get(given.name, array)
    return {name: array.astype(np.float32) for name, array in results.items()}


def recurrence(feeds: dict[str, Any], heads: int) -> Any:
    """Compute the output in float64, position by position, [1, positions, heads · values], e.g. [1, 16, 512]."""
    wide = {name: array[0].astype(np.float64) for name, array in feeds.items()}
    state, results = wide["s"], []
    for at in range(len(wide["q"])):
        q, k, v = (wide[name][at].reshape(heads, -1) for name in "qkv")
        if "g" in wide:
            state = state * np.exp(wide["g"][at].reshape(heads, -1, 1))
        if "b" in wide:
            v = wide["b"][at][:, None] * (v - np.einsum("hkv,hk->hv", state, k))
        state = state + k[..., None] * v[:, None]
        results.append(np.einsum("hk,hkv->hv", q, state).ravel() / k.shape[1] ** 0.5)
    return np.stack(results)[None]


def fewest(session: Any, feeds: dict[str, Any]) -> float:
    """Run a session for half a second, and return the milliseconds of the fastest run."""
    taken, end = list[float](), time.perf_counter() + 0.5
    while time.perf_counter() < end or len(taken) < 5:
        began = time.perf_counter()
        session.run(None, feeds)
        taken.append(time.perf_counter() - began)
    return min(taken) * 1e3


def main() -> None:
    """Read the command line, and print a line for each size and number of positions."""
    text = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text.add_argument("--threads", type=int, default=1)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = text.parse_args().threads, 4
    print(f"ONNX Runtime {onnxruntime.__version__}: milliseconds (error) of opset 27, its own operator, the plain form")
    for name, sizes in SIZES.items():
        for length in (1, 16, 64):
            standard, row = graph(*sizes, length), []
            feeds = drawn(standard, sizes[1])
            wanted = recurrence(feeds, sizes[1])
            for result in (standard, graph(*sizes, length, own=True), plain(standard)):
                try:
                    session = onnxruntime.InferenceSession(result.SerializeToString(), options)
                except Exception:  # this version of ONNX Runtime lacks the operator
                    row.append("–")
                    continue
                error = np.abs(session.run(None, feeds)[0] - wanted).max() / np.abs(wanted).max()
                row.append(f"{fewest(session, feeds):.3g} ({error:.0e})")
            print(f"{name}, {length} positions: {', '.join(row)}", flush=True)


if __name__ == "__main__":
    main()
