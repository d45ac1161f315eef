"""ONNX Runtime with its CUDA provider, on the stand-in for CUDA's driver: as strict about places as the real one.

A node runs on the device where the table of kernels has a row for it, else on the CPU. An input lies where its first
reader runs, one that nobody reads on the CPU, and an output where it is made. What is bound to an input of the CPU is
copied when it is bound, and never again. Everything is computed by the real ONNX Runtime on copies, in the queue that
the session was given, and `run_with_iobinding` returns when that queue is done, unless it is told not to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from txl_runtime import load
from txl_runtime.bundle.reading import open_bundle
from txl_runtime.device import choosing, onnxruntime_cuda
from txl_runtime.device.backend import DeviceBackend

from stand_ins.driver import FakeDriver
from stand_ins.engine import open_fake_device
from stand_ins.operators import kernels, table

CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"
SIZES = {16: 2}
"""Bytes of the types that NumPy has no name for."""


class StandInOrt:
    """Stands in for `import onnxruntime`, where the package is the one for GPUs.

    Args:
        driver: the library that its device is of.
        library: the column of the table that says what runs on the device.

    Attributes:
        preloaded: where the libraries of CUDA were looked for; None is beside ONNX Runtime.
    """

    SessionOptions = onnxruntime.SessionOptions
    RunOptions = onnxruntime.RunOptions
    cuda_version = "13.0"

    def __init__(self, driver: FakeDriver, library: str = "onnxruntime-cuda 1.31.1") -> None:
        self.driver, self.library, self.__version__ = driver, library, library.split()[-1]
        self.preloaded: list[str | None] = []

    def get_available_providers(self) -> list[str]:
        return [CUDA, CPU]

    def preload_dlls(self, directory: str | None = None) -> None:
        self.preloaded.append(directory)
        print("Failed to load libnvrtc.so.13: cannot open shared object file")
        print("Please follow a page on the web.")

    def InferenceSession(self, graph: bytes, options: Any, providers: Sequence[Any], **_: Any) -> Any:
        return Session(self, graph, options, dict(entry for entry in providers if not isinstance(entry, str))[CUDA])


class Session:
    """A graph, every node in its place."""

    def __init__(self, ort: StandInOrt, graph: bytes, options: Any, settings: Mapping[str, str]) -> None:
        assert ort.preloaded, "the provider does not start: libcublasLt.so.13: cannot open shared object file"
        self.ort, self.stream = ort, int(settings["user_compute_stream"])
        # The provider makes the device's own context current, and leaves that to whoever called.
        self.made_in, self.device = ort.driver.here("a session"), int(settings["device_id"])
        ort.driver.set_device(self.device)
        self.make_memory()
        self.real = onnxruntime.InferenceSession(graph, options, providers=[CPU])
        self.get_inputs, self.get_outputs = self.real.get_inputs, self.real.get_outputs
        model = onnx.load_model_from_string(graph)
        self.places: dict[str, str] = {}
        self.left: list[Any] = []
        for node, kernel in kernels(model):
            on_device = table().get(kernel, {}).get(ort.library) == "yes"
            if not on_device:
                self.left.append(SimpleNamespace(name=node.name, op_type=node.op_type))
            for name in (*node.input, *node.output):
                self.places.setdefault(name, "Cuda" if on_device else "Cpu")

    def make_memory(self) -> None:
        """For weights, and what runs need."""
        if not self.ort.driver.makes_memory():
            raise RuntimeError("CUDA failure 900: operation not permitted when stream is capturing")

    def get_providers(self) -> list[str]:
        return [CUDA, CPU]

    def get_input_memory_infos(self) -> list[Any]:
        return [SimpleNamespace(name=self.places.get(item.name, "Cpu")) for item in self.get_inputs()]

    def get_output_memory_infos(self) -> list[Any]:
        return [SimpleNamespace(name=self.places[item.name]) for item in self.get_outputs()]

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return [SimpleNamespace(ep_name=CPU, get_nodes=lambda: self.left)] if self.left else []

    def io_binding(self) -> Binding:
        return Binding(self)

    def run_with_iobinding(self, binding: Binding, options: Any) -> None:
        binding.run(options.get_run_config_entry("disable_synchronize_execution_providers") != "1")


class Binding:
    """Addresses of the device, tied to a session's inputs and outputs."""

    def __init__(self, session: Session) -> None:
        self._session, self._driver = session, session.ort.driver
        self._binding, self._ran = session.real.io_binding(), False
        self._given: dict[str, tuple[int, NDArray[np.uint8]]] = {}
        self._made: dict[str, tuple[int, NDArray[np.uint8]]] = {}

    def bind_input(self, name: str, place: str, _: int, element: Any, shape: Sequence[int], address: int) -> None:
        buffer = self._bind(self._binding.bind_input, name, place, element, shape)
        if self._session.places.get(name, "Cpu") == "Cpu":
            self._driver.cuStreamSynchronize(self._session.stream)
            buffer[...] = self._driver.memory.view(address, len(buffer))  # once, and never again
        else:
            self._given[name] = address, buffer

    def bind_output(self, name: str, place: str, _: int, element: Any, shape: Sequence[int], address: int) -> None:
        self._made[name] = address, self._bind(self._binding.bind_output, name, place, element, shape)

    def _bind(self, bind: Any, name: str, place: str, element: Any, shape: Sequence[int]) -> NDArray[np.uint8]:
        assert place == "cuda"
        size = SIZES[element] if isinstance(element, int) else np.dtype(element).itemsize
        buffer = np.zeros(int(np.prod(shape)) * size, np.uint8)
        bind(name, "cpu", 0, element, shape, buffer.ctypes.data)
        return buffer

    def run(self, wait: bool) -> None:
        given, made = list(self._given.values()), list(self._made.values())
        if not self._ran:
            self._session.make_memory()
        self._ran = True

        def work(reads: list[NDArray[np.uint8]]) -> list[NDArray[Any]]:
            for (_, buffer), read in zip(given, reads, strict=True):
                buffer[...] = read
            self._session.real.run_with_iobinding(self._binding)
            return [buffer for _, buffer in made]

        self._driver.set_device(self._session.device)
        places = ([(address, len(buffer)) for address, buffer in side] for side in (given, made))
        self._driver.launch(self._session.stream, work, *places, made_in=self._session.made_in)
        if wait:
            self._driver.cuStreamSynchronize(self._session.stream)


def opened(
    path: Path,
    update: str | None = None,
    change: Callable[[StandInOrt], object] = id,
    driver: FakeDriver | None = None,
) -> DeviceBackend:
    """As on a machine with a GPU; `change` is shown what stands in for the package onnxruntime."""
    driver = driver or FakeDriver()
    ort = StandInOrt(driver)
    change(ort)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime_cuda, "import_onnxruntime", lambda: ort)
        patch.setattr(onnxruntime_cuda, "open_cuda", lambda: open_fake_device(driver))
        return onnxruntime_cuda.open_onnxruntime_cuda(open_bundle(path), update)


def load_with(path: Path, backend: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The bundle, loaded with a backend that is open."""
    with monkeypatch.context() as patch:
        patch.setattr(choosing, "open_device", lambda *_: backend)
        return load(path, backend=backend.name)
