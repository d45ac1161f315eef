"""A library's tensors of a graph, held against its program: open sizes, and those that it knows all the same."""

from __future__ import annotations

import pytest
from txl_runtime.bundle.bindings import Binding, check_bindings
from txl_runtime.bundle.tables import Program, TensorSpec
from txl_runtime.errors import BundleError

PROGRAM = Program(
    name="step-4",
    kind="step",
    segment_length=4,
    update="replace",
    file="step-4.onnx",
    inputs=(TensorSpec(name="state.kv.in", dtype="float32", shape=(2, "rows")),),
    outputs=(TensorSpec(name="state.kv.out", dtype="float32", shape=(2, "rows")),),
)


def check(read: int | str, returned: int | str) -> None:
    given = [Binding("state.kv.in", "float32", (2, read))]
    found = [Binding("state.kv.out", "float32", (2, returned))]
    check_bindings("step-4.onnx", given, found, PROGRAM, "export the model again")


@pytest.mark.parametrize("returned", ["rows", "other", 5])
def test_a_state_that_is_read_with_any_rows_may_always_come_back_with_as_many(returned: int | str) -> None:
    check("rows", returned)


def test_a_graph_that_takes_a_number_of_rows_alone_is_not_one_that_takes_any() -> None:
    with pytest.raises(BundleError, match=r"one of its inputs is state\.kv\.in float32\[2, 5\], expected .* rows\]"):
        check(5, "rows")
