"""The device interface on CUDA, by NVIDIA's own bindings of its runtime (cuda-bindings, a part of cuda-python).

Those carry the runtime with them and need nothing but the driver. Nothing is imported before `open_cuda` is called.
"""

from __future__ import annotations

import importlib
import weakref
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from txl_runtime.device.interface import Block, Device, Event, Launch, Queue
from txl_runtime.errors import BackendError

MODULE = "cuda.bindings.runtime"
DLPACK_CUDA = 2
ADVICE = {
    2: "the device's memory is full: close what else uses it, or export smaller B, M or L",
    35: "the driver is missing or too old for this CUDA: update it, or pip install 'cuda-bindings==12.*'",
    100: "expected an NVIDIA GPU: use --backend cpu",
    700: "a kernel read or wrote where it must not: open the model again, and report it with the bundle's manifest",
    900: "this work cannot be recorded",
}
UNKNOWN = "expected success; open the model again"


class _Runtime:
    """The runtime's functions, with failures as errors: each returns a tuple that starts with a status."""

    def __init__(self, module: Any) -> None:
        self.names = module

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call a function; what it returns beside the status.

        Raises:
            BackendError: the status is not success.
        """
        status, *results = getattr(self.names, name)(*arguments)
        if int(status) != 0:
            _, said = self.names.cudaGetErrorString(status)
            code = int(status)
            raise BackendError(f"{name} failed: {_text(said)} (cudaError {code}); {ADVICE.get(code, UNKNOWN)}")
        return results[0] if results else None

    def quietly(self, name: str, *arguments: Any) -> None:
        """Call a function that gives something back, where nobody is left to hear of a failure."""
        getattr(self.names, name)(*arguments)


def _text(said: bytes | str) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else str(said)


class CudaBlock(Block):
    """Zeroed memory of the device, given back with the object. See `interface.Block`."""

    def __init__(self, runtime: _Runtime, size: int, queue: CudaQueue) -> None:
        size = max(size, 1)
        self.address = int(runtime("cudaMalloc", size))
        weakref.finalize(self, runtime.quietly, "cudaFree", self.address)
        # Waiting for this queue alone: to wait for the device would break what another thread is recording.
        queue.zero(self.address, size)
        queue.wait()


class CudaEvent(Event):
    """See `interface.Event`."""

    def __init__(self, runtime: _Runtime, queue: Any) -> None:
        self._runtime = runtime
        self._event = runtime("cudaEventCreateWithFlags", runtime.names.cudaEventDisableTiming)
        runtime("cudaEventRecord", self._event, queue)

    def wait(self) -> None:
        self._runtime("cudaEventSynchronize", self._event)

    def __del__(self) -> None:  # one per step: a finalizer would take longer than the event
        if hasattr(self, "_event"):
            self._runtime.quietly("cudaEventDestroy", self._event)


class CudaQueue(Queue):
    """A CUDA stream. See `interface.Queue`."""

    def __init__(self, runtime: _Runtime) -> None:
        self._runtime = runtime
        self._stream = runtime("cudaStreamCreateWithFlags", runtime.names.cudaStreamNonBlocking)
        weakref.finalize(self, runtime.quietly, "cudaStreamDestroy", self._stream)
        self.handle = int(self._stream)
        self._any = runtime.names.cudaMemcpyKind.cudaMemcpyDefault  # by the addresses

    def copy(self, to: int, source: int, width: int, rows: int = 1, to_pitch: int = 0, source_pitch: int = 0) -> None:
        if width <= 0 or rows <= 0:
            return
        if rows == 1:
            self._runtime("cudaMemcpyAsync", to, source, width, self._any, self._stream)
        else:
            self._runtime("cudaMemcpy2DAsync", to, to_pitch, source, source_pitch, width, rows, self._any, self._stream)

    def zero(self, to: int, width: int, rows: int = 1, pitch: int = 0) -> None:
        if width > 0 and rows > 0:
            self._runtime("cudaMemset2DAsync", to, pitch or width, 0, width, rows, self._stream)

    def record(self) -> CudaEvent:
        return CudaEvent(self._runtime, self._stream)

    def wait(self) -> None:
        self._runtime("cudaStreamSynchronize", self._stream)

    def capture(self, work: Launch) -> Launch:
        runtime, modes = self._runtime, self._runtime.names.cudaStreamCaptureMode
        # Relaxed: memory that is given back meanwhile, in this thread or another, must not spoil the record.
        runtime("cudaStreamBeginCapture", self._stream, modes.cudaStreamCaptureModeRelaxed)
        try:
            work()
        except BackendError:
            runtime.quietly("cudaStreamEndCapture", self._stream)
            runtime.quietly("cudaGetLastError")
            raise
        graph = runtime("cudaStreamEndCapture", self._stream)
        try:
            replay = runtime("cudaGraphInstantiate", graph, 0)
        finally:
            runtime.quietly("cudaGraphDestroy", graph)
        return _Replay(runtime, replay, self._stream, work)


class _Replay:
    """A recorded piece of work. Holds what the record uses: the engine's own memory."""

    def __init__(self, runtime: _Runtime, graph: Any, stream: Any, work: Launch) -> None:
        self._runtime, self._graph, self._stream, self._work = runtime, graph, stream, work
        weakref.finalize(self, runtime.quietly, "cudaGraphExecDestroy", graph)

    def __call__(self) -> None:
        self._runtime("cudaGraphLaunch", self._graph, self._stream)


class CudaDevice(Device):
    """The first CUDA device that is visible. See `interface.Device`."""

    def __init__(self, runtime: _Runtime) -> None:
        self._runtime = runtime
        if not runtime("cudaGetDeviceCount"):
            raise BackendError("CUDA sees no device, expected an NVIDIA GPU; use --backend cpu")
        runtime("cudaSetDevice", 0)
        properties = runtime("cudaGetDeviceProperties", 0)
        self.title = f"{_text(properties.name)}, SM {int(properties.major)}{int(properties.minor)}"
        self.dlpack = (DLPACK_CUDA, 0)
        self._zeroing = CudaQueue(runtime)

    def allocate(self, size: int) -> CudaBlock:
        return CudaBlock(self._runtime, size, self._zeroing)

    def staging(self, size: int) -> NDArray[np.uint8]:
        array: NDArray[np.uint8] = np.asarray(_Pinned(self._runtime, max(size, 1)))
        array[...] = 0
        return array

    def queue(self) -> CudaQueue:
        return CudaQueue(self._runtime)


class _Pinned:
    """Page-locked memory, as NumPy's array interface describes it; given back when no array needs it any more."""

    def __init__(self, runtime: _Runtime, size: int) -> None:
        address = int(runtime("cudaHostAlloc", size, runtime.names.cudaHostAllocDefault))
        weakref.finalize(self, runtime.quietly, "cudaFreeHost", address)
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


@cache
def open_cuda() -> CudaDevice:
    """The device, opened once per process.

    Raises:
        BackendError: cuda-bindings is not installed, or there is no usable driver or device.
    """
    try:
        module = importlib.import_module(MODULE)
    except ImportError as missing:
        raise BackendError(
            f"{MODULE} cannot be imported ({missing}), expected it for memory on the GPU; "
            "pip install 'txl-deploy[cuda]', [rtx] or [tensorrt]"
        ) from None
    return CudaDevice(_Runtime(module))
