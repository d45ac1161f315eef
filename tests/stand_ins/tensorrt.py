"""Stand-ins for six versions of TensorRT: every class and enum of a version has the members of its list, no others.

They parse (with onnx), "build" (bytes that hold the graph's hash) and log as the real ones do. So the code that calls
them can be run for each version without a library or a GPU.
"""

from __future__ import annotations

import ast
import enum
import hashlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx

MEMBERS = Path(__file__).parents[1] / "fixtures" / "tensorrt_api"  # `support` needs PyTorch
VERSIONS = {
    "trt10.0.1": ("tensorrt", "10.0.1"),
    "trt10.13.0.35": ("tensorrt", "10.13.0.35"),
    "trt10.16.1.11": ("tensorrt", "10.16.1.11"),
    "trt11.0.0.114": ("tensorrt", "11.0.0.114"),
    "trt114a": ("tensorrt", "11.4.0.106"),
    "rtx171": ("tensorrt_rtx", "1.7.1.116"),
}
DTYPES = {1: "FLOAT", 10: "HALF", 16: "BF16", 6: "INT32", 7: "INT64", 9: "BOOL", 11: "FLOAT"}

LAYERS = {"TensorScatter": "KV_CACHE_UPDATE", "MatMul": "MATRIX_MULTIPLY"}
"""The layers that operators become, as far as tests look at them; others are SHUFFLE here."""


def read_members(name: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Classes and enums of a version, each with its members."""
    classes: dict[str, list[str]] = {}
    enums: dict[str, list[str]] = {}
    for line in Path(MEMBERS / f"{name}.members.txt").read_text().splitlines():
        kind, rest = line.split(" ", 1)
        title, members = rest.split(": ", 1)
        {"CLASS": classes, "ENUM": enums}[kind][title] = ast.literal_eval(members)
    return classes, enums


class _Severity(enum.IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


def fake(name: str, record: SimpleNamespace | None = None) -> Any:
    """A module with one version's members.

    `record` hears what is asked of it: flags, gpus, data, steps.
    """
    classes, enums = read_members(name)
    record = record if record is not None else SimpleNamespace()
    record.set, record.cleared, record.gpus = [], [], {}
    module_name, version = VERSIONS[name]
    trt = ModuleType(module_name)
    trt.__version__ = version
    for title, members in enums.items():
        setattr(trt, title, enum.IntEnum(title, members, start=0) if members else None)
    behaviour = _behaviour(trt, record)
    for title, members in classes.items():
        setattr(trt, title, _strict(title, members, behaviour.get(title, {})))
    return trt


def _strict(title: str, members: list[str], behaviour: dict[str, Any]) -> type:
    """A class that has its listed members and refuses all others, read or written."""
    listed = set(members)

    def refuse(self: Any, attribute: str) -> Any:
        if attribute in listed:
            raise NotImplementedError(f"{title}.{attribute} is listed, but the stand-in does not know what it does")
        raise AttributeError(f"{title} has no {attribute} in this version")

    def assign(self: Any, attribute: str, value: Any) -> None:
        if attribute not in listed and not attribute.startswith("_"):
            raise AttributeError(f"{title} has no {attribute} in this version")
        object.__setattr__(self, attribute, value)

    known = {key: value for key, value in behaviour.items() if key in listed or key.startswith("__")}
    return type(title, (), {"__getattr__": refuse, "__setattr__": assign, **known})


def _behaviour(trt: Any, record: SimpleNamespace) -> dict[str, dict[str, Any]]:
    def make(title: str, **values: Any) -> Any:
        made = getattr(trt, title)()
        for key, value in values.items():
            object.__setattr__(made, key, value)
        return made

    def tensor(value: Any) -> Any:
        kind = value.type.tensor_type
        dtype = getattr(trt.DataType, DTYPES[kind.elem_type])
        return make("ITensor", name=value.name, dtype=dtype, shape=tuple(d.dim_value for d in kind.shape.dim))

    def network(builder: Any, flags: int) -> Any:
        record.network_flags = flags
        return make("INetworkDefinition", num_layers=0, num_inputs=0, num_outputs=0)

    def parse(parser: Any, data: bytes, path: str | None = None) -> bool:
        record.data = data
        model = onnx.load_model_from_string(data)
        net = parser._network
        layers = network_layers(model)
        object.__setattr__(net, "num_layers", len(layers))
        object.__setattr__(net, "get_layer", lambda i: layers[i])
        for side, values in (("input", list(model.graph.input)), ("output", list(model.graph.output))):
            object.__setattr__(net, f"num_{side}s", len(values))
            object.__setattr__(net, f"get_{side}", lambda i, values=values: tensor(values[i]))
        return True

    def network_layers(model: onnx.ModelProto) -> list[Any]:
        """A constant for each initializer, and a layer for each node."""
        inferred = onnx.shape_inference.infer_shapes(model).graph
        kinds = {value.name: value.type.tensor_type.elem_type for value in (*inferred.value_info, *inferred.output)}

        def layer(kind: str, name: str, outputs: list[tuple[str, int]]) -> Any:
            types = [getattr(trt.DataType, DTYPES[dtype]) for _, dtype in outputs]
            tensors = [make("ITensor", name=said, dtype=dtype) for (said, _), dtype in zip(outputs, types, strict=True)]
            kind = getattr(trt.LayerType, kind if hasattr(trt.LayerType, kind) else "SHUFFLE")
            return make("ILayer", type=kind, name=name, num_outputs=len(outputs), get_output=lambda at: tensors[at])

        layers = [
            layer("CONSTANT", tensor.name, [(f"(Unnamed Layer* {index}) [Constant]_output", tensor.data_type)])
            for index, tensor in enumerate(model.graph.initializer)
        ]
        for node in model.graph.node:
            outputs = [(output, kinds[output]) for output in node.output if output]
            layers.append(layer(LAYERS.get(node.op_type, "SHUFFLE"), node.name or node.output[0], outputs))
        return layers

    def parser_init(parser: Any, net: Any, logger: Any) -> None:
        parser._network = net

    def builder_init(builder: Any, logger: Any) -> None:
        builder._logger = logger

    def build(builder: Any, net: Any, config: Any) -> bytes | None:
        record.verbosity = config.profiling_verbosity.name
        record.gpu_count = config.__dict__.get("num_compute_capabilities")
        monitor = config.__dict__.get("progress_monitor")
        if monitor is not None:
            monitor.phase_start("Building engine", None, 3)
            if not all(monitor.step_complete("Building engine", i) for i in range(3)):
                return None
            monitor.phase_finish("Building engine")
        builder._logger.log(_Severity.VERBOSE, "Layers:\nName: _gemm_mha_v2_myl0_6, LayerType: kgen, Inputs: []\n")
        return b"engine " + hashlib.sha256(record.data).digest()

    def runtime_init(runtime: Any, logger: Any) -> None:
        runtime._logger = logger

    def deserialize(runtime: Any, data: Any) -> Any:
        model = onnx.load_model_from_string(record.data)
        values = {value.name: value for value in (*model.graph.input, *model.graph.output)}
        inputs = {value.name for value in model.graph.input}
        names = sorted(values)  # in an order of the library's own
        inspector = make("EngineInspector", get_engine_information=lambda form: f"Layers:\n {form.name}")
        return make(
            "ICudaEngine",
            num_io_tensors=len(names),
            get_tensor_name=lambda i: names[i],
            get_tensor_mode=lambda name: trt.TensorIOMode.INPUT if name in inputs else trt.TensorIOMode.OUTPUT,
            get_tensor_dtype=lambda name: tensor(values[name]).dtype,
            get_tensor_shape=lambda name: tensor(values[name]).shape,
            create_engine_inspector=lambda: inspector,
        )

    def set_gpu(config: Any, gpu: Any, index: int) -> bool:
        record.gpus[index] = gpu.name
        return True

    return {
        "Builder": {
            "__init__": builder_init,
            "create_network": network,
            "create_builder_config": lambda builder: make("IBuilderConfig"),
            "build_serialized_network": build,
        },
        "OnnxParser": {"__init__": parser_init, "parse": parse, "num_errors": 0},
        "IBuilderConfig": {
            "set_flag": lambda config, flag: record.set.append(flag.name),
            "clear_flag": lambda config, flag: record.cleared.append(flag.name),
            "set_compute_capability": set_gpu,
        },
        "Runtime": {
            "__init__": runtime_init,
            "engine_header_size": 64,
            "get_engine_validity": lambda runtime, data: (trt.EngineValidity.VALID, 0),
            "deserialize_cuda_engine": deserialize,
        },
        "ILogger": {"log": lambda logger, severity, message: None},
        "IProgressMonitor": {},
    }
