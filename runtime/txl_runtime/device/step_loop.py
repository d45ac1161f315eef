"""The loop on a device of steps that return their whole state: the states never leave it, whatever their types."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import TensorSpec
from txl_runtime.device.call import DeviceCall, TensorBlock, open_blocks
from txl_runtime.device.dlpack import DeviceTokens, device_tokens, fetch_tokens
from txl_runtime.device.interface import Device, Event, Executable, Queue
from txl_runtime.device.step_memory import StepMemory
from txl_runtime.streaming.loop import Loop, Resident, Want
from txl_runtime.streaming.memory import Initial, RowState
from txl_runtime.streaming.outputs import Output, WholeOutput
from txl_runtime.streaming.steps import (
    Shapes,
    StepPrograms,
    StepResult,
    StepState,
    empty_outputs,
    shapes_after,
    start_shape,
)
from txl_runtime.types import Array, Arrays, Ids, Indices


@dataclass(frozen=True)
class _Held:
    """The state: which of the two blocks it stands in, and the shapes that it has there."""

    side: int
    shapes: Shapes


class _Returned(Mapping[str, Array]):
    """What a program returned: each tensor comes to the host when it is asked for.

    Args:
        results: where it lies.
        sizes: how much of each tensor means anything.
        held: what the step reads and writes, which has to live until it is done.
        done: called once, after the step, if anything is to be done then.
    """

    def __init__(
        self,
        queue: Queue,
        lock: threading.RLock,
        results: TensorBlock,
        sizes: Mapping[str, tuple[int, ...]],
        held: object,
        done: Callable[[], None] | None,
    ) -> None:
        self._queue, self._lock, self._results, self._sizes, self._done = queue, lock, results, sizes, done
        self._event: Event | None = queue.record()
        self._held: object = held
        self._there: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        self.bring((name,))
        return self._there[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def bring(self, names: Collection[str]) -> None:
        """Copy those that are not there yet, and wait for all of them at once."""
        missing = [name for name in names if name not in self._there]
        if missing:
            try:
                with self._lock:
                    found = {name: self._results.fetch(self._queue, name, self._sizes[name]) for name in missing}
                    self._event = self._queue.record()
                self.wait()
            except BaseException:  # an interrupt, say: copies on their way need the memory that they write to
                self._queue.wait()
                raise
            self._there |= found

    def wait(self) -> None:
        """Return when the step is done, and everything that was asked for."""
        if self._event is not None:
            self._event.wait()
            self._event = self._held = None
            done, self._done = self._done, None
            if done is not None:
                done()


class _Pending(StepResult):
    """The result of a step that is still in the queue; to ask for any of it is to wait for the step."""

    __slots__ = ("returned",)

    def __init__(
        self, manifest: Manifest, returned: _Returned, counts: Ids, columns: int, targets: Ids | None, output: Output
    ) -> None:
        super().__init__(manifest, returned, counts, columns, targets, output)
        self.returned = returned

    def outputs(self) -> dict[str, Array]:
        self.returned.bring(tuple(self.returned))
        return super().outputs()


class DeviceStepLoop(StepState, Loop):
    """See `streaming.loop.Loop` and `device.loop.DeviceLoop`: the queue, its lock and `settled` are the same.

    The program is chosen by the segment's length and the shapes that are held. Whatever it is, it reads one block and
    writes the other, so each program is tied to memory twice.
    """

    piecewise = False

    def __init__(
        self,
        manifest: Manifest,
        device: Device,
        queue: Queue,
        lock: threading.RLock,
        executables: Mapping[str, Executable],
        initial: Initial,
        settled: Callable[[], None],
    ) -> None:
        super().__init__(manifest, initial, lock)
        self._manifest, self._device, self._queue, self._settled = manifest, device, queue, settled
        self._executables, self._order = executables, lock
        self._programs = StepPrograms(manifest, [item.program for item in executables.values()])
        self._independent = manifest.streams == "independent"
        self.output: Output = WholeOutput(manifest)
        self._blocks: dict[tuple[TensorSpec, ...], tuple[TensorBlock, TensorBlock]] = {}
        self._calls: dict[tuple[str, int], tuple[DeviceCall, tuple[TensorBlock, TensorBlock], _Held]] = {}
        self._latest: _Returned | None = None
        self._fresh: Shapes = tuple(start_shape(state) for state in self.states)
        with self._lock:
            self.memory = StepMemory(device, queue, self.states, self._starts, manifest.batch_size)
        self._now = _Held(0, self._fresh)
        self.clear(np.arange(manifest.batch_size))
        weakref.finalize(self, queue.wait).atexit = False  # work nobody waited for, a reset say, still needs the memory

    @property
    def recorded(self) -> dict[str, str]:
        """Per program and side of the memory: "recorded", or why its steps are put in one by one."""
        return {f"{name}, side {side}": call.recorded for (name, side), (call, *_) in self._calls.items()}

    def resident(self, tokens: Any) -> DeviceTokens | None:
        entry = self._manifest.tokens
        if entry is None or entry.shape != ("B", "L"):
            return None
        return device_tokens(tokens, self._device.dlpack, self._queue.handle)

    def fetch(self, tokens: Resident) -> Ids:
        assert isinstance(tokens, DeviceTokens)
        with self._lock:
            return fetch_tokens(tokens, self._queue)

    def run(
        self, inputs: Mapping[str, Array | Resident], counts: Ids, want: Want = "rows", commit: bool = True
    ) -> StepResult:
        """See `Loop`. A segment in which nothing counts does nothing."""
        if self._latest is not None:
            self._latest.wait()  # its inputs and its result lie where this step's will
        length, targets = self._programs.length_of(inputs), inputs.get("targets")
        assert targets is None or isinstance(targets, np.ndarray)
        b, manifest = len(counts), self._manifest
        if not counts.any():
            return StepResult(manifest, empty_outputs(manifest, b, length), counts, length, targets, self.output)
        now = self._now
        program = self._programs.find(length, now.shapes)
        call, (taken, results), after = self._call(program.name, now.side)
        values, resident = self._stage(taken.host, inputs, counts)
        sizes = {output.name: output.sizes(b, length) for output in manifest.outputs}
        try:
            with self._lock:
                call.step(values, resident)
                done = self._settled if call.steps == 2 else None
                self._latest = _Returned(self._queue, self._order, results, sizes, (call, self.memory), done)
                if commit:
                    self._now = after
        except BaseException:  # an interrupt, say: what is on its way still reads what the next step will overwrite
            self._queue.wait()
            raise
        return _Pending(manifest, self._latest, counts, length, targets, self.output)

    def clear(self, rows: Indices) -> None:
        with self._lock:
            found, now = np.unique(rows), self._now
            if len(found) == self._batch:
                self.memory.begin(now.side)
                self._now = _Held(now.side, self._fresh)
                return
            for row in found.tolist():
                self.memory.clear(now.side, row, now.shapes)

    def reorder(self, rows: Indices) -> None:
        with self._lock:
            now = self._now
            self.memory.reorder(now.side, rows.tolist(), now.shapes)
            self._now = _Held(1 - now.side, now.shapes)

    def take(self, row: int, names: Collection[str] | None = None) -> RowState:
        with self._lock:
            return RowState(0, 0, self.memory.take(self._now.side, row, self._now.shapes, names))

    def put(self, row: int, state: RowState) -> None:
        held = {
            entry.name: self.memory.sequence_shape(index, shape)
            for index, (entry, shape) in enumerate(zip(self.states, self._now.shapes, strict=True))
            if shape is not None
        }
        if held != {name: array.shape for name, array in state.tensors.items()}:
            super().put(row, state)
            return
        with self._lock:
            self.memory.put(self._now.side, row, self._now.shapes, state.tensors)

    def held(self) -> list[Array | None]:
        return self.memory.read(self._now.side, self._now.shapes)

    def hold(self, arrays: Sequence[Array | None]) -> None:
        self.memory.write(self._now.side, arrays)
        self._now = _Held(self._now.side, tuple(None if array is None else array.shape for array in arrays))

    def _stage(
        self, host: Arrays, inputs: Mapping[str, Array | Resident], counts: Ids
    ) -> tuple[dict[str, Array], dict[str, DeviceTokens]]:
        """A segment's inputs that are on the host and those that are not; what no sequence has is zero."""
        values: dict[str, Array] = {}
        resident: dict[str, DeviceTokens] = {}
        for entry in self._manifest.inputs:
            if entry.name not in host:
                continue
            if entry.role == "valid":
                valid = values[entry.name] = np.zeros(self._batch, np.int32)
                valid[: len(counts)] = counts
                valid[len(counts) :] = 0 if self._independent else counts.max()
                continue
            value = inputs[entry.name]
            if isinstance(value, DeviceTokens):
                resident[entry.name] = value
            else:
                assert isinstance(value, np.ndarray)
                values[entry.name] = value
            if host[entry.name].shape != value.shape:
                host[entry.name].fill(0)
        return values, resident

    def _call(self, name: str, side: int) -> tuple[DeviceCall, tuple[TensorBlock, TensorBlock], _Held]:
        """The program tied to memory of which one side is held, for the first time or again; and what it leads to."""
        if (name, side) not in self._calls:
            with self._lock:
                executable = self._executables[name]
                program = executable.program
                memory = self.memory.addresses(program, side)
                sides = (*program.inputs, *program.outputs)
                key = tuple(spec for spec in sides if spec.name not in memory[0] and spec.name not in memory[1])
                if key not in self._blocks:  # programs of one length read and return the same
                    self._blocks[key] = open_blocks(self._device, executable, memory)
                blocks = self._blocks[key]
                call = DeviceCall(executable, self._queue, *blocks, memory)
                after = _Held(1 - side, shapes_after(program, self.states))
                self._calls[name, side] = call, blocks, after
        return self._calls[name, side]
