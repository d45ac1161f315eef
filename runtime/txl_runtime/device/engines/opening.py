"""Backends `tensorrt` and `rtx`: the engines that `txl-deploy build` put into a bundle."""

from __future__ import annotations

from txl_runtime.bundle.reading import Bundle
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.device.engines.facts import Target
from txl_runtime.device.engines.files import cache_file, check_identity, find_engines, read_cache, write_cache
from txl_runtime.device.engines.library import Library, load_library
from txl_runtime.device.engines.running import EngineExecutable, EngineRuntime
from txl_runtime.device.engines.sidecar import sidecar_path
from txl_runtime.device.interface import Device
from txl_runtime.errors import BundleError

__all__ = ["load_engines", "open_engines"]


def open_engines(bundle: Bundle, target: Target, update: str | None = None) -> DeviceBackend:
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
    target, runtime = library.target, EngineRuntime(library)
    loaded: list[tuple[EngineExecutable, int]] = []
    places = []
    found = find_engines(bundle, target, update)
    for engine in found:
        check_identity(bundle, engine, library.version, target)
        bundle.check(engine.name)
        bundle.check(sidecar_path(engine.name))
        if bundle.manifest.files[engine.name].sha256 != engine.sidecar.sha256:
            advice = f"txl-deploy build {bundle.path} --target {target} --force"
            raise BundleError(f"{bundle.file(engine.name)}: is not the file that its sidecar describes; {advice}")
    for engine in found:
        path = bundle.file(engine.name)
        place = cache_file(bundle, engine)
        kept = read_cache(place) if library.facts.portable else None
        loaded.append((runtime.load(str(path), path.read_bytes(), engine.program, kept), len(kept or b"")))
        places.append(place)
    sizes = [size for _, size in loaded]

    def settled() -> None:
        """Keep what was compiled since: it only grows."""
        for index, (executable, _) in enumerate(loaded):
            data = executable.cache()
            if data is not None and len(data) > sizes[index]:
                sizes[index] = len(data)
                write_cache(places[index], data)

    description = f"{library.title} on {device.title}"
    executables = [executable for executable, _ in loaded]
    return DeviceBackend(target, description, device, device.queue(), executables, settled=settled)
