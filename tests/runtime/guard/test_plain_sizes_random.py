"""Sizes of values, beside those that ONNX Runtime computes: single nodes with random inputs, sizes and attributes.

A value may not be larger than the check takes it for, and what it calls exact has to be. TXL_NODES says how many nodes
there are; 10,000 were tried.
"""

from __future__ import annotations

import collections
import os

import onnx
import onnxruntime
from onnx import helper
from random_nodes import MADE, single
from txl_runtime.guard.graph_check import Budget, Walk
from txl_runtime.guard.protobuf import RefusedError

NODES = int(os.environ.get("TXL_NODES", "600"))


def disagreement(operator: str, seed: int) -> str | None:
    """What the check says of a random node, and ONNX Runtime: "" where they agree, None where it cannot run."""
    case = single(operator, seed)
    model, results = case.model(), case.nodes[-1].output
    said: str | None = None
    try:
        values = Walk(model.SerializeToString(), "step", case.most, "", Budget(0)).values
    except RefusedError as error:
        said = f"refused: {error.args}"
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in results)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        real = session.run(None, case.feeds)
    except Exception:  # its classes have no common one of their own
        return None
    if said is not None:
        return said
    for name, array in zip(results, real, strict=True):
        value = values[name]
        larger = any(n > most for n, most in zip(array.shape, value.dims, strict=False)) or array.size > value.most
        other = value.exact and array.shape != value.dims
        outside = value.content is not None and not all(
            low <= n <= high for n, (low, high) in zip(array.ravel(), value.content, strict=True)
        )
        if (array.ndim != len(value.dims) and not value.loose) or larger or other or outside:
            return f"{value}, but {array.shape} {array.ravel()[:8]} of {helper.printable_graph(model.graph)}"
    return ""


def test_no_value_is_larger_than_the_check_takes_it_for() -> None:
    found = collections.Counter[str]()
    for seed in range(NODES):
        operator = list(MADE)[seed % len(MADE)]
        said = disagreement(operator, seed)
        kind = "not run" if said is None else "refused" if said.startswith("refused") else said and "other"
        assert kind != "other", f"{operator}, seed {seed}: {said}"
        found[kind or "agree"] += 1
    assert found["agree"] > 0.8 * NODES, found
