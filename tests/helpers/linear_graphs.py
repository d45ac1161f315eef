"""Graphs with LinearAttention, the same as plain operators, and a file that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import helper, numpy_helper
from small_graphs import FLOAT, model, value
from txl_export.graphs.opsets import lower
from txl_export.graphs.rewriting import to_forms
from txl_export.graphs.settling import infer_shapes
from txl_runtime.guard.forms import FORMS

HEADS, B = 2, 3


def attention(
    rule: str,
    shared: int,
    length: int,
    decays: int = 0,
    betas: int = 0,
    values: int = 6,
    past: bool = True,
    **said: Any,
) -> onnx.ModelProto:
    """One node: `shared` queries for each of 2 heads of 4 keys; `decays` of a head, `betas` of a position."""
    dtype = said.pop("dtype", FLOAT)
    sizes = {"q": 4 * HEADS * shared, "k": 4 * HEADS, "v": values * HEADS, "g": decays * HEADS, "b": betas}
    given = [value(name, [B, length, size], dtype) for name, size in sizes.items() if size]
    state = [B, HEADS, 4, values]
    names = ["q", "k", "v", "s" * past, "g" * bool(decays), "b" * bool(betas)]
    while not names[-1]:
        names.pop()
    heads = {"q_num_heads": HEADS * shared, "kv_num_heads": HEADS}
    node = helper.make_node("LinearAttention", names, ["y", "new_s"], update_rule=rule, **heads, **said)
    ends = [value("y", [B, length, values * HEADS * shared], dtype), value("new_s", state, dtype)]
    return model([node], given + [value("s", state, dtype)] * past, ends, opset=27)


def plain(made: onnx.ModelProto) -> onnx.ModelProto:
    taken = ir.from_proto(made)
    taken.graph[0].name = "node"
    infer_shapes(taken)
    to_forms(taken)
    lower(taken.graph)
    infer_shapes(taken)
    found = ir.to_proto(taken)
    onnx.checker.check_model(found, full_check=True)
    assert found.opset_import[0].version == 18
    assert {node.op_type for node in found.graph.node} <= FORMS[""].keys()
    return found


def run(made: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    return onnxruntime.InferenceSession(made.SerializeToString()).run(None, feeds)


def drawn(made: onnx.ModelProto, draws: np.random.Generator) -> dict[str, Any]:
    """Keys of length 1, decays below 0, rates between 0 and 1."""
    found = {}
    for given in made.graph.input:
        sizes = [dim.dim_value for dim in given.type.tensor_type.shape.dim]
        array = draws.normal(size=sizes)
        if given.name == "k":
            array = array.reshape(*sizes[:2], HEADS, -1)
            array = (array / np.linalg.norm(array, axis=-1, keepdims=True)).reshape(sizes)
        found[given.name] = {"g": -np.abs(array), "b": 1 / (1 + np.exp(-array))}.get(given.name, array)
    return {name: array.astype(np.float32) for name, array in found.items()}


def stateful(path: Path, past: bool = True) -> Path:
    """A file as mobius writes it: ONNX Runtime's own CausalConvWithState, LinearAttention, and QuickGelu with its body.

    Takes x [batch, time, 6], and with `past` the states conv [batch, 20, 3] and memory [batch, 2, 3, 4].
    """
    draws, own = np.random.default_rng(0), {"domain": "com.microsoft"}
    shapes = {"w": (6, 20), "kernel": (20, 1, 4), "bias": (20,), "rates": (6, 2), "out": (8, 6)}
    tensors = {name: draws.normal(size=shape).astype(np.float32) / 3 for name, shape in shapes.items()}
    tensors["sizes"] = np.array([6, 6, 8])
    heads = {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "gated", "scale": 0.5}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["wide"]),
        helper.make_node("Transpose", ["wide"], ["turned"], perm=[0, 2, 1]),
        helper.make_node(
            "CausalConvWithState",
            ["turned", "kernel", "bias", "conv"][: 4 if past else 3],
            ["seen", "new_conv"],
            activation="silu",
            **own,
        ),
        helper.make_node("Transpose", ["seen"], ["rows"], perm=[0, 2, 1]),
        helper.make_node("Split", ["rows", "sizes"], ["q", "k", "v"], axis=2),
        helper.make_node("MatMul", ["x", "rates"], ["raw"]),
        helper.make_node("Softplus", ["raw"], ["soft"]),
        helper.make_node("Neg", ["soft"], ["decay"]),
        helper.make_node(
            "LinearAttention", ["q", "k", "v", "memory" * past, "decay"], ["read", "new_memory"], **heads, **own
        ),
        helper.make_node("MatMul", ["read", "out"], ["o"]),
        helper.make_node("QuickGelu", ["o"], ["y"], alpha=1.0, **own),
    ]
    sizes: dict[str, list[Any]] = {"x": ["batch", "time", 6], "conv": ["batch", 20, 3], "memory": ["batch", 2, 3, 4]}
    inputs = [value(name, shape) for name, shape in sizes.items() if past or name == "x"]
    outputs = [value("y", sizes["x"])] + [value(f"new_{name}", sizes[name]) for name in ("conv", "memory") if past]
    constants = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    made = model(nodes, inputs, outputs, constants, opset=26)
    body = [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["y"])]
    opset = helper.make_opsetid("", 26)
    made.functions.append(helper.make_function("com.microsoft", "QuickGelu", ["x"], ["y"], body, [opset], ["alpha"]))
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(made, path)
    return path
