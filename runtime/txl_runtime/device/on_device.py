"""What the loops on a device have in common: one queue and its lock, work in it that is waited for, resident tokens."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.device.blocks import Inputs, Results
from txl_runtime.device.call import DeviceCall, Steps, open_blocks
from txl_runtime.device.context import Lock
from txl_runtime.device.cuda import Device, Queue
from txl_runtime.device.dlpack import DeviceTokens, device_tokens, fetch_tokens, lie_on
from txl_runtime.device.interface import Executable
from txl_runtime.device.staging import Staging
from txl_runtime.device.tail import Tail
from txl_runtime.streaming.loop import Loop, Resident
from txl_runtime.streaming.outputs import Output, WholeOutput
from txl_runtime.types import Ids

Addresses = Mapping[str, int]


class OnDevice(Loop):
    """See `streaming.loop.Loop`.

    All loops of a backend share one queue of the device. Its lock is held while work is put in, not while it is waited
    for, so streams in different threads keep each other waiting no longer than the device itself does.

    Args:
        manifest: of the bundle.
        device, queue, lock: where it runs, the one order of its work, and whose turn it is to add to it.
        settled: called when a program has run twice: engines compile what they compile at first use by then.
    """

    piecewise = leading = False
    output: Output

    def __init__(
        self, manifest: Manifest, device: Device, queue: Queue, lock: Lock, settled: Callable[[str], None]
    ) -> None:
        self.manifest, self.output = manifest, WholeOutput(manifest)
        self._device, self._queue, self._lock, self._settled = device, queue, lock, settled
        self._tail = Tail(device, queue, lock)
        self.staging = Staging(device, queue, self._tail)
        self._blocks: dict[Hashable, tuple[Inputs, Results]] = {}
        self._calls: dict[tuple[str, int], DeviceCall] = {}
        self._steps = Steps()
        self._settling: str | None = None
        self._resident: DeviceTokens | None = None  # what a step on its way reads
        weakref.finalize(self, self._tail.drain).atexit = False  # work that nobody waited for still needs the memory

    @property
    def recorded(self) -> dict[str, str]:
        """Per program and side of the memory: "recorded", or why its steps are put in one by one."""
        return {f"{name}, side {side}": call.recording.said for (name, side), call in self._calls.items()}

    def resident(self, tokens: Any) -> DeviceTokens | None:
        """See `Loop`. Whoever owns the tokens makes the queue wait for them: that must not come into a record."""
        entry = self.manifest.tokens
        if type(tokens) is np.ndarray or entry is None or not entry.axes.plain:
            return None
        if not lie_on(tokens, self._device.dlpack):
            return None
        with self._lock, self._device.current():
            return device_tokens(tokens, self._queue.handle)

    def fetch(self, tokens: Resident) -> Ids:
        """See `Loop`."""
        assert isinstance(tokens, DeviceTokens)
        with self._lock, self._device.current():
            return fetch_tokens(tokens, self._queue)

    def finish(self) -> None:
        """Return when everything that this loop put into the queue is done."""
        self._tail.wait()
        self._resident = None
        if self._settling is not None:
            program, self._settling = self._settling, None
            self._settled(program)

    def _send(self, inputs: Inputs, name: str, tokens: DeviceTokens) -> None:
        """Send what is staged, and then put ids that are on the device in their place."""
        self._resident = tokens
        (rows, columns), host = tokens.shape, inputs.host[name]
        if host.shape != tokens.shape:
            host.fill(0)
        inputs.send(self._queue)
        self._queue.copy(inputs.addresses[name], tokens.address, 4 * columns, rows, 4 * host.shape[1], tokens.pitch)

    def _tie(
        self,
        executable: Executable,
        side: int,
        memory: tuple[Addresses, Addresses],
        key: Hashable,
        last: Sequence[str] = (),
    ) -> DeviceCall:
        """A program tied to one side of the memory, for the first time or again.

        Programs of one key share the blocks of what they read and return beside it. See `open_blocks` for `last`.
        """
        name = executable.program.name
        if (name, side) not in self._calls:
            with self._lock, self._device.current():
                if key not in self._blocks:
                    self._blocks[key] = open_blocks(self._device, executable, memory, last)
                self._calls[name, side] = DeviceCall(executable, self._queue, *self._blocks[key], memory)
        return self._calls[name, side]
