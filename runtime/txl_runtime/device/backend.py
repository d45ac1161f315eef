"""A backend whose states stay on a device: its loaded programs, one queue for all loops, and the queue's lock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.open_batch import smaller
from txl_runtime.bundle.tables import Program
from txl_runtime.device.cuda import Device, Queue
from txl_runtime.device.cuda_context import open_lock
from txl_runtime.device.interface import Executable
from txl_runtime.device.loop import DeviceLoop
from txl_runtime.errors import BackendError
from txl_runtime.streaming.loop import Backend, Loop
from txl_runtime.streaming.state import Initial

ANY = 0
"""Key used instead of a batch size for "step" programs, which exist for only one batch size."""


class DeviceBackend(Backend):
    """The backend of a device; see `streaming.loop.Backend`. Its programs return log-probabilities or all outputs.

    If there are programs of several batch sizes, a stream runs those of the smallest size that holds its sequences.

    Attributes:
        device: the device on which the backend runs.
        queue: the queue that orders all work of the backend.
        lock: the lock that a thread holds while it adds work to the queue.
        executables: loaded programs by name.
    """

    def __init__(
        self,
        name: str,
        description: str,
        device: Device,
        queue: Queue,
        executables: Sequence[Executable],
        settled: Callable[[str], None] | None = None,
    ) -> None:
        self.name, self.description, self.device, self.queue = name, description, device, queue
        self.lock = open_lock()
        self.executables: Mapping[str, Executable] = {item.program.name: item for item in executables}
        rules = {item.program.update for item in executables}
        kinds = {item.program.kind for item in executables}
        if len(rules) != 1 or not kinds & {"logprobs", "step"}:
            raise BackendError(
                f"backend {name} has programs of kinds {sorted(kinds)} and update rules {sorted(rules)}, expected "
                "log-probabilities or steps, and one rule; build the engines again"
            )
        self.update = rules.pop()
        ordered = sorted(executables, key=lambda item: item.program.segment_length)
        sizes = sorted({_batch_size(item.program) for item in ordered})
        self._sizes = {size: [item for item in ordered if _batch_size(item.program) == size] for size in sizes}
        self.programs = tuple(item.program for item in self._sizes[sizes[-1]])
        self._settled = settled

    def fitting(self, manifest: Manifest, sequences: int) -> Manifest:
        size = min((size for size in self._sizes if size >= sequences), default=manifest.batch_size)
        return smaller(manifest, size) if size < manifest.batch_size else manifest

    def open_loop(self, manifest: Manifest, initial: Initial) -> Loop:
        sizes = self._sizes.get(manifest.batch_size) or self._sizes.get(ANY)
        if sizes is None:
            raise BackendError(
                f"backend {self.name} has engines for B {', '.join(map(str, self._sizes))}, expected some for "
                f"{manifest.batch_size}; build the engines again"
            )
        device, queue, lock = self.device, self.queue, self.lock
        return DeviceLoop(manifest, device, queue, lock, self.name, sizes, initial, self.settled)

    def settled(self, program: str) -> None:
        """Report that a program has run twice: its engine has now compiled its kernels, which can be saved."""
        if self._settled is not None:
            with self.lock, self.device.current():  # a different stream may run it at the same time
                self._settled(program)

    def release_pages(self) -> None:
        """Do nothing, because the engines' weights are not memory-mapped."""


def _batch_size(program: Program) -> int:
    """Return the batch size of a program of tokens; `ANY` for a "step" program."""
    return ANY if program.kind == "step" else program.inputs[0].fixed[0]
