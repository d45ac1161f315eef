"""Sizes and contents that are found for a graph's values are those that ONNX Runtime computes, or bounds of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import step_models
from frozen import frozen
from onnx import TensorProto, helper, numpy_helper
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.guard.graph_check import Budget, Walk, check_graph
from txl_runtime.guard.protobuf import RefusedError

INT64, FLOAT = TensorProto.INT64, TensorProto.FLOAT


@pytest.mark.parametrize("name", [*step_models.MODELS, "ring", "clusters", "hidden", "half", "zeros", "policy-16"])
def test_sizes_are_those_that_the_engine_computes(tmp_path, name):
    """Every value of graphs of both kinds: as large as was found, or at most that where a size is open."""
    made = step_models.MODELS.get(name)
    path = made().write(tmp_path / "a.txl") if made else frozen(name)
    manifest, seen = open_bundle(path).manifest, 0
    for entry in {entry.file: entry for entry in manifest.programs}.values():
        data = (path / entry.file).read_bytes()
        check_graph(data, entry.file, entry, manifest)
        if not any("ring" in text for text in (entry.update, entry.file)):
            seen += _compare(path, data, entry)
    assert seen > 20


def _compare(path: Path, data: bytes, entry: Any) -> int:
    model = onnx.load_model_from_string(data)
    open_sizes = {"rows": 5, "batch": 2}
    sizes = {spec.name: tuple(open_sizes.get(str(n), n) for n in spec.shape) for spec in entry.inputs}
    walk = Walk(data, entry.kind, sizes, "weights.safetensors", Budget((path / "weights.safetensors").stat().st_size))
    named = {value.name for value in model.graph.output}
    for step in model.graph.node:
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in step.output if name and name not in named)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path))
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    kinds = {"int32": np.int32, "float32": np.float32, "float16": np.float16, "bool": np.bool_}
    given = {spec.name: np.zeros(sizes[spec.name], kinds[spec.dtype]) for spec in entry.inputs}
    names = [output.name for output in session.get_outputs()]
    for value, found in zip(names, session.run(names, given), strict=True):
        known = walk.values[value]
        assert len(known.dims) == found.ndim
        assert found.size <= known.most
        if known.exact:
            assert known.dims == found.shape
        if known.content is not None:
            for (low, high), number in zip(known.content, found.reshape(-1).tolist(), strict=True):
                assert low <= number <= high
    return len(names)


ONE: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "ArgMax": ([(2, 3, 4)], {"axis": 1, "keepdims": 0}),
    "ConvTranspose": ([(2, 4, 5), (4, 3, 3)], {"strides": [2], "pads": [1, 0], "output_padding": [1]}),
    "DepthToSpace": ([(1, 8, 2, 3)], {"blocksize": 2}),
    "Einsum": ([(2, 3, 4), (2, 4, 5)], {"equation": "bij,bjk->bik"}),
    "Flatten": ([(2, 3, 4)], {"axis": 2}),
    "GatherND": ([(2, 3, 4), np.zeros((5, 2), np.int64)], {}),
    "GlobalAveragePool": ([(1, 2, 7, 6)], {}),
    "GridSample": ([(1, 2, 5, 6), (1, 3, 4, 2)], {}),
    "GRU": ([(4, 2, 3), (1, 15, 3), (1, 15, 5)], {"hidden_size": 5}),
    "MatMul": ([(2, 1, 3, 4), (5, 4, 6)], {}),
    "NonZero": ([(2, 3)], {}),
    "OneHot": ([np.zeros((2, 3), np.int64), np.array(5), np.zeros(2, np.float32)], {"axis": 1}),
    "Pad": ([(2, 3), [1, 0, 2, -1]], {}),
    "Range": ([np.array(3), np.array(20), np.array(4)], {}),
    "Resize": ([(1, 2, 5, 6), np.zeros(0, np.float32), np.zeros(0, np.float32), [1, 2, 7, 9]], {"mode": "linear"}),
    "Resize by scales": ([(1, 2, 5, 6), np.zeros(0, np.float32), np.array([1, 1, 2, 1.7], np.float32)], {}),
    "Resize by whole scales": ([(1, 2, 5, 6), np.zeros(0, np.float32), np.array([1, 1, 2, 3], np.float32)], {}),
    "Col2Im": ([(2, 12, 12), [4, 5], [2, 2]], {}),
    "ScatterND": ([(4, 3), np.zeros((2, 1), np.int64), (2, 3)], {}),
    "Size": ([(2, 3)], {}),
    "Slice back from the last": ([(5, 3), [-1], [2**63 - 1], [0], [-1]], {}),
    "Slice back from the last in 32 bits": ([(5, 3), [-1], [2**31 - 1], [0], [-2]], {}),
    "LayerNormalization": ([(1, 5, 3), (3,)], {"axis": 2}),
    "ReduceMean of nothing": ([(2, 0, 5), [-1]], {"keepdims": 1}),
    "MaxPool with gaps": ([(1, 2, 1, 9)], {"kernel_shape": [1, 4], "strides": [1, 3], "dilations": [3, 3]}),
    "MaxPool of less than a window": ([(1, 2, 1)], {"kernel_shape": [3], "strides": [3], "auto_pad": "VALID"}),
    "MaxPool with gaps to the same": ([(1, 1, 4)], {"kernel_shape": [2], "dilations": [2], "auto_pad": "SAME_UPPER"}),
    "ConvTranspose to the same": ([(1, 2, 3), (2, 2, 2)], {"strides": [3], "auto_pad": "SAME_UPPER"}),
    "Neg": ([(2, 3)], {}),
    "SpaceToDepth": ([(1, 2, 4, 6)], {"blocksize": 2}),
    "Split": ([(7, 2), [3, 0, 4]], {}),
    "Squeeze": ([(1, 3, 1)], {}),
    "Squeeze by no axes": ([(1, 3, 1), np.zeros(0, np.int64)], {}),
    "Clip": ([(), np.zeros((), np.float32), np.ones((), np.float32)], {}),
    "Clip by a limit with an axis": ([(), np.zeros(1, np.float32)], {}),
    "Einsum with dots": ([(2, 1, 3), (2, 5, 3)], {"equation": "...i,...i->..."}),
    "DepthToSpace by one": ([(1, 8, 2, 3)], {"blocksize": 1}),
    "Tile": ([(2, 3), [2, 4]], {}),
    "TopK": ([(2, 9), [4]], {}),
    "Trilu": ([(3, 4)], {}),
}


@pytest.mark.parametrize("operator", ONE)
def test_sizes_behind_one_operator_are_those_that_the_engine_computes(operator):
    """`test_plain_sizes_random.py` has further operators, with inputs drawn at random."""
    given, attributes = ONE[operator]
    inputs, constants, feed = [], [], {}
    for i, value in enumerate(given):
        if isinstance(value, tuple):
            inputs.append(helper.make_tensor_value_info(f"i{i}", FLOAT, value))
            feed[f"i{i}"] = np.ones(value, np.float32)
        else:
            constants.append(numpy_helper.from_array(np.asarray(value), f"i{i}"))
    operator = operator.partition(" ")[0]
    count = {"TopK": 2, "Split": 3, "GRU": 2, "LayerNormalization": 3}.get(operator, 1)
    names = [f"o{i}" for i in range(count)]
    made = helper.make_node(operator, [f"i{i}" for i in range(len(given))], names, **attributes)
    outputs = [onnx.ValueInfoProto(name=name) for name in names]
    graph = helper.make_graph([made], "g", inputs, outputs, constants)
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()
    found = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, feed)
    for output in graph.output:
        output.type.tensor_type.elem_type = FLOAT
        output.type.tensor_type.shape.SetInParent()
        output.type.tensor_type.shape.dim.extend(
            [onnx.TensorShapeProto.Dimension()] * found[names.index(output.name)].ndim
        )
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()
    walk = Walk(data, "step", {name: array.shape for name, array in feed.items()}, "weights", Budget(0))
    for name, array in zip(names, found, strict=True):
        known = walk.values[name]
        assert len(known.dims) == array.ndim
        assert array.size <= known.most
        assert known.dims == array.shape or (
            not known.exact and all(n <= m for n, m in zip(array.shape, known.dims, strict=True))
        )


@pytest.mark.parametrize(
    ("operator", "second", "message"),
    [
        ("Conv", FLOAT, "weights whose sizes are open"),  # behind a larger window there is less
        ("GatherND", INT64, "indices of more axes than the value, or of an open number"),  # fewer numbers pick more
    ],
)
def test_what_an_open_size_makes_smaller_is_refused(operator, second, message):
    """No bound of such a size bounds what comes out."""
    given = [helper.make_tensor_value_info(*value) for value in (("x", FLOAT, [4, 1, 8]), ("y", second, [4, 1, "n"]))]
    graph = helper.make_graph([helper.make_node(operator, ["x", "y"], ["z"])], "g", given, [], [])
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()
    with pytest.raises(RefusedError, match=message):
        Walk(data, "step", {"x": (4, 1, 8), "y": (4, 1, 3)}, "weights", Budget(0))


@pytest.mark.parametrize("by", ["roi", "policy", "data", "nan", "many"])
def test_a_resize_whose_size_is_not_said_is_refused(by):
    scales = {"nan": np.array([1, np.nan], np.float32), "many": np.array([1, 1e9], np.float32)}
    constants = [
        numpy_helper.from_array(np.zeros(4 if by == "roi" else 0, np.float32), "roi"),
        numpy_helper.from_array(scales.get(by, np.ones(2, np.float32)), "scales"),
    ]
    inputs = ["x", "roi", "x" if by == "data" else "scales"]
    made = helper.make_node(
        "Resize", inputs, ["y"], **({"keep_aspect_ratio_policy": "not_larger"} if by == "policy" else {})
    )
    given, found = (helper.make_tensor_value_info(name, FLOAT, [2, 3]) for name in ("x", "y"))
    graph = helper.make_graph([made], "g", [given], [found], constants)
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()
    with pytest.raises(RefusedError, match="at Resize"):
        Walk(data, "step", {"x": (2, 3)}, "weights", Budget(0))


def test_pads_that_older_exporters_turn_around_are_known():
    """[1, 0] and zeros, as pairs, last axis first, in two columns: what torch's tracer makes of F.pad."""
    numbers = {"pads": [1, 2, 3, 0], "pairs": [-1, 2], "last": [-1], "first": [-(2**63) + 1], "zero": [0], "flat": [-1]}
    constants = [numpy_helper.from_array(np.array(given), name) for name, given in numbers.items()]
    nodes = [
        helper.make_node("Reshape", ["pads", "pairs"], ["a"]),
        helper.make_node("Slice", ["a", "last", "first", "zero", "last"], ["b"]),
        helper.make_node("Transpose", ["b"], ["c"], perm=[1, 0]),
        helper.make_node("Reshape", ["c", "flat"], ["d"]),
        helper.make_node("Cast", ["d"], ["e"], to=7),
        helper.make_node("Pad", ["x", "e"], ["y"]),
    ]
    given, found = helper.make_tensor_value_info("x", FLOAT, [2, 5]), helper.make_tensor_value_info("y", FLOAT, [5, 8])
    graph = helper.make_graph(nodes, "g", [given], [found], constants)
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()
    feed = {"x": np.ones((2, 5), np.float32)}
    (array,) = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, feed)
    walk = Walk(data, "step", {"x": (2, 5)}, "weights", Budget(0))
    assert walk.values["e"].content == ((3, 3), (1, 1), (0, 0), (2, 2))
    assert walk.values["y"].dims == array.shape == (5, 8)
