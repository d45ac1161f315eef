"""A Jetson as far as Python sees it: JetPack's TensorRT among the system's packages, and the driver's library.

`place` puts both into a folder of packages. What then runs needs no PyTorch and is the project as it was installed: a
process that builds an engine, and one that loads it. An engine holds its graph and weights, and runs with ONNX Runtime,
which the project itself cannot import there. It is refused by another version, and on another GPU. The library takes
operators only where the version's documentation has them, and opsets only up to the version's newest. What a GPU would
have done wrong in silence ends the process with `WRONG`.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import onnx
import onnxruntime
from onnx import TensorProto
from txl_runtime.bundle.tables import Program, TensorSpec
from txl_runtime.system import CUDA_DRIVER

from stand_ins.cuda import Engine, run_graphs
from stand_ins.driver import FakeDriver
from stand_ins.engine import GraphRun
from stand_ins.operators import kernels, lacking
from stand_ins.tensorrt import VERSIONS, fake

VERSION = "TXL_STAND_IN_TENSORRT"
"""The environment variable that chooses a version of `VERSIONS`."""
DOCUMENTED = {
    "trt10.0.1": (20, "tensorrt 10.1"),
    "trt10.13.0.35": (24, "tensorrt 10.1"),
}
"""The newest opset of a version, and the column of operators that is at most as new."""
WRONG = 99
MAGIC = b"an engine of a stand-in\n"
CAPABILITY = {75: 8, 76: 7}
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of an Orin."""
TYPES = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
    TensorProto.INT32: "int32",
    TensorProto.BOOL: "bool",
}
STARTED = """
import ctypes, sys

def stand_in():
    before = list(sys.path)
    sys.path += {places!r}
    try:
        import stand_ins.jetpack as found
    finally:
        sys.path[:] = before
    sys.modules.pop("onnxruntime", None)  # so that nothing of the project comes by it
    return found

class CDLL(ctypes.CDLL):
    def __new__(cls, name=None, *rest, **options):
        return stand_in().driver() if name == {library!r} else super().__new__(cls)

ctypes.CDLL = CDLL
"""
IMPORTED = """
import sys
from _jetpack import stand_in
found = stand_in().library()
found.__spec__, found.__file__ = __spec__, __file__
sys.modules[__name__] = found
"""


def place(folder: Path, engine: Path) -> None:
    """Put TensorRT and the driver's library into a folder of Python packages; `engine` is one that has ONNX Runtime."""
    (folder / "tensorrt").mkdir(parents=True)
    (folder / "tensorrt" / "__init__.py").write_text(IMPORTED)
    places = [str(Path(__file__).parents[1]), str(engine)]
    (folder / "_jetpack.py").write_text(STARTED.format(places=places, library=CUDA_DRIVER))
    (folder / "_jetpack.pth").write_text("import _jetpack\n")


class Orin(FakeDriver):
    """The driver of a Jetson Orin."""

    def cuDeviceGetName(self, name: Any, length: int, device: int) -> None:
        self._device(device)
        name.value = b"Orin"[: length - 1]

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> None:
        super().cuDeviceGetAttribute(value, attribute, device)
        value._obj.value = CAPABILITY.get(attribute, value._obj.value)


@functools.cache
def driver() -> FakeDriver:
    """The driver of this process; what was done wrong is told at its end."""
    made = Orin()

    def tell() -> None:
        if made.violations:
            print(*made.violations, sep="\n", file=sys.stderr, flush=True)
            os._exit(WRONG)

    atexit.register(tell)
    return made


def library() -> Any:
    """TensorRT in the version that the environment names: it builds engines, and runs them."""
    name = os.environ[VERSION]
    (opset, column), record = DOCUMENTED[name], SimpleNamespace()
    trt = fake(name, record)
    head = MAGIC + msgspec.json.encode([VERSIONS[name][1], "Orin"]) + b"\n"
    parse, build, load = trt.OnnxParser.parse, trt.Builder.build_serialized_network, trt.Runtime.deserialize_cuda_engine

    def strict_parse(parser: Any, data: bytes, path: str | None = None) -> bool:
        model = onnx.load_model_from_string(data)
        (asked,) = (entry.version for entry in model.opset_import if not entry.domain)
        if asked > opset:
            raise TypeError(f"opset {asked}, this version has {opset}")
        if missing := lacking(kernels(model), column):
            raise TypeError(f"no such operators in {column}: {missing}")
        return bool(parse(parser, data, path))

    def whole_engine(builder: Any, net: Any, config: Any) -> bytes | None:
        if build(builder, net, config) is None:
            return None
        model = onnx.load_model_from_string(record.data)
        for tensor in model.graph.initializer:
            _take_in(tensor)
        return head + bytes(model.SerializeToString())

    def find(data: bytes) -> Engine | None:
        if not data.startswith(head):
            return None
        model = onnx.load_model_from_string(data.removeprefix(head))
        inputs = {value.name for value in model.graph.input}
        scatters = [node for node in model.graph.node if node.op_type == "TensorScatter"]
        return EngineRun(model), {node.output[0]: node.input[0] for node in scatters if node.input[0] in inputs}

    trt.OnnxParser.parse, trt.Builder.build_serialized_network = strict_parse, whole_engine
    run_graphs(trt, find, driver())
    run = trt.Runtime.deserialize_cuda_engine
    trt.Runtime.deserialize_cuda_engine = lambda *given: (load if hasattr(record, "data") else run)(*given)
    return trt


def _take_in(tensor: TensorProto) -> None:
    """Weights that lie in a file beside the working folder's, as the library reads them."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return
    place = {entry.key: entry.value for entry in tensor.external_data}
    with Path(place["location"]).open("rb") as file:
        file.seek(int(place.get("offset", 0)))
        tensor.raw_data = file.read(int(place["length"]))
    del tensor.external_data[:]
    tensor.data_location = TensorProto.DEFAULT


class EngineRun(GraphRun):
    """An engine that was read from its file: the graph alone, without the bundle."""

    def __init__(self, model: onnx.ModelProto) -> None:
        given, returned = (tuple(map(_spec, side)) for side in (model.graph.input, model.graph.output))
        self.program = Program(
            name=model.graph.name, kind="logprobs", segment_length=1, update="rolled", file="", inputs=given,
            outputs=returned,
        )  # fmt: skip
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    kind = value.type.tensor_type
    shape = tuple(size.dim_value for size in kind.shape.dim)
    return TensorSpec(name=value.name, dtype=TYPES[kind.elem_type], shape=shape)
