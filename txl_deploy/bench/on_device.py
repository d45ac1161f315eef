"""Measurements that differ if a bundle runs on a device.

The memory's speed is the device's; the cost of Python is the time of steps whose programs do nothing; and a measured
process imports the backend's library.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module

from txl_report.schema.measurement import DeviceFloor
from txl_runtime.bundle.engines.files import bundle_engines
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.device.choosing import PACKAGES
from txl_runtime.device.interface import Executable, Launch
from txl_runtime.errors import BackendError
from txl_runtime.model import Model

from txl_deploy.bench.floor import PASSES_SECONDS, Bandwidth, HostBandwidth, device_floor

COPIED_BYTES = 256 * 2**20
"""Size of one copy in bytes, 256 MiB."""
COPIES = 4
"""Number of copies that one pass puts into the queue together, so that waiting takes only a small share of the time."""


class DeviceBandwidth(Bandwidth):
    """The speed of copies within a device's memory, in bytes read and bytes written.

    Device memory is allocated only during a measurement. If the device has no room, nothing is measured, and `method`
    says so.
    """

    everyone = False

    def __init__(self, backend: DeviceBackend) -> None:
        super().__init__()
        self._backend = backend
        self.method = f"copies of {COPIED_BYTES // 2**20} MB on the device, bytes read and written, best pass"

    def measure(self) -> None:
        """Copy memory again and again, and append the speed of the fastest pass to `measured`."""
        try:
            self.measured.append(self._best())
        except BackendError as error:
            self.method = f"not measured on the device: {error}"

    def _best(self) -> float:
        device, queue, best = self._backend.device, self._backend.queue, 0.0
        with self._backend.lock, self._backend.device.current():
            source, to = device.allocate(COPIED_BYTES), device.allocate(COPIED_BYTES)
            queue.wait()
            until = time.perf_counter() + PASSES_SECONDS
            while time.perf_counter() < until or not best:
                started = time.perf_counter()
                for _ in range(COPIES):
                    queue.copy(to.address, source.address, COPIED_BYTES)
                queue.wait()
                best = max(best, 2 * COPIES * COPIED_BYTES / (time.perf_counter() - started) / 1e9)
        return best


def bandwidth_of(backend: object, threads: int) -> Bandwidth:
    """Return a measurement of the memory that a backend's programs read; on the CPU, with `threads` threads."""
    return DeviceBandwidth(backend) if isinstance(backend, DeviceBackend) else HostBandwidth(threads)


def saved_bytes(model: Model) -> int:
    """Return the bytes that a device's engines save by rounding matrices; 0 on the CPU, and if no matrix is rounded."""
    if not isinstance(backend := model.backend, DeviceBackend):
        return 0
    sizes = (engine.saved_bytes for name, engine in bundle_engines(model.bundle) if f"/{backend.name}/" in name)
    return max(sizes, default=0)


def device_floors(model: Model, size: int, bandwidth: Bandwidth) -> tuple[DeviceFloor, ...]:
    """Compute the least time of the shortest step, which reads `size` bytes.

    Return two results, by the measured memory speed and by the speed that the driver states; () on the CPU.
    """
    if not isinstance(backend := model.backend, DeviceBackend):
        return ()
    whole = (program for program in backend.programs if program.kind in ("logprobs", "step"))
    shortest = min(whole, key=lambda program: program.segment_length)
    sidecars = (sidecar for name, sidecar in bundle_engines(model.bundle) if f"/{backend.name}/" in name)
    kernels = next((sidecar.kernels for sidecar in sidecars if sidecar.identity.program == shortest.name), None)
    # a program that runs several tokens is left out, because `size` is that of one token
    kernels = kernels if shortest.kind == "step" or shortest.segment_length == 1 else None
    stated = backend.device.bandwidth()
    source = "by the driver's figures" if stated else "not known: the driver does not say how fast the memory is"
    speeds = (bandwidth.method, bandwidth.gb_per_second), (source, stated)
    return tuple(device_floor(by, speed, size, kernels) for by, speed in speeds)


class _Nothing(Executable):
    """A program that is bound to memory like the real program, but does nothing."""

    def __init__(self, real: Executable) -> None:
        self.program, self.recordable = real.program, real.recordable
        self.in_place: Mapping[str, str] = real.in_place

    def prepare(self, addresses: Mapping[str, int], queue: object) -> Launch:
        return lambda: None


def without_programs(backend: DeviceBackend) -> DeviceBackend:
    """Return the backend with programs that do nothing; copies to and from the device, and recording, are real."""
    nothing = [_Nothing(executable) for executable in backend.executables.values()]
    return DeviceBackend(backend.name, backend.description, backend.device, backend.queue, nothing)


def import_library(backend: str) -> None:
    """Import the library that every process with this backend imports; this needs no driver."""
    import_module(PACKAGES.get(backend, "onnxruntime"))
