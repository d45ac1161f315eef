"""Backends `tensorrt` and `rtx`: they load the engines that `txl-deploy build` put into a bundle.

TensorRT-RTX compiles kernels for the GPU when an engine is first run. They are kept beside the bundle, in
BUNDLE.rtx-cache, in one file per engine; the library ignores a file that does not fit.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from txl_runtime.bundle.folder import Folder
from txl_runtime.bundle.reading import Bundle
from txl_runtime.bundle.writing import write_whole
from txl_runtime.device.backend import DeviceBackend
from txl_runtime.device.cuda import Device, Queue, open_cuda
from txl_runtime.device.engines.files import EngineFile, checked_engines, find_engines
from txl_runtime.device.engines.library import Library, load_library
from txl_runtime.device.engines.library_features import Compiled
from txl_runtime.device.engines.running import EngineExecutable, EngineRuntime
from txl_runtime.device.engines.weights import SharedWeights
from txl_runtime.errors import BackendError

logger = logging.getLogger(__name__)


def open_engines(bundle: Bundle, target: Compiled, update: str | None = None) -> DeviceBackend:
    """Load a bundle's engines on the GPU of this machine.

    Raises:
        BackendError: there are none, they are of another library, GPU or platform, or nothing here can run them.
        BundleError: one is damaged.
    """
    find_engines(bundle, target, update)  # before any library is loaded
    library = load_library(target)
    return load_engines(bundle, library, open_cuda(), update)


def load_engines(bundle: Bundle, library: Library, device: Device, update: str | None = None) -> DeviceBackend:
    """As `open_engines`, with a library and a device that are open."""
    executables: list[EngineExecutable] = []
    unsaved: dict[str, tuple[EngineExecutable, _Cache]] = {}
    queue = device.queue()
    with device.current(), queue.beside_records():  # libraries load to whichever device is current
        runtime = EngineRuntime(library)
        for engine in checked_engines(bundle, library.target, library.version, update):
            cache = _Cache(bundle, engine) if library.facts.portable else None
            kernels = None if cache is None else cache.read()
            plan = bundle.read(engine.name)  # the bytes that were hashed are those that are loaded
            made, path = engine.sidecar.identity, str(bundle.file(engine.name))
            executables.append(runtime.load(path, plan, engine.program, kernels, made.given_memory, made.given))
            if cache is not None:
                unsaved[engine.program.name] = executables[-1], cache
        give_weights(executables, bundle, device, queue)
    give_workspace(executables, device)

    def settled(program: str) -> None:
        """Keep what a program has compiled, once, whatever the number of its streams."""
        executable, cache = unsaved.pop(program, (None, None))
        if executable is None or cache is None:
            return
        try:
            kernels = executable.cache()
        except BackendError as error:  # the step was done: the next start is slower, no more
            logger.warning("the kernels of %s are not kept: %s", program, error)
        else:
            cache.keep(kernels, executable.resumed)

    description = f"{library.title} on {device.title}"
    if alone := [item.program.name for item in executables if not item.recordable]:
        said = f"{', '.join(alone[:3])}{' …' if len(alone) > 3 else ''}"
        description += f"; {len(alone)} engines were built in an older way and record themselves: {said}"
    return DeviceBackend(library.target, description, device, queue, executables, settled=settled)


def give_workspace(executables: Sequence[EngineExecutable], device: Device) -> None:
    """Give engines the device memory that they work in: one block for all, since one queue runs them in turns.

    Raises:
        BackendError: the device has not as much.
    """
    if size := max((executable.working_bytes for executable in executables), default=0):
        workspace = device.allocate(size)
        for executable in executables:
            executable.workspace = workspace if executable.working_bytes else None


def give_weights(executables: Sequence[EngineExecutable], bundle: Bundle, device: Device, queue: Queue) -> None:
    """Lay out the weights that engines take as inputs; see `SharedWeights`, also for what it raises."""
    if given := [weight for executable in executables for weight in executable.given]:
        try:
            weights = SharedWeights(bundle, given, device, queue)
        except BaseException:
            queue.settle()  # an interrupt: the memory goes back now, and may not be written any more
            raise
        for executable in executables:
            executable.weights = weights


class _Cache:
    """The file of one engine's compiled kernels. The engine's key is in its name, so that no other's are read."""

    def __init__(self, bundle: Bundle, engine: EngineFile) -> None:
        path = bundle.folder.place  # "." has no name
        folder = path.with_name(f"{path.name}.rtx-cache")
        # Of the file's name, which is in the manifest and so stays within its folder; a program may have any name.
        self._path = folder / f"{Path(engine.name).stem}-{engine.sidecar.key[:16]}.cache"
        self._size = 0

    def read(self) -> bytes | None:
        with contextlib.suppress(OSError), Folder(self._path.parent).open(self._path.name) as (file, _):
            kernels = file.read()
            self._size = len(kernels)
            return kernels
        return None

    def keep(self, kernels: bytes | None, resumed: bool) -> None:
        """Write what was compiled, where the library refused what was kept, or has more kernels than that."""
        if kernels is not None and (not resumed or len(kernels) > self._size):
            with contextlib.suppress(OSError):  # a place that cannot be written to only makes the next start slower
                self._path.parent.mkdir(exist_ok=True)
                write_whole(self._path, kernels)
