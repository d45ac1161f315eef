"""Convolutions of which one position is read: the same numbers by a product and a sum, and which stay."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from passed_graphs import kinds, run, small
from txl_export.graphs.passes.improving import improve
from txl_export.graphs.passes.single_convs import compute_one_position

CHANNELS, TAPS = 5, 3
DRAWS = np.random.default_rng(0)
WEIGHT = DRAWS.normal(size=(CHANNELS, 1, TAPS)).astype(np.float32)
BIAS = DRAWS.normal(size=CHANNELS).astype(np.float32)


def convolution(index, length, pads=(0, 0), group=CHANNELS, weight=WEIGHT, **more):
    nodes = [
        helper.make_node("Conv", ["x", "weight", "bias"], ["all"], name="conv", group=group, pads=pads, **more),
        helper.make_node("Gather", ["all", "index"], ["y"], name="read", axis=2),
    ]
    constants = {"weight": weight, "bias": BIAS, "index": np.array(index, np.int64)}
    return small(nodes, {"x": (2, CHANNELS, length)}, constants)


@pytest.mark.parametrize(
    ("index", "length", "pads"),
    [(0, TAPS, (0, 0)), (2, TAPS, (2, 2)), (3, 6, (1, 0)), (1, 6, (0, 0))],
)
def test_one_position_is_a_product_and_a_sum(index, length, pads):
    before, after = convolution(index, length, pads), convolution(index, length, pads)
    improve(after)
    assert "Conv" not in kinds(after)
    x = {"x": DRAWS.normal(size=(2, CHANNELS, length)).astype(np.float32)}
    assert np.abs(run(before, x)[0] - run(after, x)[0]).max() < 1e-5


@pytest.mark.parametrize(
    "model",
    [
        convolution(0, TAPS, (1, 1)),  # reads the padding
        convolution(0, 6, strides=[2]),
        convolution(0, 6, dilations=[2]),
        convolution(0, TAPS, group=1, weight=np.ones((CHANNELS, CHANNELS, TAPS), np.float32)),
    ],
)
def test_others_stay(model):
    compute_one_position(model.graph)
    assert kinds(model) == {"Conv": 1, "Gather": 1}
