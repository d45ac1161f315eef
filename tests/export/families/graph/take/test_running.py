"""A foreign graph in a process of its own: it may die, take too long or ask for too much, and nothing else ends."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from foreign_graphs import STATEFUL, exported
from onnx import TensorProto, helper, numpy_helper
from small_graphs import model, value
from txl_export.families.graph.take import worker
from txl_export.families.graph.take.reading import Foreign, read_foreign
from txl_export.families.graph.take.running import SECONDS, Helper, RunError
from txl_runtime.sandbox.process import EndedError


@pytest.fixture
def cell(tmp_path: Path) -> Foreign:
    """A small graph on a disk."""
    path = tmp_path / "cell.onnx"
    path.write_bytes(exported(STATEFUL["gru cell"])[0])
    return read_foreign(path)


def feeds(cell: Foreign) -> dict[str, np.ndarray]:
    return {
        port.name: np.ones([2 if isinstance(size, str) else size for size in port.shape], np.float32)
        for port in cell.inputs
    }


def gone(helper: Helper) -> bool:
    """Return whether the helper's process has ended."""
    return helper._process._process.poll() is not None


def test_runs_return_what_the_graph_computes_and_the_helper_ends_with_them(cell):
    with Helper(cell) as helper:
        runner = helper.open(cell.data)
        first, second = runner.run(feeds(cell)), runner.run(feeds(cell))
        assert {name: array.shape for name, array in first.items()} == {"y": (2, 3), "new_h_0": (2, 8)}
        assert all(np.array_equal(first[name], second[name]) for name in first)
        assert helper.runs == 2
        assert 0 < helper.seconds_left < SECONDS
        assert not gone(helper)
    assert gone(helper)


def test_several_graphs_are_open_in_one_helper_until_each_is_closed(cell, tmp_path):
    onnx.save(model([helper.make_node("Neg", ["x"], ["y"])], [value("x", [1])], [value("y", [1])]), tmp_path / "n.onnx")
    with Helper(cell) as process:
        one = process.open(cell.model)
        with process.open(read_foreign(tmp_path / "n.onnx").model) as other:
            assert other.run({"x": np.ones(1, np.float32)})["y"] == -1
            assert {*one.run(feeds(cell))} == {"y", "new_h_0"}
        with pytest.raises(RunError):
            other.run({"x": np.ones(1, np.float32)})
        assert {*one.run(feeds(cell))} == {"y", "new_h_0"}


def test_weights_beside_a_graph_are_found_and_stay_there_when_it_is_folded(tmp_path):
    numbers = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    nodes = [helper.make_node("Add", ["v", "v"], ["twice"]), helper.make_node("MatMul", ["x", "w"], ["a"])]
    nodes.append(helper.make_node("MatMul", ["a", "twice"], ["y"]))
    weights = [numpy_helper.from_array(numbers, name) for name in "vw"]
    graph = model(nodes, [value("x", [1, 64])], [value("y", [1, 64])], weights)
    onnx.save(graph, tmp_path / "f.onnx", save_as_external_data=True, location="f.data", size_threshold=0)
    foreign, given = read_foreign(tmp_path / "f.onnx"), np.ones((1, 64), np.float32)
    with Helper(foreign) as process:
        folded = process.fold(foreign.model)
        found = [process.open(graph).run({"x": given})["y"] for graph in (foreign.data, foreign.model, folded)]
    for y in found:
        np.testing.assert_allclose(y, given @ numbers @ (2 * numbers), rtol=1e-4)
    assert [node.op_type for node in folded.graph] == ["MatMul", "MatMul"]
    assert [isinstance(value.const_value, ir.ExternalTensor) for value in folded.graph.initializers.values()] == [
        name == "w" for name in folded.graph.initializers
    ]


def test_what_onnx_runtime_refuses_is_one_line_and_the_next_run_goes_on(cell):
    with Helper(cell) as helper:
        runner = helper.open(cell.data)
        with pytest.raises(RunError) as refused:
            runner.run({name: array[:, :3] for name, array in feeds(cell).items()})
        assert str(refused.value).isprintable()
        assert runner.run(feeds(cell))


def test_a_graph_that_does_not_open_is_refused_and_the_helper_goes_on(cell, tmp_path):
    unknown = helper.make_node("Nothing", ["x"], ["y"], domain="of.nobody")
    graph = model([unknown], [value("x", [1])], [value("y", [1])])
    graph.opset_import.append(helper.make_opsetid("of.nobody", 1))
    with Helper(cell) as process:
        for ask in (process.open, process.fold):
            with pytest.raises(RunError, match="Nothing"):
                ask(ir.from_proto(graph))
        assert process.open(cell.data).run(feeds(cell))


@pytest.mark.parametrize(("opset", "version", "said"), [(99, 10, "opset 99"), (18, 99, "format version 99")])
def test_a_graph_that_is_too_new_for_onnx_runtime_is_refused_in_our_words(opset, version, said, cell):
    graph = model([helper.make_node("Abs", ["x"], ["y"])], [value("x", [1])], [value("y", [1])], opset=opset)
    graph.ir_version = version
    installed = re.escape(onnxruntime.__version__)
    with Helper(cell) as process, pytest.raises(RunError) as refused:
        process.open(graph.SerializeToString())
    assert re.match(
        rf"{said}, expected at most \d+, which is what the installed ONNX Runtime {installed} opens; install",
        str(refused.value),
    )


def test_a_helper_that_dies_is_told_with_its_signal(cell):
    with Helper(cell) as helper:
        runner = helper.open(cell.data)
        os.kill(helper._process._process.pid, signal.SIGSEGV)
        with pytest.raises(EndedError, match=r"ONNX Runtime's process died of SIGSEGV"):
            runner.run(feeds(cell))


def looping(folder: Path, turns: int) -> Foreign:
    """A graph that multiplies in a loop: as long as it is told."""
    body = helper.make_graph(
        [helper.make_node("MatMul", ["s", "s"], ["t"]), helper.make_node("Identity", ["go"], ["on"])],
        "body",
        [value("i", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("s", [64, 64])],
        [value("on", [], TensorProto.BOOL), value("t", [64, 64])],
    )
    loop = helper.make_node("Loop", ["turns", "", "x"], ["y"], "loop", body=body)
    times = numpy_helper.from_array(np.array(turns), "turns")
    onnx.save(model([loop], [value("x", [64, 64])], [value("y", [64, 64])], [times]), folder / "loop.onnx")
    return read_foreign(folder / "loop.onnx")


@pytest.mark.skipif(sys.platform != "linux", reason="processor time is bounded on Linux alone")
def test_a_graph_that_does_not_end_is_ended_by_its_processor_time(tmp_path):
    foreign = looping(tmp_path, 2**40)
    with Helper(foreign, 3) as helper:
        runner = helper.open(foreign.data)
        for _ in range(2):
            with pytest.raises(EndedError, match="more than 3 s of processor time"):
                runner.run({"x": np.zeros((64, 64), np.float32)})
    assert gone(helper)


def test_requests_share_their_seconds_and_the_clock_has_more_of_them(cell, monkeypatch):
    monkeypatch.setattr("time.thread_time", lambda: 0.0)
    with Helper(cell, 3) as helper:
        asked, right = list[float](), helper._process.ask
        monkeypatch.setattr(helper._process, "ask", lambda data, seconds: asked.append(seconds) or right(data, seconds))
        runner = helper.open(cell.data)
        runner.run(feeds(cell))
        assert asked[0] == 60
        assert asked[1] < 60 - 20 * 0.05, "processor time of the first request"
        helper._used = 3.0
        with pytest.raises(EndedError, match="took more than 3 s of processor time"):
            runner.run(feeds(cell))


def test_a_graph_that_asks_for_more_memory_than_it_may_is_refused(tmp_path):
    nodes = [helper.make_node("Expand", ["x", "shape"], ["y"]), helper.make_node("ReduceSum", ["y"], ["z"])]
    shape = numpy_helper.from_array(np.array([2**32]), "shape")
    onnx.save(model(nodes, [value("x", [1])], [value("z", None)], [shape]), tmp_path / "large.onnx")
    foreign = read_foreign(tmp_path / "large.onnx")
    with Helper(foreign) as process, pytest.raises((RunError, EndedError)) as refused:
        process.open(foreign.data).run({"x": np.zeros(1, np.float32)})
    assert str(refused.value).isprintable()
    assert gone(process)


@pytest.mark.parametrize("kind", ["<f4", ">f4", "<f2", "|b1", "<i8", "|u1"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_arrays_are_sent_as_they_are(kind, shape):
    array = np.arange(6).astype(kind)[: int(np.prod(shape))].reshape(shape)
    (found,) = worker.unpacked(msgspec.msgpack.decode(msgspec.msgpack.encode(worker.packed({"a": array.T})))).values()
    np.testing.assert_array_equal(found, array.T, strict=True)


@pytest.mark.parametrize(
    "sent", [("O", (1,), b"\0" * 8), ("<f4", (2,), b"\0" * 4), ("<f4", (-2, -1), b""), ("no", (), b"")]
)
def test_what_is_no_array_of_numbers_is_refused(sent):
    with pytest.raises((ValueError, TypeError)):
        worker.unpacked({"a": sent})
    with pytest.raises(ValueError, match="expected numbers"):
        worker.packed({"a": np.array(["text"])})


def test_what_is_done_between_runs_has_its_bound_too(cell, monkeypatch):
    with Helper(cell, 3) as helper:
        began = helper._began
        monkeypatch.setattr("time.thread_time", lambda: began + 2)
        assert helper.seconds_left == pytest.approx(1)
        monkeypatch.setattr("time.thread_time", lambda: began + 4)
        with pytest.raises(EndedError, match="took more than 3 s of processor time"):
            helper.open(cell.data)


def quantised_product(by: str) -> onnx.ModelProto:
    """x [1, 2] uint8 times 2 x 1 weights of int8, both as large as they get: 2 · 255 · 127 has no place in 16 bits."""
    weight = numpy_helper.from_array(np.full((2, 1), 127, np.int8), "w")
    zero, scale = numpy_helper.from_array(np.int8([0]), "z"), numpy_helper.from_array(np.float32([1]), "s")
    none = numpy_helper.from_array(np.zeros(1, by), "none")
    nodes = [helper.make_node("MatMulInteger", ["x", "w", "none", "z"], ["y"])]
    if by == "int8":
        nodes = [helper.make_node("QLinearMatMul", ["x", "s", "none", "w", "s", "z", "s", "none"], ["y"])]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(by))
    result = value("y", [1, 1], TensorProto.INT8 if by == "int8" else TensorProto.INT32)
    return model(nodes, [value("x", [1, 2], kind)], [result], [weight, zero, scale, none])


@pytest.mark.parametrize(("by", "given", "expected"), [("uint8", 255, 2 * 255 * 127), ("int8", -1, -128)])
def test_products_of_integers_are_exact_on_every_processor(by, given, expected, tmp_path):
    """On x86 without VNNI ONNX Runtime sums in 16 bits, or, where it is asked for exact sums, opens no int8 by int8."""
    onnx.save(quantised_product(by), tmp_path / "q.onnx")
    with Helper(found := read_foreign(tmp_path / "q.onnx")) as process:
        assert process.open(found.data).run({"x": np.full((1, 2), given, by)})["y"].tolist() == [[expected]]
