"""Interpret a bundle's composed ONNX graphs with PyTorch, as an engine for `gpu_exercise`.

The engine reads and writes tensors at the loop's addresses, on the loop's own queue. It is slow and allocates memory
freely, but needs only PyTorch. So the device loop (copies, records, two sides of a memory, spills) can be tested on
GPUs on which neither TensorRT nor ONNX Runtime's CUDA provider runs.

The loop can record the engine's work into a CUDA graph, by calls of the driver that PyTorch does not know of. Four
things make that possible. The host reads no values. Constants are on the device beforehand. PyTorch puts its work into
the loop's stream. And each launch, which ties a program to addresses, has a pool of memory of its own for intermediate
results. The first step, which is not recorded, fills the pool. The recorded step takes the same blocks again, and
nothing else gets these blocks as long as the record lives.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import torch
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper
from torch import Tensor
from torch_engine_operators import OPERATORS, STATIC, TYPES, Node
from txl_engines.composing import compose, whole_programs
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Program, TensorSpec, tensor_bytes
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.device.cuda import Device, Queue
from txl_runtime.device.dtypes import stored_type
from txl_runtime.device.interface import Executable, Launch
from txl_runtime.errors import BackendError, UsageError

__all__ = ["CudaPlace", "HostPlace", "Interpreter", "Place", "TorchExecutable", "open_torch"]

SMALL = 4096
"""A constant of more values than this counts as a weight, from which nothing is computed when a program is opened."""


class Interpreter:
    """An ONNX graph that PyTorch runs node by node.

    Args:
        graph: the bytes of an ONNX file.
        folder: the folder with the graph's weights.
        device: "cuda:0" or "cpu".
        in_place: the outputs that are written into an input's memory: the output's name, and the input's.
        weights: tensors by name that graphs of the same folder share; the graph's own are added.

    Raises:
        UsageError: the graph has an operator, or a use of an operator, that is not interpreted.
    """

    def __init__(
        self, graph: bytes, folder: Path, device: str, in_place: Mapping[str, str], weights: dict[str, Tensor]
    ) -> None:
        model: ModelProto = onnx.load_model_from_string(graph)
        self._device, self._folder = torch.device(device), folder
        self._constants: dict[str, Tensor] = {}
        self._host: dict[str, Tensor] = {}
        for tensor in model.graph.initializer:
            self._hold(tensor, weights)
        self._steps: list[tuple[Node, Callable[..., Any], list[str], list[str]]] = []
        for node in model.graph.node:
            self._add(node)
        self._check_in_place(model, in_place)
        self._last = self._last_uses({output.name for output in model.graph.output})
        self._outputs = [output.name for output in model.graph.output]

    def __call__(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the graph on inputs by name, and return the outputs by name; an output in place is the input's tensor."""
        results = {**self._constants, **values}
        with torch.inference_mode():
            for index, (node, function, inputs, outputs) in enumerate(self._steps):
                given = [results[name] if name else None for name in inputs]
                result = function(node, *given)
                parts = (result,) if isinstance(result, Tensor) else tuple(result)
                results.update(zip(outputs, parts, strict=True))
                for name in self._last.get(index, ()):
                    del results[name]
        return {name: results[name] for name in self._outputs}

    def _hold(self, tensor: TensorProto, weights: dict[str, Tensor]) -> None:
        if tensor.external_data and tensor.name in weights:
            self._constants[tensor.name] = weights[tensor.name]
            return
        held = _tensor_of(tensor, self._folder)
        self._constants[tensor.name] = held.to(self._device)
        if tensor.external_data:
            weights[tensor.name] = self._constants[tensor.name]
        elif held.numel() <= SMALL:
            self._host[tensor.name] = held

    def _add(self, proto: NodeProto) -> None:
        """Add a node to the steps of the interpretation; a node of small constants is computed at once instead."""
        node = self._read(proto)
        inputs, outputs = list(proto.input), list(proto.output)
        function = OPERATORS[node.operator]
        if inputs and all(name in self._host for name in inputs if name):
            result = function(node, *(self._host[name] if name else None for name in inputs))
            for name, part in zip(outputs, (result,) if isinstance(result, Tensor) else result, strict=True):
                self._host[name], self._constants[name] = part, part.to(self._device)
        else:
            self._steps.append((node, function, inputs, outputs))

    def _read(self, proto: NodeProto) -> Node:
        name = proto.name or (proto.output[0] if proto.output else "(unnamed)")
        if proto.op_type not in OPERATORS or proto.domain not in ("", "ai.onnx"):
            raise UsageError(
                f"operator {proto.op_type} of node {name} is not interpreted, expected one of {', '.join(OPERATORS)}; "
                "add it to benchmarks/gpu/torch_engine_operators.py"
            )
        static = {}
        for place in STATIC.get(proto.op_type, ()):
            if place < len(proto.input) and (source := proto.input[place]):
                if source not in self._host:
                    raise UsageError(
                        f"{proto.op_type} {name} computes {source}, expected a constant: its values would be needed on "
                        "the host while work is recorded"
                    )
                static[place] = tuple(int(value) for value in self._host[source].flatten().tolist())
        attributes = {item.name: onnx.helper.get_attribute_value(item) for item in proto.attribute}
        return Node(proto.op_type, name, attributes, static, len(proto.output), proto.op_type == "TensorScatter")

    def _check_in_place(self, model: ModelProto, in_place: Mapping[str, str]) -> None:
        """Check that each output in place is a TensorScatter of its input, which no other node reads, and vice versa.

        Raises:
            UsageError: an output in place is computed differently, or a TensorScatter is not in place.
        """
        reads: dict[str, int] = {}
        for node in model.graph.node:
            for name in node.input:
                reads[name] = reads.get(name, 0) + 1
        scattered = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "TensorScatter"}
        wrong = {output for output in in_place if scattered.get(output) != in_place[output]}
        wrong |= {output for output, held in scattered.items() if in_place.get(output) != held or reads[held] != 1}
        if wrong:
            raise UsageError(
                f"{', '.join(sorted(wrong))}: expected the result of a TensorScatter whose input nobody else reads, in "
                "the memory of that input"
            )

    def _last_uses(self, kept: set[str]) -> dict[int, list[str]]:
        """Return for each step the values that no later step reads, so that their memory can be freed after it."""
        last: dict[str, int] = {}
        for index, (*_, inputs, outputs) in enumerate(self._steps):
            last |= dict.fromkeys([name for name in (*inputs, *outputs) if name], index)
        results: dict[int, list[str]] = {}
        for name, index in last.items():
            if name not in kept:
                results.setdefault(index, []).append(name)
        return results


def _tensor_of(tensor: TensorProto, folder: Path) -> Tensor:
    if tensor.data_type not in TYPES:
        raise UsageError(f"{tensor.name} is of ONNX's type {tensor.data_type}, expected one of {sorted(TYPES)}")
    array = numpy_helper.to_array(tensor, base_dir=str(folder))
    if tensor.data_type == TensorProto.BFLOAT16:
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


class Place(Protocol):
    """The memory in which PyTorch computes: a GPU's or the host's.

    Attributes:
        device: PyTorch's name of the device, e.g. "cuda:0".
    """

    device: str

    def tie(
        self,
        interpreter: Interpreter,
        program: Program,
        addresses: Mapping[str, int],
        in_place: Mapping[str, str],
        queue: Any,
    ) -> Launch:
        """Return a launch that runs the interpreter on the tensors at these addresses.

        Args:
            interpreter: the program's graph.
            program: the names, types and shapes of the tensors.
            addresses: the address of each input and output.
            in_place: the outputs that are written into an input's memory.
            queue: the queue of the loop.
        """


class HostPlace(Place):
    """The memory of the host, where a launch does its work at once."""

    device = "cpu"

    def tie(
        self,
        interpreter: Interpreter,
        program: Program,
        addresses: Mapping[str, int],
        in_place: Mapping[str, str],
        queue: Any,
    ) -> Launch:
        """Return a launch on host memory; see `Place.tie`."""
        return _work(interpreter, program, addresses, in_place, _on_host)


class CudaPlace(Place):
    """The memory of a GPU.

    Args:
        ordinal: the number of the GPU.
    """

    def __init__(self, ordinal: int = 0) -> None:
        self.device = f"cuda:{ordinal}"
        torch.backends.cuda.matmul.allow_tf32 = False

    def tie(
        self,
        interpreter: Interpreter,
        program: Program,
        addresses: Mapping[str, int],
        in_place: Mapping[str, str],
        queue: Queue,
    ) -> Launch:
        """Return a launch on the queue's stream; see `Place.tie`. The launch keeps its pool of memory alive."""
        stream: Any = torch.cuda.ExternalStream(queue.handle, device=self.device)  # type: ignore[no-untyped-call]
        # a first product now: cuBLAS allocates its working memory for the stream outside every pool
        with torch.cuda.stream(stream):
            small = torch.ones(8, 8, device=self.device)
            small @ small
        stream.synchronize()
        pool = torch.cuda.MemPool()
        work = _work(interpreter, program, addresses, in_place, self._tensor)

        def launch() -> None:
            with self._inside(stream, pool):
                work()

        return launch

    @staticmethod
    @contextlib.contextmanager
    def _inside(stream: Any, pool: Any) -> Iterator[None]:
        using: AbstractContextManager[Any] = torch.cuda.use_mem_pool(pool)
        with torch.cuda.stream(stream), using:
            yield

    def _tensor(self, address: int, spec: TensorSpec) -> Tensor:
        return _typed(torch.as_tensor(_Raw(address, spec), device=self.device), spec)


class _Raw:
    """A tensor in device memory, in the form of CUDA's array interface; bfloat16 is declared as 16-bit integers."""

    def __init__(self, address: int, spec: TensorSpec) -> None:
        kind = np.dtype("<i2") if spec.dtype == "bfloat16" else stored_type(spec.dtype)
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": spec.fixed,
            "typestr": kind.str,
            "strides": None,
            "version": 2,
        }


def _on_host(address: int, spec: TensorSpec) -> Tensor:
    raw = (ctypes.c_uint8 * tensor_bytes(spec)).from_address(address)
    return view_of(np.ctypeslib.as_array(raw), spec)


def view_of(data: Any, spec: TensorSpec) -> Tensor:
    """Return a tensor that shares the memory of host bytes, e.g. float32 [2, 3] of 24 bytes."""
    kind = np.dtype("<i2") if spec.dtype == "bfloat16" else stored_type(spec.dtype)
    return _typed(torch.from_numpy(data.view(kind).reshape(spec.fixed)), spec)


def _typed(tensor: Tensor, spec: TensorSpec) -> Tensor:
    return tensor.view(torch.bfloat16) if spec.dtype == "bfloat16" else tensor


def _work(
    interpreter: Interpreter,
    program: Program,
    addresses: Mapping[str, int],
    in_place: Mapping[str, str],
    tensor: Callable[[int, TensorSpec], Tensor],
) -> Launch:
    """Return a launch that runs the interpreter on tensors at addresses, and writes the results to their addresses.

    `tensor` makes a tensor of an address and its type and shape.
    """
    inputs = {spec.name: tensor(addresses[spec.name], spec) for spec in program.inputs}
    outputs = {spec.name: tensor(addresses[spec.name], spec) for spec in program.outputs if spec.name not in in_place}

    def work() -> None:
        results = interpreter(inputs)
        with torch.inference_mode():
            for name, to in outputs.items():
                to.copy_(results[name])

    return work


class TorchExecutable(Executable):
    """A program that PyTorch interprets, in the form of `device.interface.Executable`."""

    recordable = True

    def __init__(
        self, bundle: Bundle, program: Program, place: Place, weights: dict[str, Tensor], graph: bytes | None = None
    ) -> None:
        states = bundle.manifest.states_of(program.update)
        self.in_place: Mapping[str, str] = (
            {state.output: state.input for state in states} if program.update == "ring" else {}
        )
        self.program, self._place = program, place
        composed = compose(bundle, program) if graph is None else graph
        self._interpreter = Interpreter(composed, bundle.path, place.device, self.in_place, weights)

    def prepare(self, addresses: Mapping[str, int], queue: Any) -> Launch:
        """Bind the program to addresses, and return its launch; see `device.interface.Executable`."""
        launch = self._place.tie(self._interpreter, self.program, addresses, self.in_place, queue)
        name = self.program.name

        def run() -> None:
            try:
                launch()
            except RuntimeError as error:  # PyTorch raises this for errors of CUDA too
                raise BackendError(f"program {name} failed in PyTorch: {' '.join(str(error).split())[:300]}") from None

        return run


def open_torch(
    bundle: Bundle, device: Device, place: Place, update: str | None = None, kinds: Sequence[str] = ()
) -> DeviceBackend:
    """Open a bundle's whole programs, of the named kinds or of all, on a backend that interprets them with PyTorch.

    Raises:
        UsageError: a program has an operator that is not interpreted.
    """
    weights: dict[str, Tensor] = {}
    programs = whole_programs(bundle.manifest, update or bundle.manifest.updates[0])
    wanted = [program for program in programs if not kinds or program.kind in kinds]
    executables = [TorchExecutable(bundle, program, place, weights) for program in wanted]
    description = f"PyTorch {torch.__version__} on {device.title}"
    return DeviceBackend("cuda", description, device, device.queue(), executables)
