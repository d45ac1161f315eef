"""Graphs with bits or fields changed."""

from __future__ import annotations

import random

import numpy as np
import onnx


def mutant(data: bytes, draw: random.Random) -> bytes:
    """A graph with bits or fields changed."""
    if draw.random() < 0.5:
        changed = bytearray(data)
        for _ in range(draw.choice([1, 1, 2, 4])):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        return bytes(changed[: draw.choice([len(changed)] * 9 + [draw.randrange(len(changed))])])
    model = onnx.load_model_from_string(data)
    graph = model.graph
    step, constant = draw.choice(graph.node), draw.choice(graph.initializer)
    names = [name for node in graph.node for name in node.output] + [tensor.name for tensor in graph.initializer]
    change = draw.randrange(8)
    if change == 0 and constant.data_type == onnx.TensorProto.INT64 and constant.raw_data:
        numbers = np.frombuffer(constant.raw_data, np.int64).copy()
        numbers[draw.randrange(len(numbers))] = draw.choice([0, -1, 1, 2**31, -(10**9)])
        constant.raw_data = numbers.tobytes()
    elif change == 1 and constant.dims:
        constant.dims[draw.randrange(len(constant.dims))] = draw.choice([0, -1, 2**40])
    elif change == 2 and constant.external_data:
        draw.choice(constant.external_data).value = draw.choice(["-1", "99999999999", "/etc/passwd", "../x"])
    elif change == 3:
        step.op_type = draw.choice(
            ["Loop", "Tile", "Expand", "Range", "ConstantOfShape", draw.choice(graph.node).op_type]
        )
    elif change == 4 and step.attribute:
        draw.choice(step.attribute).i = draw.choice([0, -1, 2**62, -(2**62)])
    elif change == 5:
        del graph.node[draw.randrange(len(graph.node))]
    elif change == 6:
        step.output[0] = draw.choice(names)
    else:
        step.input[draw.randrange(len(step.input))] = draw.choice(names)
    return model.SerializeToString()
