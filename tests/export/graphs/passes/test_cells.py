"""Cells that are taken apart compute what torch computes, NaN included, in any number of sequences and in fp16."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import small_graphs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from torch import Tensor, nn
from txl_export.graphs.half import to_half, weights_of_products
from txl_export.graphs.passes.improving import improve
from txl_export.graphs.settling import infer_shapes
from txl_export.graphs.tracing import quiet

CLOSE = 2e-6
"""The largest difference of float32 values between -1 and 1."""
ORDER = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
"""Torch's gates in the order of the standard."""
STATES = {"LSTM": ("h", "c"), "GRU": ("h",), "RNN": ("h",)}


def turned(kind, weights):
    """Rows of torch's in the order of the standard."""
    parts = weights.detach().numpy().reshape(len(ORDER[kind]), -1, *weights.shape[1:])
    return np.concatenate(parts[list(ORDER[kind])])


def layers(kind, module, batch, opset=18, inputs=5, **attributes):
    """A graph of a step of a torch layer as exporters write it: x [B, k], states [n, B, d] → y [B, d], states."""
    size, count = module.hidden_size, module.num_layers
    made, constants = [], {"zero": np.array([0])}

    def add(op, reads, *results, **said):
        made.append(helper.make_node(op, list(reads), list(results), name=f"{op}.{len(made)}", **said))
        return results[0]

    value = add("Transpose", [add("Unsqueeze", ["x", "one"], "unsqueezed")], "turned", perm=[1, 0, 2])
    constants |= {"one": np.array([1]), "sizes": np.array([1, -1, size])}
    after = {name: [] for name in STATES[kind]}
    for layer in range(count):
        constants[f"at{layer}"], constants[f"to{layer}"] = np.array([layer]), np.array([layer + 1])
        reads = {name: f"{name}{layer}" for name in STATES[kind]}
        for name, one in reads.items():
            add("Slice", [name, f"at{layer}", f"to{layer}", "zero"], one)
        constants[f"w{layer}"] = turned(kind, getattr(module, f"weight_ih_l{layer}"))[None]
        constants[f"r{layer}"] = turned(kind, getattr(module, f"weight_hh_l{layer}"))[None]
        biases = [f"b{layer}"] if module.bias else [""]
        if module.bias:
            both = (getattr(module, f"bias_{side}_l{layer}") for side in ("ih", "hh"))
            constants[f"b{layer}"] = np.concatenate([turned(kind, bias) for bias in both])[None]
        results = [f"{name}.{layer}" for name in STATES[kind]]
        said = attributes | {"hidden_size": size}
        said |= {"linear_before_reset": 1} if kind == "GRU" else {}
        add(kind, [value, f"w{layer}", f"r{layer}", *biases, "", *reads.values()], f"y{layer}", *results, **said)
        value = add("Transpose", [f"y{layer}"], f"t{layer}", perm=[0, 2, 1, 3])
        value = add("Reshape", [value, "sizes"], f"s{layer}")
        for name in STATES[kind]:
            after[name].append(f"{name}.{layer}")
    add("Squeeze", [value, "zero"], "y")
    for name, parts in after.items():
        add("Concat", parts, f"{name}.out", axis=0)
    sides = [small_graphs.value("x", (batch, inputs))]
    sides += [small_graphs.value(name, (count, batch, size)) for name in STATES[kind]]
    results = [small_graphs.value("y", (batch, size))]
    results += [small_graphs.value(f"{name}.out", (count, batch, size)) for name in STATES[kind]]
    weights = [numpy_helper.from_array(np.asarray(values), name) for name, values in constants.items()]
    return settled(small_graphs.model(made, sides, results, weights, opset))


def settled(proto):
    model = ir.from_proto(proto)
    infer_shapes(model)
    return model


def run(model, values):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    data = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run(None, values)


def of_torch(module, values):
    """Return torch's results for the same."""
    x, *states = (torch.from_numpy(one) for one in values.values())
    with torch.no_grad():
        y, after = module(x[None], tuple(states) if len(states) > 1 else states[0])
    return [one.numpy() for one in (y[0], *((after,) if isinstance(after, Tensor) else after))]


def drawn(kind, batch, count, size, inputs=5, seed=0):
    draws = np.random.default_rng(seed)
    shapes = {"x": (batch, inputs)} | dict.fromkeys(STATES[kind], (count, batch, size))
    return {name: draws.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def module_of(kind, count, size, bias=True, inputs=5, **said):
    torch.manual_seed(size + count)
    module = getattr(nn, kind)(inputs, size, count, bias=bias, **said).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def kinds(model):
    return [node.op_type for node in model.graph]


@settings(max_examples=25)
@given(
    st.sampled_from(["LSTM", "GRU", "RNN"]),
    st.integers(1, 3),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([18, 24]),
    st.integers(1, 4),
    st.booleans(),
)
def test_layers_over_one_position_are_taken_apart_and_compute_what_torch_does(
    kind, count, size, bias, opset, batch, is_open
):
    module = module_of(kind, count, size, bias)
    model = layers(kind, module, "batch" if is_open else batch, opset)
    improve(model)
    assert not {kind, "Transpose", "Where"} & {*kinds(model)}
    values = drawn(kind, batch, count, size)
    for found, expected in zip(run(model, values), of_torch(module, values), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE)


@settings(max_examples=20)
@given(st.sampled_from(["LSTM", "GRU", "RNN"]), st.integers(1, 3), st.integers(0, 2), st.data())
def test_nan_is_where_torch_has_it_and_nowhere_else(kind, count, which, data):
    module = module_of(kind, count, size := 4)
    model = layers(kind, module, 2)
    improve(model)
    values = drawn(kind, 2, count, size)
    name = [*values][which % len(values)]
    place = data.draw(st.integers(0, values[name].size - 1))
    values[name].flat[place] = np.nan
    for found, expected in zip(run(model, values), of_torch(module, values), strict=True):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))


@pytest.mark.parametrize(
    ("kind", "said"),
    [("GRU", {"clip": 1.0}), ("LSTM", {"input_forget": 1}), ("LSTM", {"activations": ["Sigmoid", "Relu", "Tanh"]})],
)
def test_an_unusual_operator_stays(kind, said):
    model = layers(kind, module_of(kind, 1, 4), 2, **said)
    improve(model)
    assert kind in kinds(model)


@pytest.mark.parametrize(("length", "kept"), [(1, False), (3, True), ("batch", True)])
def test_a_layer_over_more_positions_keeps_the_operator(length, kept):
    module = module_of("RNN", 1, 4)
    made = helper.make_node("RNN", ["x", "w", "r", "", "", "h"], ["y"], name="RNN.0", hidden_size=4)
    sides = [small_graphs.value("x", (length, 2, 5)), small_graphs.value("h", (1, 2, 4))]
    weights = {"w": module.weight_ih_l0, "r": module.weight_hh_l0}
    constants = [numpy_helper.from_array(value.detach().numpy()[None], name) for name, value in weights.items()]
    results = [small_graphs.value("y", (length, 1, 2, 4))]
    model = settled(small_graphs.model([made], sides, results, constants))
    improve(model)
    assert ("RNN" in kinds(model)) is kept


def test_the_reset_before_the_product_and_another_activation_are_what_onnx_runtime_computes():
    for kind, said in (("GRU", {"linear_before_reset": 0}), ("RNN", {"activations": ["Relu"]})):
        module = module_of(kind, 2, 6)
        plain, model = (layers_of(kind, module, said) for _ in range(2))
        improve(model)
        assert kind not in kinds(model)
        values = drawn(kind, 3, 2, 6)
        for found, expected in zip(run(model, values), run(plain, values), strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def layers_of(kind, module, said):
    model = layers(kind, module, 3)
    for node in model.graph:
        if node.op_type == kind:
            for name, value in said.items():
                node.attributes[name] = (
                    ir.AttrInt64(name, value) if isinstance(value, int) else ir.AttrStrings(name, value)
                )
    return model


class Cell(nn.Module):
    """One of torch's cells, with a product behind it."""

    def __init__(self, kind, size, bias=True):
        super().__init__()
        self.cell = getattr(nn, kind)(5, size, bias=bias)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x, *states):
        made = self.cell(x, states if len(states) > 1 else states[0])
        return made if isinstance(made, tuple) else (made,)


def captured(module, batch, states):
    """As torch.onnx.export writes it."""
    examples = (torch.zeros(batch, 5), *torch.zeros(states, batch, module.cell.hidden_size))
    with quiet():
        program = torch.onnx.export(module.eval(), examples, dynamo=True, opset_version=18, verbose=False)
    infer_shapes(program.model)
    for value, name in zip(program.model.graph.inputs, ("x", "h", "c"), strict=False):
        value.name = name
    return program.model


@pytest.mark.parametrize(("kind", "most"), [("LSTMCell", 2), ("GRUCell", 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_cells_of_torch_get_the_same_form(kind, most, bias):
    torch.manual_seed(0)
    states = 2 if kind == "LSTMCell" else 1
    module = Cell(kind, 7, bias)
    model = captured(module, 3, states)
    values = drawn(kind.removesuffix("Cell"), 3, 1, 7)
    values = {name: value.reshape(3, -1) for name, value in values.items()}
    for place in (None, (1, 2)):
        if place is not None:
            values["x"][place] = np.nan
        with torch.no_grad():
            expected = module(*(torch.from_numpy(value) for value in values.values()))
        improve(model)
        assert kinds(model).count("Gemm") == most
        assert kinds(model).count("Sigmoid") == kinds(model).count("Split") == 1
        for found, wanted in zip(run(model, values), expected, strict=True):
            np.testing.assert_allclose(found, wanted.numpy(), rtol=0, atol=CLOSE)


@pytest.mark.parametrize(("rows", "batch", "said"), [(1, 2, {}), (12, 1, {}), (12, 2, {"alpha": 2.0})])
def test_what_only_looks_like_a_cell_stays_as_it_is(rows, batch, said):
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["one"], name="one", transB=1, **said),
        helper.make_node("Gemm", ["h", "r"], ["two"], name="two", transB=1),
        helper.make_node("Add", ["one", "two"], ["sum"], name="sum"),
        helper.make_node("Split", ["sum"], ["a", "b", "c", "d"], name="split", axis=1, num_outputs=4),
    ]
    kept = {"a": "Sigmoid", "b": "Sigmoid", "c": "Tanh", "d": "Sigmoid"}
    nodes += [helper.make_node(kind, [name], [f"{name}.out"], name=name) for name, kind in kept.items()]
    sides = [small_graphs.value("x", (batch, 5)), small_graphs.value("h", (2, 3))]
    results = [small_graphs.value(f"{name}.out", (2, 3)) for name in kept]
    draws = np.random.default_rng(0)
    weights = {"w": draws.normal(size=(rows, 5)), "r": draws.normal(size=(12, 3))}
    constants = [numpy_helper.from_array(values.astype(np.float32), name) for name, values in weights.items()]
    model = settled(small_graphs.model(nodes, sides, results, constants))
    before = kinds(model)
    improve(model)
    assert kinds(model) == before


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_fp16_has_its_weights_in_half_precision_and_its_sums_in_float(kind):
    module = module_of(kind, 2, 16)
    model = layers(kind, module, 2)
    improve(model)
    named = [name for layer in range(2) for name in (f"w{layer}", f"r{layer}")]
    assert weights_of_products(model.graph, "fp16", named) == {*named}
    to_half(model, "fp16", named)
    stored = {name: value.dtype for name, value in model.graph.initializers.items() if name in named}
    assert stored == dict.fromkeys(named, ir.DataType.FLOAT16)
    values = drawn(kind, 2, 2, 16)
    for found, expected in zip(run(model, values), of_torch(module, values), strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.02)
