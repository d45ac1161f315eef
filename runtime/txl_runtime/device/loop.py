"""The loop on a device: memory that never leaves it, and work that is put into one queue."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Program
from txl_runtime.device.call import DeviceCall, TensorBlock, open_blocks
from txl_runtime.device.dlpack import DeviceTokens, device_tokens, fetch_tokens
from txl_runtime.device.interface import Device, Event, Executable, Queue
from txl_runtime.device.memory import DeviceMemory, DeviceRing, DeviceRolled
from txl_runtime.errors import BackendError
from txl_runtime.streaming.loop import Loop, Resident, Want
from txl_runtime.streaming.memory import Initial, LoopState
from txl_runtime.streaming.outputs import Output, RowsResult, WholeOutput
from txl_runtime.types import Array, Floats, Ids

KINDS: dict[Want, str] = {"rows": "logprobs", "last": "last", "nll": "score"}
"""The kind of program that computes just what is wanted."""


class Programs:
    """Executables of one update rule. "logprobs" serve every call; "last" and "score" are shortcuts.

    Args:
        backend: its name, for messages.
        executables: what is loaded.
    """

    def __init__(self, backend: str, executables: Sequence[Executable]) -> None:
        self._backend = backend
        self._executables = sorted(executables, key=lambda item: item.program.segment_length)
        self.all: tuple[Program, ...] = tuple(item.program for item in self._executables)
        self._found: dict[tuple[str, int], Executable] = {}

    def find(self, kind: str, length: int) -> Executable:
        """The program of the shortest segments that hold so many tokens; of two such, the one of the kind.

        So a shortcut is not taken where log-probabilities have a shorter program, which is less work.

        Raises:
            BackendError: there is none.
        """
        if (kind, length) not in self._found:
            able = [item for item in self._executables if item.program.kind in ("logprobs", kind)]
            fitting = [item for item in able if item.program.segment_length >= length]
            if not fitting:
                raise BackendError(
                    f"backend {self._backend} has no program for {length} tokens; build the engines again"
                )
            best = min(fitting, key=lambda item: (item.program.segment_length, item.program.kind != kind))
            self._found[kind, length] = best
        return self._found[kind, length]


class _Pending(RowsResult):
    """The result of a step that is still in the queue; to ask for any of it is to wait for the step.

    Args:
        kind: of the program: "logprobs" gives rows, "last" and "score" what is wanted itself.
        given: a view of where the result comes back to, good once the step is done.
        event: of the step.
        done: called once, after the step, if anything is to be done then.
        held: what the step reads and writes, which has to live until the step is done.
    """

    __slots__ = ("_done", "_event", "_given", "_held", "_kind")

    def __init__(
        self,
        kind: str,
        given: Floats,
        counts: Ids,
        targets: Ids | None,
        output: Output,
        event: Event,
        done: Callable[[], None] | None,
        held: object,
    ) -> None:
        super().__init__(given, counts, targets, output)
        self._kind, self._given, self._done, self._held = kind, given, done, held
        self._event: Event | None = event

    def wait(self) -> None:
        """Return when the step is done."""
        if self._event is not None:
            self._event.wait()
            self._event = self._held = None
            if self._done is not None:
                self._done()

    def rows(self) -> Floats:
        self.wait()
        return self._given

    def last(self) -> Floats:
        return self.rows() if self._kind == "last" else super().last()

    def nll(self) -> Floats:
        return self.rows() if self._kind == "score" else super().nll()


class DeviceLoop(LoopState, Loop):
    """See `streaming.loop.Loop`.

    All loops of a backend share one queue of the device. Its lock is held while work is put in, not while it is waited
    for, so streams in different threads keep each other waiting no longer than the device itself does.

    `settled` is called when a program has run twice: engines compile what they compile at first use by then.
    """

    piecewise = False

    def __init__(
        self,
        manifest: Manifest,
        device: Device,
        queue: Queue,
        lock: threading.RLock,
        programs: Programs,
        initial: Initial,
        settled: Callable[[], None],
    ) -> None:
        update = programs.all[0].update
        super().__init__(update, manifest, lock)
        self._device, self._queue, self._programs, self._settled = device, queue, programs, settled
        self.output: Output = WholeOutput(manifest)
        self._blocks: dict[str, tuple[TensorBlock, TensorBlock]] = {}
        self._calls: dict[tuple[str, int], DeviceCall] = {}
        self._latest: _Pending | None = None
        with self._lock:
            kind = DeviceRing if update == "ring" else DeviceRolled
            self.memory: DeviceMemory = kind(device, queue, manifest, initial, self.counters)
        self.clear(np.arange(manifest.batch_size))
        weakref.finalize(self, queue.wait).atexit = False  # work nobody waited for, a reset say, still needs the memory

    @property
    def recorded(self) -> dict[str, str]:
        """Per program and side of the memory: "recorded", or why its steps are put in one by one."""
        return {f"{name}, side {side}": call.recorded for (name, side), call in self._calls.items()}

    def resident(self, tokens: Any) -> DeviceTokens | None:
        return device_tokens(tokens, self._device.dlpack, self._queue.handle)

    def fetch(self, tokens: Resident) -> Ids:
        assert isinstance(tokens, DeviceTokens)
        with self._lock:
            return fetch_tokens(tokens, self._queue)

    def run(
        self, inputs: Mapping[str, Ids | Resident], counts: Ids, want: Want = "rows", commit: bool = True
    ) -> _Pending:
        if self._latest is not None:
            self._latest.wait()  # its inputs and its result lie where this step's will
        b = len(counts)
        length = next(iter(inputs.values())).shape[1]
        executable = self._programs.find(KINDS[want], length)
        kind, call, results = executable.program.kind, *self._call(executable)
        read = {name: value for name, value in inputs.items() if name != "targets" or kind == "score"}
        resident = {name: value for name, value in read.items() if isinstance(value, DeviceTokens)}
        values: dict[str, Array] = {name: value for name, value in read.items() if isinstance(value, np.ndarray)}
        result = executable.program.outputs[0]
        part = (b, *(() if kind == "last" else (length,)))
        self.valid[:b] = counts
        targets = inputs.get("targets")
        assert targets is None or isinstance(targets, np.ndarray)
        try:
            with self._lock:
                call.step(values | self.counts, resident)
                given = results.fetch(self._queue, result.name, (*part, *result.fixed[len(part) :]))
                event = self._queue.record()
                if commit:
                    self.advance()
            done = self._settled if call.steps == 2 else None
            self._latest = _Pending(kind, given, counts, targets, self.output, event, done, (call, self.memory))
        except BaseException:  # an interrupt, say: what is on its way still reads what the next step will overwrite
            self._queue.wait()
            raise
        return self._latest

    def _call(self, executable: Executable) -> tuple[DeviceCall, TensorBlock]:
        """The program tied to this side of the memory, for the first time or again."""
        name, side = executable.program.name, self.counters.side
        if (name, side) not in self._calls:
            with self._lock:
                memory = self.memory.addresses(side)
                if name not in self._blocks:
                    self._blocks[name] = open_blocks(self._device, executable, memory)
                self._calls[name, side] = DeviceCall(executable, self._queue, *self._blocks[name], memory)
        return self._calls[name, side], self._blocks[name][1]
