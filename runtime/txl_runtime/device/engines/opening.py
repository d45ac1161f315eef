"""The backends `tensorrt` and `rtx`, which load the engines that `txl-deploy build` put into a bundle.

TensorRT-RTX compiles kernels for the GPU when an engine first runs. The kernels are kept beside the bundle, in
BUNDLE.rtx-cache, in one file per engine; the library ignores a file that does not fit.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from txl_runtime.bundle.engines.files import EngineFile, find_engines
from txl_runtime.bundle.engines.sidecar import Sidecar
from txl_runtime.bundle.folder import Folder
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.writing import write_whole
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.device.cuda import Device, Queue, open_cuda
from txl_runtime.device.engines.fitting import checked_engines
from txl_runtime.device.engines.library import Library, load_library
from txl_runtime.device.engines.library_features import Compiled
from txl_runtime.device.engines.running import EngineExecutable, EngineRuntime
from txl_runtime.device.engines.weights import SharedWeights
from txl_runtime.errors import BackendError

logger = logging.getLogger(__name__)


def open_engines(bundle: Bundle, target: Compiled, update: str | None = None) -> DeviceBackend:
    """Load a bundle's engines on the GPU of this machine.

    Raises:
        BackendError: there are no engines, they are for a different library, GPU or platform, or they cannot run here.
        BundleError: an engine is damaged.
    """
    find_engines(bundle, target, update)  # raises an error if there are no engines, before a library is loaded
    library = load_library(target)
    return load_engines(bundle, library, open_cuda(), update)


def load_engines(bundle: Bundle, library: Library, device: Device, update: str | None = None) -> DeviceBackend:
    """Load a bundle's engines as `open_engines` does, with an open library and device."""
    executables, sidecars = list[EngineExecutable](), list[Sidecar]()
    unsaved: dict[str, tuple[EngineExecutable, _Cache]] = {}
    queue = device.queue()
    with device.current(), queue.beside_records():  # libraries load engines to the current device
        runtime = EngineRuntime(library)
        for engine in checked_engines(bundle, library.target, library.version, update):
            cache = _Cache(bundle, engine) if library.facts.portable else None
            kernels = None if cache is None else cache.read()
            plan = bundle.read(engine.name)  # the library loads these hashed bytes, not the file by its path
            identity, path = engine.sidecar.identity, str(bundle.file(engine.name))
            sidecars.append(engine.sidecar)
            executables.append(runtime.load(path, plan, engine.program, kernels, identity.given_memory, identity.given))
            if cache is not None:
                unsaved[engine.program.name] = executables[-1], cache
        give_weights(executables, bundle, device, queue)
    give_workspace(executables, device)

    def settled(program: str) -> None:
        """Keep a program's compiled kernels, once for all its streams."""
        executable, cache = unsaved.pop(program, (None, None))
        if executable is None or cache is None:
            return
        try:
            kernels = executable.cache()
        except BackendError as error:  # the step is done, so the user gets no error: only the next start is slower
            logger.warning("the kernels of %s are not kept: %s", program, error)
        else:
            cache.keep(kernels, executable.resumed)

    description = f"{library.title} on {device.title}"
    if alone := [item.program.name for item in executables if not item.recordable]:
        names = f"{', '.join(alone[:3])}{' …' if len(alone) > 3 else ''}"
        description += f"; {len(alone)} engines were built in an older way and record themselves: {names}"
    backend = DeviceBackend(library.target, description, device, queue, executables, settled=settled)
    if rounding := sidecars[0].identity.rounding:
        backend.precision, backend.reached = rounding, sidecars[0].reached
        backend.description += f", matrices in {rounding}"
    return backend


def give_workspace(executables: Sequence[EngineExecutable], device: Device) -> None:
    """Give engines their working memory: one block for all, since one queue runs the engines one after the other.

    Raises:
        BackendError: the device has not enough memory.
    """
    if size := max((executable.working_bytes for executable in executables), default=0):
        workspace = device.allocate(size)
        for executable in executables:
            executable.workspace = workspace if executable.working_bytes else None


def give_weights(executables: Sequence[EngineExecutable], bundle: Bundle, device: Device, queue: Queue) -> None:
    """Put the weights that engines take as inputs on the device; `SharedWeights` names the errors."""
    if needed := [weight for executable in executables for weight in executable.given]:
        try:
            weights = SharedWeights(bundle, needed, device, queue)
        except BaseException:
            queue.settle()  # after an interrupt the memory is freed, so the work that writes it has to end first
            raise
        for executable in executables:
            executable.weights = weights


class _Cache:
    """The file of one engine's compiled kernels. The engine's key is in its name, so that no other engine reads it."""

    def __init__(self, bundle: Bundle, engine: EngineFile) -> None:
        path = bundle.folder.place  # the real path: a bundle given as "." has no name
        folder = path.with_name(f"{path.name}.rtx-cache")
        # The name comes from the engine's file, which the manifest's check keeps in its folder; a program may have any
        # name.
        self._path = folder / f"{Path(engine.name).stem}-{engine.sidecar.key[:16]}.cache"
        self._size = 0

    def read(self) -> bytes | None:
        with contextlib.suppress(OSError), Folder(self._path.parent).open(self._path.name) as (file, _):
            kernels = file.read()
            self._size = len(kernels)
            return kernels
        return None

    def keep(self, kernels: bytes | None, resumed: bool) -> None:
        """Write compiled kernels, if the library refused the kept kernels or has compiled more since."""
        if kernels is not None and (not resumed or len(kernels) > self._size):
            with contextlib.suppress(OSError):  # a folder without write permission only makes the next start slower
                self._path.parent.mkdir(exist_ok=True)
                write_whole(self._path, kernels)
