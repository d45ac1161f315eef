"""A foreign graph in a process of its own: it may die, take too long or ask for too much, and nothing else ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from foreign_graphs import STATEFUL, exported
from onnx import TensorProto, helper, numpy_helper
from small_graphs import model, value
from txl_export.families.graph.take.reading import Foreign, read_foreign
from txl_export.families.graph.take.running import RunError, Runner
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


def gone(runner: Runner) -> bool:
    """Whether the helper is no process any more."""
    return runner._process._process.poll() is not None


def test_runs_return_what_the_graph_computes_and_the_helper_ends_with_them(cell):
    with Runner(cell) as runner:
        first, second = runner.run(feeds(cell)), runner.run(feeds(cell))
        assert {name: array.shape for name, array in first.items()} == {"y": (2, 3), "new_h_0": (2, 8)}
        assert all(np.array_equal(first[name], second[name]) for name in first)
        assert runner.runs == 2
        assert not gone(runner)
    assert gone(runner)


def test_what_onnx_runtime_refuses_is_one_line_and_the_next_run_goes_on(cell):
    with Runner(cell) as runner:
        with pytest.raises(RunError) as refused:
            runner.run({name: array[:, :3] for name, array in feeds(cell).items()})
        assert str(refused.value).isprintable()
        assert runner.run(feeds(cell))


def test_a_graph_that_does_not_open_is_refused_and_the_helper_ends(tmp_path):
    unknown = helper.make_node("Nothing", ["x"], ["y"], domain="of.nobody")
    graph = model([unknown], [value("x", [1])], [value("y", [1])])
    graph.opset_import.append(helper.make_opsetid("of.nobody", 1))
    onnx.save(graph, tmp_path / "unknown.onnx")
    runner = Runner(read_foreign(tmp_path / "unknown.onnx"))
    with pytest.raises(RunError, match="Nothing"), runner:
        pass
    assert gone(runner)


def test_a_helper_that_dies_is_told_with_its_signal(cell):
    with Runner(cell) as runner:
        os.kill(runner._process._process.pid, signal.SIGSEGV)
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


def test_a_graph_that_does_not_end_is_ended(tmp_path):
    with Runner(looping(tmp_path, 2**40)) as runner:  # it opens however busy the machine is
        runner._seconds, runner._until = 2, time.monotonic() + 2
        with pytest.raises(EndedError, match="more than 2 s"):
            runner.run({"x": np.zeros((64, 64), np.float32)})
        with pytest.raises(EndedError, match="more than 2 s"):
            runner.run({"x": np.zeros((64, 64), np.float32)})
    assert gone(runner)


def test_a_graph_that_asks_for_more_memory_than_it_may_is_refused(tmp_path):
    nodes = [helper.make_node("Expand", ["x", "shape"], ["y"]), helper.make_node("ReduceSum", ["y"], ["z"])]
    shape = numpy_helper.from_array(np.array([2**32]), "shape")
    onnx.save(model(nodes, [value("x", [1])], [value("z", None)], [shape]), tmp_path / "large.onnx")
    with Runner(read_foreign(tmp_path / "large.onnx")) as runner, pytest.raises((RunError, EndedError)) as refused:
        runner.run({"x": np.zeros(1, np.float32)})
    assert str(refused.value).isprintable()
    assert gone(runner)
