"""Half precision of a graph that is not ours: weights and products with them, nothing else."""

from __future__ import annotations

from collections import Counter

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from txl_export.graphs.emulation import in_float32
from txl_export.graphs.half import HALF, to_half, weights_of_products

DRAWS = np.random.default_rng(0)
KINDS = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
precisions = pytest.mark.parametrize("precision", KINDS)


def value(name, *shape):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def graph_of(nodes, inputs, outputs, weights):
    made = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "step", inputs, outputs, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


def attention():
    """An embedding that is a softmax's table too, a norm, products with weights and with none."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("MatMul", ["frequencies", "positions"], ["angle"]),
        helper.make_node("Add", ["x", "angle"], ["moved"]),
        helper.make_node("LayerNormalization", ["moved", "scale"], ["normed"], axis=-1),
        helper.make_node("Transpose", ["query"], ["query.turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["normed", "query.turned"], ["q"]),
        helper.make_node("Transpose", ["q"], ["k"], perm=[1, 0]),
        helper.make_node("MatMul", ["q", "k"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["share"], axis=-1),
        helper.make_node("MatMul", ["share", "moved"], ["seen"]),
        helper.make_node("Gemm", ["seen", "table", "bias"], ["y"], transB=1),
        helper.make_node("Mul", ["query", "two"], ["weights twice"]),
    ]
    weights = {
        "table": DRAWS.normal(size=(20, 8)),
        "query": DRAWS.normal(size=(8, 8)),
        "frequencies": DRAWS.normal(size=(4, 1)),
        "positions": np.arange(8)[None],
        "scale": np.ones(8),
        "bias": DRAWS.normal(size=20),
        "two": np.array(2.0),
    }
    ids = helper.make_tensor_value_info("ids", TensorProto.INT32, [4])
    outputs = [value("y", 4, 20), value("weights twice", 8, 8)]
    return graph_of(nodes, [ids], outputs, weights), {"ids": np.array([3, 1, 4, 1], np.int32)}


def recurrent():
    nodes = [
        helper.make_node("Slice", ["w", "zero", "size", "axis"], ["w.part"]),
        helper.make_node("Concat", ["w.part", "w.part"], ["w.joined"], axis=0),
        helper.make_node("Unsqueeze", ["w.joined", "front"], ["w.whole"]),
        helper.make_node("LSTM", ["x", "w.whole", "r", "b", "", "h", "c"], ["", "h2", "c2"], hidden_size=4),
    ]
    weights = {"w": DRAWS.normal(size=(16, 6)), "r": DRAWS.normal(size=(1, 16, 4)), "b": DRAWS.normal(size=(1, 32))}
    inputs = [value("x", 3, 2, 6), value("h", 1, 2, 4), value("c", 1, 2, 4)]
    model = graph_of([], inputs, [], weights)
    for name, number in {"zero": 0, "size": 8, "axis": 0, "front": 0}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array([number], np.int64), name))
    model.graph.node.extend(nodes)
    model.graph.output.extend([value("h2", 1, 2, 4), value("c2", 1, 2, 4)])
    model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    return model, {spec.name: DRAWS.normal(size=spec_shape(spec)).astype(np.float32) for spec in inputs}


def spec_shape(spec):
    return [dim.dim_value for dim in spec.type.tensor_type.shape.dim]


def halved(model, precision, parameters, more=()):
    made = ir.from_proto(onnx.ModelProto.FromString(model.SerializeToString()))  # a copy: it shares tensors
    names = weights_of_products(made.graph, precision, parameters)
    to_half(made, precision, names | set(more))
    proto = ir.to_proto(made)
    onnx.checker.check_model(proto, full_check=True)
    return proto, names


def types_of(model):
    typed = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    values = (*typed.graph.value_info, *typed.graph.input, *typed.graph.output)
    found = {entry.name: entry.type.tensor_type.elem_type for entry in values}
    return found | {tensor.name: tensor.data_type for tensor in model.graph.initializer}


def run(model, feeds):
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)


@precisions
def test_products_with_parameters_are_half_and_nothing_else_is(precision):
    model, feeds = attention()
    found, names = halved(model, precision, {"table", "query", "scale", "bias"})
    assert names == {"table", "query"}
    half, types = HALF[precision][0].value, types_of(found)
    kinds = Counter()
    for node in found.graph.node:
        taken = {types[name] for name in node.input if types[name] in (half, TensorProto.FLOAT)}
        if node.op_type not in ("Cast", "Gather", "Transpose"):
            assert len(taken) == 1, f"{node.op_type} of mixed types"
            kinds[node.op_type, taken.pop() == half] += 1
    assert kinds["MatMul", True] == 1
    assert kinds["MatMul", False] == 3, "positions, scores and what is seen"
    assert kinds["Gemm", True] == 1
    for kept in ("LayerNormalization", "Softmax", "Add", "Mul"):
        assert not kinds[kept, True]
    stored = {tensor.name: tensor.data_type for tensor in found.graph.initializer}
    assert stored["table"] == stored["query"] == half
    assert stored["scale"] == stored["bias"] == stored["frequencies"] == TensorProto.FLOAT
    ends = (*found.graph.input, *found.graph.output)
    assert {entry.type.tensor_type.elem_type for entry in ends} == {TensorProto.INT32, TensorProto.FLOAT}
    wanted, twice = run(model, feeds)
    results = run(in_float32(found) if precision == "bf16" else found, feeds)
    error = np.abs(results[0] - wanted).max()
    assert 1e-6 < error < {"fp16": 0.05, "bf16": 0.4}[precision]
    rounded = (twice / 2).astype(KINDS[precision]).astype(np.float32)
    np.testing.assert_array_equal(results[1], rounded * 2)


def test_a_weight_that_another_graph_has_in_half_is_half_where_no_product_reads_it():
    model, feeds = attention()
    found, names = halved(model, "fp16", {"query"}, more={"table"})
    assert names == {"query"}
    assert {tensor.name: tensor.data_type for tensor in found.graph.initializer}["table"] == TensorProto.FLOAT16
    assert np.abs(run(found, feeds)[0] - run(model, feeds)[0]).max() < 0.05


def test_an_lstm_in_fp16_takes_its_weights_through_what_orders_them():
    model, feeds = recurrent()
    found, names = halved(model, "fp16", ())
    assert names == {"w", "r"}
    types = types_of(found)
    lstm = next(node for node in found.graph.node if node.op_type == "LSTM")
    assert {types[name] for name in lstm.input if name} == {TensorProto.FLOAT16}
    assert types["w"] == TensorProto.FLOAT16
    for result, wanted in zip(run(found, feeds), run(model, feeds), strict=True):
        assert 1e-6 < np.abs(result - wanted).max() < 5e-3


def test_an_lstm_stays_as_it_is_in_bf16_which_opset_18_lacks():
    model, feeds = recurrent()
    found, names = halved(model, "bf16", ())
    assert not names
    assert TensorProto.BFLOAT16 not in types_of(found).values()
    for result, wanted in zip(run(found, feeds), run(model, feeds), strict=True):
        np.testing.assert_array_equal(result, wanted)


@precisions
def test_every_value_of_a_converted_graph_has_a_shape(precision):
    model, _ = attention()
    found, _ = halved(model, precision, {"table", "query"})
    known = {entry.name for entry in (*found.graph.value_info, *found.graph.output)}
    assert {name for node in found.graph.node for name in node.output} <= known


@precisions
def test_engines_take_the_converted_graph(precision):
    trt = pytest.importorskip("tensorrt_rtx")
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    for make in (attention, recurrent):
        model, _ = make()
        found, _ = halved(model, precision, {"table", "query"})
        builder = trt.Builder(logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        assert parser.parse(found.SerializeToString()), parser.get_error(0).desc()
        config = builder.create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM86, 0)
        assert builder.build_serialized_network(network, config) is not None


def test_the_types_have_the_same_names_in_torch_and_onnx():
    for kind, dtype in HALF.values():
        assert torch.empty(0, dtype=dtype).element_size() == kind.itemsize == 2
