"""Rows of moves, and stacks of parts, have fewer nodes and the same values to the bit, in any number of sequences."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import small_graphs
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from txl_export.graphs.passes.improving import improve
from txl_export.graphs.settling import infer_shapes

X = np.arange(60, dtype=np.float32)


def node(op, inputs, output, **attributes):
    outputs = [output] if isinstance(output, str) else output
    return helper.make_node(op, inputs, outputs, name=f"{op}.{output}", **attributes)


def settled(nodes, shape, results, constants, opset=18):
    sides = [small_graphs.value(name, sizes) for name, sizes in results.items()]
    made = [numpy_helper.from_array(np.asarray(values), name) for name, values in constants.items()]
    model = ir.from_proto(small_graphs.model(nodes, [small_graphs.value("x", shape)], sides, made, opset))
    infer_shapes(model)
    return model


def run(model, x):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    data = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run(None, {"x": x})


def kinds(model):
    return [one.op_type for one in model.graph]


def agree(before, after, x):
    """Hold two graphs against each other to the bit."""
    for one, two in zip(run(before, x), run(after, x), strict=True):
        assert one.shape == two.shape
        assert one.tobytes() == two.tobytes()


@st.composite
def rows(draw):
    """Nodes, one behind the other, each of which moves axes; with the sizes behind each for one B."""
    batch, nodes, constants = draw(st.integers(2, 5)), [], {}
    sizes, shapes = ["batch", 3], []
    for number in range(draw(st.integers(1, 6))):
        source, result, given_number = f"v{number - 1}" if number else "x", f"v{number}", f"c{number}"
        op = draw(st.sampled_from(["Unsqueeze", "Squeeze", "Transpose", "Gather", "Slice", "Reshape"]))
        ones = [axis for axis, size in enumerate(sizes) if size == 1]
        axis = draw(st.sampled_from(ones)) if ones else 0
        if op == "Unsqueeze" or (op in ("Squeeze", "Gather") and not ones):
            axis = draw(st.integers(0, len(sizes)))
            nodes.append(node("Unsqueeze", [source, given_number], result))
            constants[given_number] = np.array([axis])
            sizes = [*sizes[:axis], 1, *sizes[axis:]]
        elif op == "Squeeze":
            nodes.append(node(op, [source, given_number], result))
            constants[given_number] = np.array([axis])
            sizes = [*sizes[:axis], *sizes[axis + 1 :]]
        elif op == "Gather":
            nodes.append(node(op, [source, given_number], result, axis=axis))
            constants[given_number] = np.array(draw(st.sampled_from([0, -1])), np.int32)
            sizes = [*sizes[:axis], *sizes[axis + 1 :]]
        elif op == "Transpose":
            order = draw(st.permutations(range(len(sizes))))
            nodes.append(node(op, [source], result, perm=order))
            sizes = [sizes[axis] for axis in order]
        elif op == "Slice":
            at, steps = sizes.index(3), draw(st.sampled_from([1, -1]))
            first, last = (0, 3) if steps == 1 else (2, -100)
            named = {"from": [first], "to": [last], "axes": [at], "steps": [steps]}
            constants |= {f"{given_number}.{name}": np.array(numbers) for name, numbers in named.items()}
            nodes.append(node(op, [source, *(f"{given_number}.{name}" for name in named)], result))
        else:
            others = [size for size in sizes if size != 1]
            where = sorted(draw(st.lists(st.integers(0, 2), max_size=2)), reverse=True)
            for place in where:
                others.insert(place, 1)
            nodes.append(node(op, [source, given_number], result))
            constants[given_number] = np.array([-1 if size == "batch" else size for size in others])
            sizes = others
        shapes.append(list(sizes))
    kept = sorted(draw(st.sets(st.integers(0, len(nodes) - 1), max_size=2)) | {len(nodes) - 1})
    return batch, nodes, constants, {f"v{number}": shapes[number] for number in kept}


@settings(max_examples=50)
@given(rows(), st.booleans(), st.sampled_from([18, 24]))
def test_a_row_of_moves_is_never_more_nodes_and_the_same_values(made, is_open, opset):
    batch, nodes, constants, results = made
    if not is_open:
        results = {name: [batch if size == "batch" else size for size in sizes] for name, sizes in results.items()}
    before, after = (settled(nodes, ["batch" if is_open else batch, 3], results, constants, opset) for _ in range(2))
    improve(after)
    assert len(kinds(after)) <= len(kinds(before))
    for count in (1, batch) if is_open else (batch,):
        agree(before, after, X[: 3 * count].reshape(count, 3))


def test_moves_that_cancel_are_nothing_and_those_that_do_not_are_one():
    nodes = [
        node("Unsqueeze", ["x", "one"], "a"),
        node("Transpose", ["a"], "b", perm=[1, 0, 2]),
        node("Relu", ["b"], "c"),
        node("Transpose", ["c"], "d", perm=[1, 0, 2]),
        node("Gather", ["d", "first"], "e", axis=1),
        node("Neg", ["e"], "y"),
    ]
    constants = {"one": np.array([1]), "first": np.array(0, np.int32)}
    before, after = (settled(nodes, ["batch", 4], {"y": ["batch", 4]}, constants) for _ in range(2))
    improve(after)
    assert kinds(after) == ["Unsqueeze", "Relu", "Squeeze", "Neg"]
    agree(before, after, X[:12].reshape(3, 4) - 6)


def test_a_transpose_that_changes_the_order_stays():
    nodes = [node("Unsqueeze", ["x", "one"], "a"), node("Transpose", ["a"], "y", perm=[2, 1, 0])]
    before, after = (settled(nodes, ["batch", 4], {"y": [4, 1, "batch"]}, {"one": np.array([1])}) for _ in range(2))
    improve(after)
    assert kinds(after) == ["Unsqueeze", "Transpose"]
    agree(before, after, X[:12].reshape(3, 4))


CONSTANTS = {f"n{number}": np.array([number]) for number in range(4)}


def slices(*ranges, axis=0, source="x"):
    return [node("Slice", [source, f"n{start}", f"n{end}", f"n{axis}"], f"part{start}.{end}") for start, end in ranges]


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([(0, 1), (1, 3)], ["Split", "Neg", "Neg"]),
        ([(1, 3), (0, 1)], ["Split", "Neg", "Neg"]),
        ([(0, 1), (2, 3)], ["Slice", "Slice", "Neg", "Neg"]),
        ([(0, 2), (1, 3)], ["Slice", "Slice", "Neg", "Neg"]),
        ([(0, 3), (0, 1)], ["Slice", "Neg", "Neg"]),
    ],
)
def test_slices_that_are_all_of_a_stack_are_one_split(ranges, expected):
    nodes = slices(*ranges)
    nodes += [node("Neg", [one.output[0]], f"y{number}") for number, one in enumerate(nodes)]
    results = {f"y{number}": (end - start, "batch", 2) for number, (start, end) in enumerate(ranges)}
    read = {name: CONSTANTS[name] for one in nodes for name in one.input if name in CONSTANTS}
    before, after = (settled(nodes, (3, "batch", 2), results, read) for _ in range(2))
    improve(after)
    assert kinds(after) == expected
    agree(before, after, X[:12].reshape(3, 2, 2))


def test_a_part_without_its_axis_is_one_gather_and_a_stack_of_parts_one_join():
    nodes = [*slices((0, 1), (1, 2), (2, 3))]
    nodes += [node("Squeeze", [one.output[0], "n0"], f"s{number}") for number, one in enumerate(nodes)]
    nodes += [node("Neg", [f"s{number}"], f"v{number}") for number in range(3)]
    nodes += [node("Unsqueeze", [f"v{number}", "n1"], f"u{number}") for number in range(3)]
    nodes.append(node("Concat", ["u0", "u1", "u2"], "y", axis=1))
    before, after = (settled(nodes, (3, "batch", 2), {"y": ("batch", 3, 2)}, CONSTANTS) for _ in range(2))
    improve(after)
    assert sorted(kinds(after)) == ["Concat", "Gather", "Gather", "Gather", "Neg", "Neg", "Neg", "Reshape"]
    agree(before, after, X[:18].reshape(3, 3, 2))


def test_a_stack_along_a_new_last_axis_stays_as_it_is():
    nodes = [node("Neg", ["x"], "v")]
    nodes += [node("Unsqueeze", [name, "n2"], f"u{name}") for name in ("x", "v")]
    nodes.append(node("Concat", ["ux", "uv"], "y", axis=2))
    read = {"n2": CONSTANTS["n2"]}
    before, after = (settled(nodes, ("batch", 2), {"y": ("batch", 2, 2)}, read) for _ in range(2))
    improve(after)
    assert kinds(after) == kinds(before)
    agree(before, after, X[:6].reshape(3, 2))


def test_parts_of_weights_stay_slices():
    parts = slices((0, 1), (1, 3), source="computed")
    nodes = [node("Neg", ["w"], "computed"), *parts]
    nodes += [node("Add", ["x", one.output[0]], f"y{number}") for number, one in enumerate(parts)]
    read = {name: CONSTANTS[name] for name in ("n0", "n1", "n3")} | {"w": X[:6].reshape(3, 2)}
    after = settled(nodes, (1, 2), {"y0": (1, 2), "y1": (2, 2)}, read)
    improve(after)
    assert kinds(after).count("Slice") == 2
