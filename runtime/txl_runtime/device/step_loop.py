"""The loop on a device of steps that return their whole state: the states never leave it, whatever their types."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Program
from txl_runtime.device.blocks import Part
from txl_runtime.device.call import DeviceCall, Step, room_for
from txl_runtime.device.context import Lock
from txl_runtime.device.cuda import Device, Queue
from txl_runtime.device.dlpack import DeviceTokens
from txl_runtime.device.interface import Executable
from txl_runtime.device.on_device import OnDevice
from txl_runtime.device.step_memory import StepMemory
from txl_runtime.streaming.loop import Resident
from txl_runtime.streaming.outputs import Output
from txl_runtime.streaming.programs import Want
from txl_runtime.streaming.state import Initial, RowState
from txl_runtime.streaming.steps import (
    Shapes,
    StepPrograms,
    StepResult,
    StepState,
    empty_outputs,
    shapes_after,
    start_shape,
)
from txl_runtime.types import Array, Ids, Indices


@dataclass(frozen=True, eq=False)
class _Held:
    """The state: which of the two blocks it stands in, and the shapes that it has there. There is one of each kind."""

    side: int
    shapes: Shapes


class _Read(NamedTuple):
    """An input of the caller and where it is staged; `whole` has to be zero where it is not written, or is None."""

    name: str
    staged: Array
    whole: Array | None


@dataclass
class _Route:
    """How segments of one shape go from one state that is held.

    Attributes:
        call: the program, tied to memory.
        after: what the step leads to.
        reads: what the caller hands in, on the host.
        valid: where the positions that count are staged, if the program reads them.
        parts: of all results.
        asked: those that have been asked for so far: they come with the step.
        step: what is put into the queue; None where another one has to be found.
    """

    call: DeviceCall
    after: _Held
    reads: tuple[_Read, ...]
    valid: Array | None
    parts: dict[str, Part]
    asked: frozenset[str] = frozenset()
    step: Step | None = field(default=None)


class _Returned(Mapping[str, Array]):
    """What a program returned: what came with the step, and the rest when it is asked for. See `Loop.run`."""

    def __init__(self, loop: DeviceStepLoop, route: _Route, arrived: dict[str, Array]) -> None:
        self._loop, self._route, self._there = loop, route, arrived

    def __getitem__(self, name: str) -> Array:
        self.bring((name,))
        return self._there[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._route.parts)

    def __len__(self) -> int:
        return len(self._route.parts)

    def bring(self, names: Collection[str]) -> None:
        """Return when the step is done and these are there."""
        loop, route = self._loop, self._route
        loop.finish()
        for name in names:
            if name not in self._there:
                self._there = {**self._there, name: loop.staging.bring(route.parts[name])}
                if name not in route.asked:
                    route.asked, route.step = route.asked | {name}, None


class _Pending(StepResult):
    """The result of a step that is still in the queue; to ask for any of it is to wait for the step."""

    __slots__ = ("_returned",)

    def __init__(
        self, manifest: Manifest, returned: _Returned, counts: Ids, columns: int, targets: Ids | None, output: Output
    ) -> None:
        super().__init__(manifest, returned, counts, columns, targets, output)
        self._returned = returned

    def outputs(self) -> dict[str, Array]:
        """See `loop.Result`."""
        self._returned.bring(tuple(self._returned))
        return super().outputs()


class DeviceStepLoop(StepState, OnDevice):
    """See `streaming.loop.Loop` and `OnDevice`.

    The program is chosen by the segment's length and the shapes that are held. Whatever it is, it reads one block and
    writes the other, so each program is tied to memory twice.
    """

    def __init__(
        self,
        manifest: Manifest,
        device: Device,
        queue: Queue,
        lock: Lock,
        executables: Mapping[str, Executable],
        initial: Initial,
        settled: Callable[[str], None],
    ) -> None:
        OnDevice.__init__(self, manifest, device, queue, lock, settled)
        StepState.__init__(self, manifest, initial, lock)
        self._executables = executables
        self._programs = StepPrograms(manifest, [item.program for item in executables.values()])
        self._independent = manifest.streams == "independent"
        self._kinds: dict[tuple[int, Shapes], _Held] = {}
        self._routes: dict[tuple[_Held, int, int, str], _Route] = {}
        self._fresh: Shapes = tuple(start_shape(state) for state in self.states)
        with lock:
            self.memory = StepMemory(device, queue, self._tail, self.states, self._starts, manifest.batch_size)
        self._now = self._kind(0, self._fresh)
        self.clear(np.arange(manifest.batch_size))

    def run(
        self, inputs: Mapping[str, Array | Resident], counts: Ids, want: Want = "rows", commit: bool = True
    ) -> StepResult:
        """See `Loop`. A segment in which nothing counts does nothing."""
        self.finish()  # what is on its way reads and writes what this step will
        length, targets = self._programs.length_of(inputs), inputs.get("targets")
        assert targets is None or isinstance(targets, np.ndarray)
        b, manifest, most = len(counts), self.manifest, max(counts.tolist())
        if not most:
            return StepResult(manifest, empty_outputs(manifest, b, length), counts, length, targets, self.output)
        name, there = next(((n, v) for n, v in inputs.items() if isinstance(v, DeviceTokens)), ("", None))
        key = (self._now, b, length, name)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = self._open_route(inputs, b, length, name)
        step = route.step or self._find_step(route, there is not None)
        for read, staged, whole in route.reads:
            if whole is not None:
                whole.fill(0)
            staged[...] = inputs[read]
        if route.valid is not None:
            route.valid[:b] = counts
            route.valid[b:] = 0 if self._independent else most
        call = route.call
        with self._lock:
            with self._tail:
                if there is not None:
                    self._send(call.inputs, name, there)
                step()
            if commit:
                self._now = route.after
        if call.settling:
            call.settling, self._settling = False, call.name
        return _Pending(manifest, _Returned(self, route, step.arrived), counts, length, targets, self.output)

    def clear(self, rows: Indices) -> None:
        with self._lock:
            found, now = np.unique(rows), self._now
            if len(found) == self._batch:
                self.memory.begin(now.side)
                self._now = self._kind(now.side, self._fresh)
                return
            for row in found.tolist():
                self.memory.clear(now.side, row, now.shapes)

    def reorder(self, rows: Indices) -> None:
        with self._lock:
            now = self._now
            self.memory.reorder(now.side, rows.tolist(), now.shapes)
            self._now = self._kind(1 - now.side, now.shapes)

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
        with self._lock:
            return self.memory.read(self._now.side, self._now.shapes)

    def hold(self, arrays: Sequence[Array | None]) -> None:
        with self._lock:
            self.memory.write(self._now.side, arrays)
            self._now = self._kind(self._now.side, tuple(None if array is None else array.shape for array in arrays))

    def _kind(self, side: int, shapes: Shapes) -> _Held:
        """The one object that says so, so that it can be compared by what it is."""
        return self._kinds.setdefault((side, shapes), _Held(side, shapes))

    def _open_route(self, inputs: Mapping[str, Array | Resident], b: int, length: int, resident: str) -> _Route:
        """The way of segments like this one; nothing may be on its way."""
        now, manifest = self._now, self.manifest
        program = self._programs.find(length, now.shapes)
        call = self._call(program, now.side)
        host = call.inputs.host
        reads, valid = [], None
        for entry in manifest.inputs:
            if entry.role == "valid":
                valid = host.get(entry.name)
            elif entry.name in host and entry.name != resident:
                whole = host[entry.name]
                staged = whole[tuple(slice(size) for size in np.shape(inputs[entry.name]))]
                reads.append(_Read(entry.name, staged, None if staged.shape == whole.shape else whole))
        parts = {entry.name: call.results.part(entry.name, entry.sizes(b, length)) for entry in manifest.outputs}
        self.staging.open_buffers(max((part.size for part in parts.values()), default=0))
        after = self._kind(1 - now.side, shapes_after(program, self.states))
        return _Route(call, after, tuple(reads), valid, parts)

    def _find_step(self, route: _Route, sent: bool) -> Step:
        """The step that brings what was asked for so far, as much of it as may arrive with a step."""
        parts: dict[str, Part] = {}
        for name, part in route.parts.items():
            if name in route.asked and self.staging.fits(room_for({**parts, name: part})):
                parts[name] = part
        if self.staging.grow(room_for(parts)):
            self._steps.forget()
            for other in self._routes.values():
                other.step = None
        route.step = self._steps.find(route.call, parts, self.staging.arrived, sent)
        return route.step

    def _call(self, program: Program, side: int) -> DeviceCall:
        """The program tied to memory of which one side is held, for the first time or again."""
        memory, specs = self.memory.addresses(program, side), (*program.inputs, *program.outputs)
        # Programs of one length read and return the same.
        key = tuple(spec for spec in specs if spec.name not in memory[0] and spec.name not in memory[1])
        return self._tie(self._executables[program.name], side, memory, key)
