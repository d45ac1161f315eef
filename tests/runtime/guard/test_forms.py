"""The table of forms: it is data, no wider than the standard, and every line of it was run beside ONNX Runtime."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from fuzz.targets.operators import NAMES, ran
from onnx import helper
from small_graphs import model, value
from txl_runtime.guard.forms import ANY, FORMS, MICROSOFT, OPSETS, Form
from txl_runtime.guard.graph_check import Budget, Walk
from txl_runtime.guard.protobuf import RefusedError
from txl_runtime.guard.values import RULES

TABLE = {f"{domain}.{name}".lstrip("."): form for domain, known in FORMS.items() for name, form in known.items()}
TRIES = 1500
"""Random graphs of one operator among which one has to pass the check and run."""
Shapes = list[list[int]]
NBITS = {1: np.ones((3, 1, 16), np.uint8), 2: np.ones(3, np.float32)}
BY_HAND: dict[str, tuple[Shapes, dict[str, Any], dict[int, Any]]] = {
    "BatchNormalization": ([[2, 3, 4], [3], [3], [3], [3]], {}, {}),
    "Col2Im": ([[1, 8, 4]], {}, {1: [3, 3], 2: [2, 2]}),
    "GRU": ([[5, 2, 3], [1, 12, 3], [1, 12, 4]], {"hidden_size": 4}, {}),
    "InstanceNormalization": ([[2, 3, 4], [3], [3]], {}, {}),
    "LSTM": ([[5, 2, 3], [1, 16, 3], [1, 16, 4]], {"hidden_size": 4}, {}),
    "MatMulIntegerToFloat": ([[2, 8], [8, 3], [], [3]], {}, {0: np.uint8, 1: np.int8}),
    "MatMulNBits": ([[2, 32]], {"K": 32, "N": 3, "bits": 4, "block_size": 32}, NBITS),
    "OneHot": ([[2, 3]], {}, {0: np.int64, 1: [4], 2: np.float32([0, 1])}),
    "RNN": ([[5, 2, 3], [1, 4, 3], [1, 4, 4]], {"hidden_size": 4}, {}),
    "Resize": ([[1, 2, 4, 4]], {"mode": "nearest"}, {1: None, 2: None, 3: [1, 2, 8, 8]}),
    "Swish": ([[2, 3]], {"alpha": 1.5}, {}),
    "TensorScatter": ([[2, 1, 8, 4], [2, 1, 2, 4]], {"axis": 2, "mode": "circular"}, {2: [1, 7]}),
}
"""Of operators whose inputs random choices hardly fit together: sizes of the inputs, attributes, and inputs by their
places that are constants (numbers or arrays), of another type, or left out (None)."""


def test_the_table_is_data_that_another_language_can_read():
    assert msgspec.json.decode(msgspec.json.encode(FORMS), type=dict[str, dict[str, Form]]) == FORMS
    assert {form.rule for form in TABLE.values()} == set(RULES)


def test_no_form_is_wider_than_the_standard():
    """Of some versions of the standard at least: what a version lacks, the engine refuses when it opens the graph."""
    for name, form in FORMS[""].items():
        schemas = [onnx.defs.get_schema(name, opset, "") for opset in OPSETS if onnx.defs.has(name, opset, "")]
        assert schemas, name
        for schema in schemas:
            kinds = [str(entry.option).rpartition(".")[2] for entry in schema.inputs]
            assert form.most_inputs <= (ANY if kinds[-1:] == ["Variadic"] else len(kinds)), name
            assert [kind != "Optional" for kind in kinds[: len(form.inputs)]] == list(form.inputs), name
            required = {key for key, value in schema.attributes.items() if value.required and key in form.attributes}
            assert required <= {*form.required}, name
            for key in form.values.keys() & schema.attributes.keys() - {*form.required}:
                default = schema.attributes[key].default_value
                assert (default.s.decode() or str(default.i)) in form.values[key], "an attribute that is not there"
        assert form.most_results <= max(schema.max_output for schema in schemas), name


def ran_by_hand(domain: str, name: str) -> bool:
    """Whether an operator passes the check, runs in ONNX Runtime and returns what the check says."""
    shapes, attributes, others = BY_HAND[name]
    inputs, constants, feeds, names = [], [], dict[str, Any](), []
    for place in range(max(len(shapes), max(others, default=0) + 1)):
        other = others.get(place, np.float32)
        names.append("" if other is None else f"i{place}")
        if isinstance(other, type):
            feeds[names[-1]] = np.ones(shapes[place], other)
            element = helper.np_dtype_to_tensor_dtype(np.dtype(other))
            inputs.append(helper.make_tensor_value_info(names[-1], element, shapes[place]))
        elif other is not None:
            constants.append(onnx.numpy_helper.from_array(np.array(other), names[-1]))
    node = helper.make_node(name, names, ["y"], domain=domain, **attributes)
    graph = helper.make_graph([node], "one", inputs, [], constants)
    opsets = [helper.make_opsetid("", OPSETS[-1]), helper.make_opsetid(MICROSOFT, 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    found = Walk(made.SerializeToString(), "step", {key: array.shape for key, array in feeds.items()}, "", Budget(0))
    made.graph.output.append(onnx.ValueInfoProto(name="y"))
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    (array,) = session.run(None, feeds)
    return found.values["y"].exact and array.shape == found.values["y"].dims


def test_every_operator_of_the_table_was_run_by_the_engine():
    """What the check says of sizes is compared by `ran` with what ONNX Runtime computes."""
    for number, name in enumerate(NAMES):
        draw, by_hand = random.Random(number), name[1] in BY_HAND
        assert (by_hand and ran_by_hand(*name)) or any(
            ran(bytes([0, number, *draw.choices(range(256), k=80)])) for _ in range(0 if by_hand else TRIES)
        ), name


def test_an_operator_in_its_form_has_no_problem_and_in_any_other_it_has():
    for name, form in TABLE.items():
        needed = [there for there in form.inputs if there]
        given: dict[str, object] = {key: form.values.get(key, ("1",))[0] for key in form.required}
        most = {key: form.values.get(key, ("1",))[0] for key in form.attributes}
        assert form.problem(needed, 1, given) is None, name
        assert form.problem(needed, form.most_results, most) is None, name
        if needed:
            assert form.problem(needed[1:], 1, given), name
            assert form.problem([False, *needed[1:]], 1, given), name
        if len(form.inputs) > len(needed):
            assert form.problem([*needed, False], 1, given), "a last input without a name"
        if form.most_inputs < ANY:
            assert form.problem([True] * (form.most_inputs + 1), 1, given), name
        assert form.problem(needed, form.most_results + 1, given), name
        assert form.problem(needed, 0, given), name
        assert form.problem(needed, 1, {"body": 1}) == ("the attribute 'body'", "those that are its own")
        for key in form.required:
            without = {other: value for other, value in given.items() if other != key}
            assert form.problem(needed, 1, without) == (f"no attribute {key}", "one")
        for key, allowed in form.values.items():
            assert form.problem(needed, 1, given | {key: "odd"}) == (f"'odd' as {key}", " or ".join(allowed))
            for text in allowed:
                assert form.problem(needed, 1, given | {key: text.encode()}) is None


OUTSIDE = {
    "more inputs": ("Relu", ["x", "x"], ["y"], {}, "2 inputs at Relu ['y'], expected 1 to 1"),
    "an input that is left out": ("Add", ["x", ""], ["y"], {}, "no input 1 at Add ['y'], expected one"),
    "more results": ("Softmax", ["x"], ["y", "z"], {}, "2 results at Softmax ['y'], expected at most 1"),
    "a word": (
        "Gelu",
        ["x"],
        ["y"],
        {"approximate": "odd"},
        "'odd' as approximate at Gelu ['y'], expected none or tanh",
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_outside_of_the_table_is_refused_in_one_line(name):
    op, inputs, outputs, attributes, said = OUTSIDE[name]
    graph = model([helper.make_node(op, inputs, outputs, **attributes)], [value("x", [2, 3])], [value("y", [2, 3])])
    with pytest.raises(RefusedError) as refused:
        Walk(graph.SerializeToString(), "step", {"x": (2, 3)}, "", Budget(0))
    assert ", expected ".join(refused.value.args[:2]) == said
