"""The table of forms: it is data, no wider than the standard, and every line of it was run beside ONNX Runtime."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from fuzz.chains import NAMES, Chain
from fuzz.choices import Choices
from onnx import helper
from small_graphs import model, value
from txl_runtime.guard.forms import ANY, FORMS, MICROSOFT, OPSETS, Form
from txl_runtime.guard.graph_check import Walk
from txl_runtime.guard.protobuf import RefusedError

TABLE = {f"{domain}.{name}".lstrip("."): form for domain, known in FORMS.items() for name, form in known.items()}
Shapes = list[list[int]]
NBITS = {1: np.ones((3, 1, 16), np.uint8), 2: np.ones(3, np.float32)}
BY_HAND: dict[str, tuple[Shapes, dict[str, Any], dict[int, Any]]] = {
    "BatchNormalization": ([[2, 3, 4], [3], [3], [3], [3]], {}, {}),
    "ConvInteger": ([[1, 2, 5], [2, 2, 3], [], []], {}, dict.fromkeys(range(4), np.uint8)),
    "ConvTranspose": ([[1, 2, 5], [2, 3, 3]], {}, {}),
    "GridSample": ([[1, 2, 4, 4], [1, 3, 3, 2]], {}, {}),
    "Col2Im": ([[1, 8, 4]], {}, {1: [3, 3], 2: [2, 2]}),
    "GRU": ([[5, 2, 3], [1, 12, 3], [1, 12, 4]], {"hidden_size": 4}, {}),
    "InstanceNormalization": ([[2, 3, 4], [3], [3]], {}, {}),
    "LSTM": ([[5, 2, 3], [1, 16, 3], [1, 16, 4]], {"hidden_size": 4}, {}),
    "MatMulInteger": ([[2, 8]], {}, {0: np.uint8, 1: np.ones((8, 3), np.int8), 2: np.uint8(0), 3: np.int8(0)}),
    "MatMulIntegerToFloat": ([[2, 8], [8, 3], [], [3]], {}, {0: np.uint8, 1: np.int8}),
    "MatMulNBits": ([[2, 32]], {"K": 32, "N": 3, "bits": 4, "block_size": 32}, NBITS),
    "NonZero": ([], {}, {0: [1, 0]}),
    "OneHot": ([[2, 3]], {}, {0: np.int64, 1: [4], 2: np.float32([0, 1])}),
    "RNN": ([[5, 2, 3], [1, 4, 3], [1, 4, 4]], {"hidden_size": 4}, {}),
    "Resize": ([[1, 2, 4, 4]], {"mode": "nearest"}, {1: None, 2: None, 3: [1, 2, 8, 8]}),
    "Swish": ([[2, 3]], {"alpha": 1.5}, {}),
    "TensorScatter": ([[2, 1, 8, 4], [2, 1, 2, 4]], {"axis": 2, "mode": "circular"}, {2: [1, 7]}),
}
"""Operators whose inputs random choices hardly fit together: sizes of the inputs, attributes, and inputs by their
places that are constants (numbers or arrays), of another type, or left out (None)."""

SEEDS = """
Abs:3 Acos:3 Acosh:3 Add:0 And:0 ArgMax:5 ArgMin:5 Asin:3 Asinh:3 Atan:3 Atanh:3 AveragePool:159 BitShift:22
BitwiseAnd:0 BitwiseNot:3 BitwiseOr:0 BitwiseXor:0 Cast:45 CastLike:5 Ceil:3 Celu:3 Clip:3 Concat:10 Constant:26
ConstantOfShape:8 Conv:431 Cos:3 Cosh:3 CumSum:8 DepthToSpace:152 DequantizeLinear:6 Div:8 Einsum:105 Elu:3 Equal:0
Erf:3 Exp:3 Expand:14 EyeLike:65 Flatten:3 Floor:3 Gather:8 GatherElements:39 GatherND:18 Gelu:5 Gemm:31
GlobalAveragePool:19 GlobalMaxPool:19 Greater:0 GreaterOrEqual:0 GroupNormalization:1216 HardSigmoid:3 HardSwish:3
Identity:3 IsInf:5 IsNaN:3 LayerNormalization:0 LeakyRelu:3 Less:0 LessOrEqual:0 Log:3 LogSoftmax:5 MatMul:8 Max:1
MaxPool:54 Mean:1 Min:1 Mish:3 Mod:8 Mul:0 Neg:3 Not:3 Or:0 PRelu:0 Pad:24 Pow:31 QuantizeLinear:6
RMSNormalization:120 Range:105 Reciprocal:3 ReduceL1:15 ReduceL2:15 ReduceLogSum:15 ReduceLogSumExp:15 ReduceMax:5
ReduceMean:15 ReduceMin:5 ReduceProd:15 ReduceSum:15 ReduceSumSquare:15 Relu:5 Reshape:14 Round:3 ScatterElements:297
ScatterND:265 Selu:3 Shape:3 Shrink:3 Sigmoid:3 Sign:3 Sin:3 Sinh:3 Size:3 Slice:17 Softmax:5 Softplus:3 Softsign:3
SpaceToDepth:152 Split:5 Sqrt:3 Squeeze:3 Sub:0 Sum:1 Tan:3 Tanh:3 ThresholdedRelu:3 Tile:14 TopK:50 Transpose:3
Trilu:19 Unsqueeze:0 Where:6 Xor:0 DynamicQuantizeLinear:5
"""
"""The first seed, of all other operators, whose random choices give a graph that runs."""


def test_the_table_is_data_that_another_language_can_read():
    assert msgspec.json.decode(msgspec.json.encode(FORMS), type=dict[str, dict[str, Form]]) == FORMS


def test_no_form_is_wider_than_the_standard():
    """Some version of the standard has each form: what a version lacks, the engine refuses when it opens the graph."""
    for name, form in FORMS[""].items():
        schemas = [onnx.defs.get_schema(name, opset, "") for opset in OPSETS if onnx.defs.has(name, opset, "")]
        assert schemas, name
        for schema in schemas:
            kinds = [str(entry.option).rpartition(".")[2] for entry in schema.inputs]
            assert form.most_inputs <= (ANY if kinds[-1:] == ["Variadic"] else len(kinds)), name
            for kind, needed in zip(kinds, form.inputs, strict=False):
                assert needed or kind == "Optional", name
            required = {key for key, value in schema.attributes.items() if value.required and key in form.attributes}
            assert required <= {*form.required}, name
            for key in form.values.keys() & schema.attributes.keys() - {*form.required}:
                default = schema.attributes[key].default_value
                assert (default.s.decode() or str(default.i)) in form.values[key], "an attribute that is not there"
        assert form.most_results <= max(schema.max_output for schema in schemas), name


def ran_by_hand(domain: str, name: str) -> bool:
    """Return whether an operator passes the check and runs in ONNX Runtime."""
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
    return runs(made, ["y"], feeds)


def runs(made: onnx.ModelProto, outputs: Sequence[str], feeds: dict[str, Any]) -> bool:
    Walk(made.SerializeToString(), "step", "", 0)
    made.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    return len(session.run(None, feeds)) == len(outputs)


def test_every_operator_of_the_table_was_run_by_the_engine():
    seeds = {name: int(seed) for name, _, seed in (entry.partition(":") for entry in SEEDS.split())}
    assert {*seeds, *BY_HAND} == {name for _, name in NAMES}
    for number, (domain, name) in enumerate(NAMES):
        if name in BY_HAND:
            assert ran_by_hand(domain, name), name
            continue
        chain = Chain(Choices(bytes([number, *random.Random(seeds[name]).choices(range(256), k=80)])))
        chain.add()
        assert runs(chain.model(), [output for output in chain.nodes[0].output if output], chain.feeds), name


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
        Walk(graph.SerializeToString(), "step", "", 0)
    assert ", expected ".join(refused.value.args[:2]) == said
