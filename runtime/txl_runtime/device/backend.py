"""A backend whose memory stays on a device: programs loaded there, one queue for all streams, and its lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from txl_runtime.bundle.tables import Program
from txl_runtime.device.interface import Device, Executable, Queue
from txl_runtime.device.loop import DeviceStream
from txl_runtime.errors import BackendError
from txl_runtime.streaming.loop import Arrays, Call

if TYPE_CHECKING:
    from txl_runtime.model import Model

__all__ = ["MAIN_KINDS", "DeviceBackend"]

MAIN_KINDS = ("logprobs", "hidden")
"""What a segment program may return to be enough for everything; "last" and "score" are shortcuts."""

Bind = Callable[[Program, Arrays, Arrays], Call]


class DeviceBackend:
    """Programs of one update rule, loaded by an engine.

    Attributes:
        name, description, least_rows: see `Backend`.
        device, queue, lock: where it runs, the one order of its work, and who may add to it.
        executables: by program name.
        update, kind: the rule of all of them, and the kind that serves every call.
    """

    least_rows = 1

    def __init__(
        self,
        name: str,
        description: str,
        device: Device,
        queue: Queue,
        executables: Sequence[Executable],
        softmax: Bind | None = None,
        settled: Callable[[], None] | None = None,
    ) -> None:
        self.name, self.description, self.device, self.queue = name, description, device, queue
        self.lock = threading.RLock()
        self.executables: Mapping[str, Executable] = {item.program.name: item for item in executables}
        rules = {item.program.update for item in executables}
        kinds = {item.program.kind for item in executables}
        main = [kind for kind in MAIN_KINDS if kind in kinds]
        if len(rules) != 1 or not main:
            raise BackendError(
                f"backend {name} has programs of kinds {sorted(kinds)} and update rules {sorted(rules)}, expected "
                "log-probabilities and one rule; build the engines again"
            )
        self.update, self.kind = rules.pop(), main[0]
        self._softmax, self._settled = softmax, settled
        self._by_length = sorted(executables, key=lambda item: item.program.segment_length)
        self._found: dict[tuple[str, int], Executable | None] = {}

    @property
    def programs(self) -> tuple[Program, ...]:
        """What is loaded, shortest segments first."""
        return tuple(item.program for item in self._by_length)

    def find(self, kind: str, length: int) -> Executable:
        """The smallest program of a kind that holds a segment of that many tokens."""
        found = self._find(kind, length)
        if found is None:
            raise BackendError(
                f"backend {self.name} has no {kind} program for {length} tokens; build the engines again"
            )
        return found

    def has(self, kind: str, length: int) -> bool:
        """Whether there is one, and none that returns more is smaller."""
        found, main = self._find(kind, length), self._find(self.kind, length)
        return found is not None and (main is None or found.program.segment_length <= main.program.segment_length)

    def bind(self, program: Program, inputs: Arrays, outputs: Arrays) -> Call:
        """Tie a softmax program to arrays of the host; segment programs are tied by the stream, on the device."""
        if self._softmax is None:
            raise BackendError(f"backend {self.name} has no program {program.name}; build the engines again")
        call = self._softmax(program, inputs, outputs)

        def locked() -> None:
            with self.lock:
                call()

        return locked

    def stream(self, model: Model, batch_size: int) -> Any:
        """A stream on this device."""
        return DeviceStream(model, self, batch_size)

    def settled(self) -> None:
        """A program has run often enough for its engine to have compiled what it compiles at first use."""
        if self._settled is not None:
            with self.lock:
                self._settled()

    def _find(self, kind: str, length: int) -> Executable | None:
        key = (kind, length)
        if key not in self._found:
            fitting = (
                item for item in self._by_length if item.program.kind == kind and item.program.segment_length >= length
            )
            self._found[key] = next(fitting, None)
        return self._found[key]
