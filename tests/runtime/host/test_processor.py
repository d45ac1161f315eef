"""Exact sums of int8 products are asked for wherever the processor may not give them by itself."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import txl_runtime
from frozen import frozen
from onnx import TensorProto, helper, numpy_helper
from txl_runtime.host import onnxruntime_cpu
from txl_runtime.host.processor import sums_exactly

LINE = "model name\t: avx512_vnni\nflags\t\t: fpu avx2 {}\nbugs\t\t:\n"


@pytest.mark.parametrize(
    ("flag", "exact"), [("avx512_vnni", True), ("avx512f", False), ("avx_vnni", False), ("not_avx512_vnni", False)]
)
def test_vnni_is_read_from_the_flags_alone(flag, exact, tmp_path):
    (tmp_path / "cpuinfo").write_text(LINE.format(flag))
    assert sums_exactly(tmp_path / "cpuinfo") is exact


def test_an_unknown_processor_is_asked_for_exact_sums(tmp_path):
    assert not sums_exactly(tmp_path / "cpuinfo")


@pytest.mark.parametrize(("exact", "asked"), [(False, "1"), (True, "0")])
def test_every_session_is_asked_for_what_the_processor_lacks(exact, asked, monkeypatch):
    entries, options = [], onnxruntime.SessionOptions

    class Options(options):
        def add_session_config_entry(self, name, value):
            entries.append((name, value))
            super().add_session_config_entry(name, value)

    monkeypatch.setattr(onnxruntime, "SessionOptions", Options)
    monkeypatch.setattr(onnxruntime_cpu, "sums_exactly", lambda: exact)
    txl_runtime.load(frozen("ring"), "cpu", 1)
    found = [value for name, value in entries if name == "session.x64quantprecision"]
    assert found
    assert set(found) == {asked}


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_the_largest_products_are_summed_exactly_on_this_machine(rows):
    weights = np.full((512, 48), 127, np.int8)
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "one product",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, ["rows", 512])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, ["rows", 48])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "0" if sums_exactly() else "1")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.full((rows, 512), 255, np.uint8)})
    assert (found == 512 * 255 * 127).all()
