"""The stand-in for a JetPack is at least as strict as one: operators, opsets, versions, devices and weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_graphs import INT32, model, product, value
from txl_engines.compiler import Compiler
from txl_runtime.device.engines.library import Library

from stand_ins import jetpack
from stand_ins.engine import open_fake_device


def library(monkeypatch: pytest.MonkeyPatch, version: str) -> Library:
    monkeypatch.setenv(jetpack.VERSION, version)
    return Library("tensorrt", jetpack.library())


def built(found: Library, graph: onnx.ModelProto) -> bytes:
    compiler = Compiler(found)
    return bytes(compiler.build(compiler.parse(graph.SerializeToString(), "small.onnx"), (), lambda: None))


def clipped() -> onnx.ModelProto:
    constants = [helper.make_tensor(name, INT32, [], [number]) for name, number in (("least", 0), ("most", 4))]
    node = helper.make_node("Clip", ["tokens", "least", "most"], ["ids"])
    return model([node], [value("tokens", [2], INT32)], [value("ids", [2], INT32)], constants)


@pytest.mark.parametrize("version", list(jetpack.DOCUMENTED))
def test_an_operator_that_a_version_lacks_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = clipped()
    graph.opset_import[0].version = min(18, jetpack.DOCUMENTED[version][0])
    with pytest.raises(TypeError, match=r"no such operators in tensorrt .*Clip \(T=int32\)"):
        built(library(monkeypatch, version), graph)


@pytest.mark.parametrize("version", list(jetpack.DOCUMENTED))
def test_an_opset_that_a_version_does_not_know_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, newest = product(), jetpack.DOCUMENTED[version][0]
    graph.opset_import[0].version = newest + 1
    with pytest.raises(TypeError, match=f"opset {newest + 1}, this version has {newest}"):
        built(library(monkeypatch, version), graph)


def test_an_engine_holds_its_weights_and_is_loaded_by_its_version_on_its_device_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    weights = np.arange(4, dtype=np.float32).reshape(2, 2)
    weights.tofile(tmp_path / "weights.bin")
    tensor = numpy_helper.from_array(weights, "b")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in (("location", "weights.bin"), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=text)
    node = helper.make_node("MatMul", ["a", "b"], ["c"])
    graph = model([node], [value("a", [2, 2])], [value("c", [2, 2])], [tensor])
    with monkeypatch.context() as there:
        there.chdir(tmp_path)
        data = built(library(monkeypatch, "trt10.0.1"), graph)
    assert weights.tobytes() in data

    def loaded(version: str, engine: bytes) -> Any:
        found = library(monkeypatch, version)
        with open_fake_device(jetpack.driver()).current():
            return found.module.Runtime(found.logger).deserialize_cuda_engine(engine)

    assert loaded("trt10.0.1", data).num_io_tensors == 2
    assert loaded("trt10.13.0.35", data) is None
    assert loaded("trt10.0.1", data.replace(b'"Orin"', b'"Thor"')) is None
    assert loaded("trt10.0.1", b"no engine") is None
