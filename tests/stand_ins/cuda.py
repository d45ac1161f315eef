"""NVIDIA's bindings and libraries, as far as the loop uses them, over plain memory: their names, signatures and habits.

`FakeCuda` is the module `cuda.bindings.runtime`: functions return a tuple that starts with a status. `run_engines`
gives a stand-in for TensorRT (`stand_ins.tensorrt`) engines that run: each is a bundle's program, by ONNX Runtime
at the addresses.
"""

from __future__ import annotations

import ctypes
import enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
from txl_engines.composing import compose
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.tables import Program
from txl_runtime.device.interface import ALIGNMENT
from txl_runtime.device.onnxruntime_cuda import OrtSessions


class Status(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorStreamCaptureUnsupported = 900


class _Handle:
    """What the bindings give for streams, events and graphs: something with a number."""

    count = 16

    def __init__(self) -> None:
        _Handle.count += 1
        self.number = _Handle.count
        self.work: list[Any] = []

    def __int__(self) -> int:
        return self.number


class FakeCuda:
    """The module. Work is done at once, unless a stream records it.

    Attributes:
        calls: names of everything called.
        held: allocations and handles that were not given back.
        full: whether memory is out.
    """

    cudaStreamNonBlocking, cudaEventDisableTiming, cudaHostAllocDefault = 1, 2, 0
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeRelaxed=2)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.held: dict[int, Any] = {}
        self.recording: dict[int, list[Any]] = {}
        self.full = self.unrecordable = False

    def _put(self, stream: Any, work: Any) -> tuple[Status]:
        if int(stream) in self.recording:
            self.recording[int(stream)].append(work)
        else:
            work()
        return (Status.cudaSuccess,)

    def _allocate(self, size: int) -> tuple[Status, int]:
        if self.full:
            return Status.cudaErrorMemoryAllocation, 0
        raw = np.full(size + ALIGNMENT, 0xA5, np.uint8)  # what was there before is not zero
        address = raw.ctypes.data + -raw.ctypes.data % ALIGNMENT
        self.held[address] = raw
        return Status.cudaSuccess, address

    def _release(self, key: Any) -> tuple[Status]:
        del self.held[int(key)]
        return (Status.cudaSuccess,)

    def _handle(self) -> tuple[Status, _Handle]:
        handle = _Handle()
        self.held[int(handle)] = handle
        return Status.cudaSuccess, handle

    def cudaGetErrorString(self, error: Status) -> tuple[Status, bytes]:
        return Status.cudaSuccess, {2: b"out of memory", 900: b"operation not permitted when stream is capturing"}[
            error
        ]

    def cudaGetLastError(self) -> tuple[Status]:
        return (Status.cudaSuccess,)

    def cudaGetDeviceCount(self) -> tuple[Status, int]:
        return Status.cudaSuccess, 1

    def cudaSetDevice(self, device: int) -> tuple[Status]:
        return (Status.cudaSuccess,)

    def cudaGetDeviceProperties(self, device: int) -> tuple[Status, Any]:
        return Status.cudaSuccess, SimpleNamespace(name=b"Fake RTX", major=8, minor=6)

    def cudaMalloc(self, size: int) -> tuple[Status, int]:
        return self._allocate(size)

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[Status, int]:
        return self._allocate(size)

    def cudaFree(self, address: int) -> tuple[Status]:
        return self._release(address)

    def cudaFreeHost(self, address: int) -> tuple[Status]:
        return self._release(address)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Status, _Handle]:
        return self._handle()

    def cudaStreamDestroy(self, stream: Any) -> tuple[Status]:
        return self._release(stream)

    def cudaStreamSynchronize(self, stream: Any) -> tuple[Status]:
        assert int(stream) not in self.recording, "waited for what is being recorded"
        return (Status.cudaSuccess,)

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Status, _Handle]:
        return self._handle()

    def cudaEventDestroy(self, event: Any) -> tuple[Status]:
        return self._release(event)

    def cudaEventRecord(self, event: Any, stream: Any) -> tuple[Status]:
        return (Status.cudaSuccess,)

    def cudaEventSynchronize(self, event: Any) -> tuple[Status]:
        return (Status.cudaSuccess,)

    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: Any, stream: Any) -> tuple[Status]:
        self.calls.append("cudaMemcpyAsync")
        return self._put(stream, lambda: ctypes.memmove(dst, src, count))

    def cudaMemcpy2DAsync(
        self, dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: Any, stream: Any
    ) -> tuple[Status]:
        assert width <= min(dpitch, spitch), "cudaErrorInvalidPitchValue"
        self.calls.append("cudaMemcpy2DAsync")

        def work() -> None:
            for row in range(height):
                ctypes.memmove(dst + row * dpitch, src + row * spitch, width)

        return self._put(stream, work)

    def cudaMemset2DAsync(
        self, address: int, pitch: int, value: int, width: int, height: int, stream: Any
    ) -> tuple[Status]:
        assert width <= pitch, "cudaErrorInvalidPitchValue"

        def work() -> None:
            for row in range(height):
                ctypes.memset(address + row * pitch, value, width)

        return self._put(stream, work)

    def cudaStreamBeginCapture(self, stream: Any, mode: Any) -> tuple[Status]:
        self.recording[int(stream)] = []
        return (Status.cudaSuccess,)

    def cudaStreamEndCapture(self, stream: Any) -> tuple[Status, Any]:
        graph = self._handle()[1]
        graph.work = self.recording.pop(int(stream))
        if self.unrecordable:
            return Status.cudaErrorStreamCaptureUnsupported, None
        return Status.cudaSuccess, graph

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[Status, Any]:
        replay = self._handle()[1]
        replay.work = graph.work
        return Status.cudaSuccess, replay

    def cudaGraphDestroy(self, graph: Any) -> tuple[Status]:
        return self._release(graph)

    def cudaGraphExecDestroy(self, graph: Any) -> tuple[Status]:
        return self._release(graph)

    def cudaGraphLaunch(self, graph: Any, stream: Any) -> tuple[Status]:
        self.calls.append("cudaGraphLaunch")
        for work in graph.work:
            work()
        return (Status.cudaSuccess,)


def run_engines(trt: Any, bundle: Bundle, programs: dict[str, Program], cuda: FakeCuda) -> SimpleNamespace:
    """Teach a stand-in for TensorRT to run engines.

    Args:
        trt: from `stand_ins.tensorrt.fake`.
        bundle: whose graphs the engines are made of.
        programs: by the SHA-256 of the engine's bytes.
        cuda: on whose streams they run.

    Returns:
        What was seen: contexts, strategies, caches given.
    """
    import hashlib

    seen = SimpleNamespace(contexts=0, strategies=[], caches=[], invalid=[])
    sessions = OrtSessions(onnxruntime, bundle, ["CPUExecutionProvider"], "cpu")
    kinds = {"int32": "INT32", "float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "bool": "BOOL"}

    def teach(title: str, **members: Any) -> None:
        for name, member in members.items():
            setattr(getattr(trt, title), name, member)

    def make(title: str, **values: Any) -> Any:
        made = getattr(trt, title)()
        for key, value in values.items():
            object.__setattr__(made, key, value)
        return made

    def deserialize(runtime: Any, data: Any) -> Any:
        program = programs.get(hashlib.sha256(bytes(data)).hexdigest())
        if program is None:
            runtime._logger.log(1, "Serialization assertion failed")
            return None
        executable = sessions.executable(program, compose(bundle, program))
        specs = {spec.name: spec for spec in (*program.outputs, *program.inputs)}
        inputs = {spec.name for spec in program.inputs}
        names = sorted(specs)

        def context(*given: Any) -> Any:
            seen.contexts += 1
            addresses: dict[str, int] = {}
            launch: list[Any] = []

            def execute(handle: int) -> bool:
                if not launch:
                    launch.append(executable.prepare(addresses, None))
                cuda._put(handle, launch[0])
                return True

            def set_address(name: str, address: int) -> bool:
                addresses[name] = address
                return name in specs

            return make("IExecutionContext", set_tensor_address=set_address, execute_async_v3=execute)

        def runtime_config() -> Any:
            cache = make(
                "IRuntimeCache",
                serialize=lambda: b"kernels of " + program.name.encode() + b"!" * seen.contexts,
                deserialize=lambda blob: seen.caches.append(blob) or True,
            )
            return make(
                "IRuntimeConfig", create_runtime_cache=lambda: cache, set_runtime_cache=lambda given: given is cache
            )

        return make(
            "ICudaEngine",
            num_io_tensors=len(names),
            get_tensor_name=lambda i: names[i],
            get_tensor_mode=lambda name: trt.TensorIOMode.INPUT if name in inputs else trt.TensorIOMode.OUTPUT,
            get_tensor_dtype=lambda name: getattr(trt.DataType, kinds[specs[name].dtype]),
            get_tensor_shape=lambda name: specs[name].fixed,
            create_execution_context=context,
            **({"create_runtime_config": runtime_config} if trt.__name__ == "tensorrt_rtx" else {}),
            **({"get_aliased_input_tensor": executable.in_place.get} if hasattr_listed(trt) else {}),
        )

    teach("Runtime", deserialize_cuda_engine=deserialize)
    return seen


def hasattr_listed(trt: Any) -> bool:
    """Whether this version has aliased tensors: its class refuses what is not listed."""
    try:
        trt.ICudaEngine().get_aliased_input_tensor  # noqa: B018
    except NotImplementedError:
        return True
    except AttributeError:
        return False
    return True
