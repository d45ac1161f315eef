"""Backends `tensorrt` and `rtx`: they load the engines that `txl-deploy build` put into a bundle.

TensorRT-RTX compiles kernels for the GPU when an engine is first run. They are kept beside the bundle, in
BUNDLE.rtx-cache, in one file per engine; the library ignores a file that does not fit.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from txl_runtime.bundle.encoding import write_whole
from txl_runtime.bundle.reading import Bundle
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.device.engines.facts import Compiled
from txl_runtime.device.engines.files import EngineFile, checked_engines, find_engines
from txl_runtime.device.engines.library import Library, load_library
from txl_runtime.device.engines.running import EngineExecutable, EngineRuntime
from txl_runtime.device.interface import Device


def open_engines(bundle: Bundle, target: Compiled, update: str | None = None) -> DeviceBackend:
    """Load a bundle's engines on the GPU of this machine.

    Raises:
        BackendError: there are none, they are of another library, GPU or platform, or nothing here can run them.
        BundleError: one is damaged.
    """
    find_engines(bundle, target, update)  # before any library is loaded
    library = load_library(target)
    from txl_runtime.device.cuda import open_cuda

    return load_engines(bundle, library, open_cuda(), update)


def load_engines(bundle: Bundle, library: Library, device: Device, update: str | None = None) -> DeviceBackend:
    """As `open_engines`, with a library and a device that are open."""
    runtime = EngineRuntime(library)
    executables: list[EngineExecutable] = []
    places: list[Path] = []
    sizes: list[int] = []
    for engine in checked_engines(bundle, library.target, library.version, update):
        path, place = bundle.file(engine.name), _cache_file(bundle, engine)
        kept = _read_cache(place) if library.facts.portable else None
        executables.append(runtime.load(str(path), path.read_bytes(), engine.program, kept))
        places.append(place)
        sizes.append(len(kept or b""))

    def settled() -> None:
        """Keep the kernels that were compiled since; their number only grows."""
        for index, executable in enumerate(executables):
            data = executable.cache()
            if data is not None and len(data) > sizes[index]:
                sizes[index] = len(data)
                _write_cache(places[index], data)

    description = f"{library.title} on {device.title}"
    return DeviceBackend(library.target, description, device, device.queue(), executables, settled=settled)


def _cache_file(bundle: Bundle, engine: EngineFile) -> Path:
    """Where an engine's compiled kernels are kept. Its key is in the name, so that no other engine's are read."""
    folder = bundle.path.with_name(f"{bundle.path.name}.rtx-cache")
    return folder / f"{engine.program.name}-{engine.sidecar.key[:16]}.cache"


def _read_cache(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _write_cache(path: Path, data: bytes) -> None:
    """A place that cannot be written to only makes the next start slower."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        write_whole(path, data)
