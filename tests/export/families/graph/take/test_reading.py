"""Foreign files that are no ONNX models, or not such as anybody would take over: each refused in one line."""

from __future__ import annotations

import os

import numpy as np
import onnx
import onnx.numpy_helper
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from txl_export.families.graph.take import reading, worker
from txl_export.families.graph.take.reading import Port, copied, read_foreign
from txl_export.families.graph.take.running import Helper
from txl_runtime.errors import CheckpointError


def model(inputs=("x",), outputs=("y",), nodes=None, **more) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes or [helper.make_node("Identity", [inputs[0]], [outputs[0]])],
        "g",
        [value(name, TensorProto.FLOAT, ["batch", None, 3]) for name in inputs],
        [value(name, TensorProto.FLOAT, ["batch", None, 3]) for name in outputs],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], **more)


def test_names_dtypes_and_sizes_are_read_and_open_ones_are_told_apart(tmp_path):
    (tmp_path / "m.onnx").write_bytes(model().SerializeToString())
    found = read_foreign(tmp_path / "m.onnx")
    assert found.inputs == (Port("x", "float32", ("batch", "input x axis 1", 3)),)
    assert found.outputs == (Port("y", "float32", ("batch", "output y axis 1", 3)),)


def test_the_second_name_of_the_standard_s_domain_is_the_first(tmp_path):
    made = model(nodes=[helper.make_node("Identity", ["x"], ["y"], domain="ai.onnx")])
    made.opset_import[0].domain = "ai.onnx"
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    found = read_foreign(tmp_path / "m.onnx").model
    assert found.opset_imports == {"": 18}
    assert [node.domain for node in found.graph] == [""]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no graph with outputs"),
        (b"text", "no ONNX model"),
        (b"PK\3\4" * 20, "no ONNX model"),
        (model().SerializeToString()[:-9], "no ONNX model"),
    ],
)
def test_what_is_no_model_is_refused(data, said, tmp_path):
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(CheckpointError, match=said) as refused:
        read_foreign(tmp_path / "m.onnx")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("old", [b"\x0a\x01x", b"batch", b"Identity"])
def test_names_that_are_no_text_are_refused(old, tmp_path):
    """onnx has them as bytes, wherever they stand."""
    data = model().SerializeToString()
    assert old in data
    (tmp_path / "m.onnx").write_bytes(data.replace(old, old[:-1] + b"\xff"))
    with pytest.raises(CheckpointError, match="no UTF-8"):
        read_foreign(tmp_path / "m.onnx")


def test_too_many_nodes_and_tensors_are_refused_wherever_they_stand(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "MOST_PARTS", 3)
    monkeypatch.setattr(reading, "MOST_PARTS", 3)
    inner = helper.make_graph([helper.make_node("Identity", ["x"], [f"{at}"]) for at in range(3)], "inner", [], [])
    node = helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)
    full = model()
    full.graph.initializer.extend([TensorProto(name=f"{at}") for at in range(3)])
    called = model()
    called.functions.extend([onnx.FunctionProto(name=f"{at}") for at in range(3)])
    for made in (model(nodes=[node]), full, called):
        (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
        with pytest.raises(CheckpointError, match="4 nodes and tensors, expected at most 3"):
            read_foreign(tmp_path / "m.onnx")


def test_names_and_axes_without_end_are_refused_before_anything_is_made_of_them(tmp_path):
    long, many, symbol = (model() for _ in range(3))
    long.graph.input[0].name = "x" * 2000
    many.graph.input[0].type.tensor_type.shape.dim.extend([onnx.TensorShapeProto.Dimension()] * 2000)
    symbol.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "input " * 400
    constant = model()
    constant.graph.initializer.add(name="w", data_type=TensorProto.INT64, dims=[1] * 2000, raw_data=bytes(8))
    wrong = (
        (long, "1 inputs .* names of at most 2000 characters"),
        (many, "at most 2003 axes"),
        (symbol, "1 outputs .* names of at most 2400 characters"),
        (constant, "tensor has 2000 axes"),
    )
    for made, said in wrong:
        (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
        with pytest.raises(CheckpointError, match=said):
            read_foreign(tmp_path / "m.onnx")


def test_what_does_not_fit_together_is_refused_in_one_line(tmp_path):
    twice = [helper.make_node("Identity", ["x"], ["y"])] * 2
    (tmp_path / "m.onnx").write_bytes(model(nodes=twice).SerializeToString())
    with pytest.raises(CheckpointError, match=r"no graph that could be changed \(Output 'y' is redeclared"):
        read_foreign(tmp_path / "m.onnx")


def test_a_graph_made_of_the_file_has_its_own_ports(tmp_path):
    (tmp_path / "m.onnx").write_bytes(model().SerializeToString())
    foreign = read_foreign(tmp_path / "m.onnx")
    other = copied(foreign.model)
    other.graph.inputs[0].shape = ir.Shape([2, 5, 3])
    assert foreign.of(other).inputs == (Port("x", "float32", (2, 5, 3)),)
    assert foreign.of(foreign.model) == foreign


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "m.onnx")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_foreign(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("../weights", "expected a file beside it"),
        ("/etc/passwd", "beside it"),
        ("gone", "copy it too"),
        ("weights", None),
    ],
)
def test_weights_lie_beside_the_graph_and_are_counted_or_the_file_is_refused(place, said, tmp_path):
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=place)
    (tmp_path / "weights").write_bytes(b"\0" * 1000)
    constant, held = model(nodes=[helper.make_node("Constant", [], ["y"], value=tensor)]), model()
    held.graph.initializer.append(tensor)
    for made in (constant, held):
        (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
        if said is None:
            assert read_foreign(tmp_path / "m.onnx").bytes == 1000 + len(made.SerializeToString())
            continue
        with pytest.raises(CheckpointError, match=said):
            read_foreign(tmp_path / "m.onnx")


def test_sparse_weights_are_refused_and_not_left_out(tmp_path):
    made = model()
    made.graph.sparse_initializer.add().values.name = "w"
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(CheckpointError, match="has sparse weights, expected dense ones"):
        read_foreign(tmp_path / "m.onnx")


def test_an_input_of_more_numbers_than_anybody_feeds_is_refused(tmp_path):
    """218 bytes: fixing it, or giving it to the file where nothing reads it, would take gigabytes here."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2**30, 2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
    with pytest.raises(CheckpointError, match=r"x has 2.15e\+09 numbers, expected at most 16777216"):
        read_foreign(tmp_path / "m.onnx")


def test_small_weights_beside_the_file_are_read_into_it_and_large_ones_stay(tmp_path):
    """ONNX Runtime looks at small ones where it is given bytes, which have no folder."""
    proto = model(
        nodes=[helper.make_node("Add", ["x", "w"], ["z"]), helper.make_node("MatMul", ["z", "v"], ["y"])], ir_version=8
    )
    for name, sizes in (("w", (3,)), ("v", (3, 300))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(sizes, np.float32), name))
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    foreign = read_foreign(tmp_path / "m.onnx")
    weights = onnx.load_model_from_string(foreign.data).graph.initializer
    assert {tensor.name: bool(tensor.external_data) for tensor in weights} == {"w": False, "v": True}
    with Helper(foreign) as process:
        found = process.open(foreign.data).run({"x": np.zeros((1, 2, 3), np.float32)})
    assert (found["y"] == 3).all()


@pytest.mark.parametrize(("key", "value"), [("length", "9" * 5000), ("location", "w" * 5000)])
def test_a_place_of_weights_without_end_is_refused_in_one_line(key, value, tmp_path):
    proto = model(nodes=[helper.make_node("Add", ["x", "w"], ["y"])])
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((300,), np.float32), "w"))
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    next(entry for entry in proto.graph.initializer[0].external_data if entry.key == key).value = value
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(CheckpointError) as refused:
        read_foreign(tmp_path / "m.onnx")
    assert len(str(refused.value)) < 1000
