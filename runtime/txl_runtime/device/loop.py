"""The loop on a device: states stay in device memory, and all work goes into one queue."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Program
from txl_runtime.device.blocks import Inputs, Part, Results
from txl_runtime.device.call import DeviceCall, Step, Steps, open_blocks, room_for
from txl_runtime.device.cuda import Device, Queue
from txl_runtime.device.cuda_context import Lock
from txl_runtime.device.interface import Executable
from txl_runtime.device.placements import DevicePlacement, open_placements
from txl_runtime.device.staging import Staging
from txl_runtime.device.tail import Tail
from txl_runtime.streaming.best_words import BestWords
from txl_runtime.streaming.loop import LoopState
from txl_runtime.streaming.outputs import SegmentResult, StreamSoftmax, WholeSoftmax, idle_result
from txl_runtime.streaming.programs import Programs, Shapes, Want
from txl_runtime.streaming.state import Initial
from txl_runtime.types import Array, Floats, Ids

SHORTCUTS = {"last": 1, "next": 1, "score": 2}
"""Kinds of programs whose first output is the wanted result, and how many of the axes [b, T] that output has."""
Key = tuple[Want, int, int, int, Shapes]
"""A kind of segment: (wanted result, length, number of sequences b, side that is read, the states' shapes there)."""


@dataclass
class _Route:
    """The call and arrays for segments of one kind.

    Attributes:
        kind: the program's kind.
        call: the program, bound to memory.
        after: shapes of the states after the step, if they can change.
        reads: (name, part, whole) for each input from the caller: `part` of the staged array `whole` receives the
            input.
        counts: pairs (staged array, counters to copy there).
        parts: parts of all results by name, the main result first.
        asked: names of the results that are fetched together with the step.
        step: the step to put into the queue; None if a step must be chosen again.
        rows: the softmax's feature rows [b, T, F], if they are fetched together with the step.
        best: the best words, for a program "next".
    """

    kind: str
    call: DeviceCall
    after: Shapes
    reads: tuple[tuple[str, Array, Array | None], ...]
    counts: tuple[tuple[Array, Array], ...]
    parts: dict[str, Part]
    asked: frozenset[str]
    step: Step | None = None
    rows: Floats | None = None
    best: BestWords | None = None


class _Pending(SegmentResult):
    """The result of a segment that may still be in the queue; reading any part of the result waits for the segment."""

    __slots__ = ("_loop", "_route", "_there")

    def __init__(
        self, loop: DeviceLoop, route: _Route, there: dict[str, Array], counts: Ids, columns: int, targets: Ids | None
    ) -> None:
        self._loop, self._route, self._there, self._rows = loop, route, there, route.rows
        self._counts, self._columns, self._targets = counts, columns, targets
        self._output, self._table = loop.output, loop.manifest.outputs

    def rows(self) -> Floats:
        """Return the feature rows; see `loop.Result.rows`."""
        self._loop.finish()
        if self._rows is None:
            features = self._loop.manifest.logprobs
            assert features is not None, "a stream asks for log-probabilities where there are any"
            self._rows = features.axes.rows(self._bring((features.name,))[features.name])
        return self._rows

    def given(self) -> dict[str, Array]:
        """Return the outputs that the program returned; see `SegmentResult.given`."""
        arrays = self._bring(self._route.parts)
        self._loop.finish()  # wait for the copies that `_bring` put into the queue
        return arrays

    def last(self) -> Floats:
        """Return each sequence's last row; see `loop.Result.last`."""
        return self._first() if self._route.kind in ("last", "next") else super().last()

    def parts(self) -> BestWords | None:
        """Return the best words, or None; see `loop.Result.parts`."""
        self._loop.finish()
        return self._route.best

    def nll(self) -> Floats:
        """Return negative log-likelihoods; see `loop.Result.nll`."""
        return self._first() if self._route.kind == "score" else super().nll()

    def _first(self) -> Array:
        name = next(iter(self._route.parts))
        return self._bring((name,))[name]

    def _bring(self, names: Collection[str]) -> dict[str, Array]:
        """Wait for the segment; return its results by name, at least the results in `names`."""
        loop, route = self._loop, self._route
        loop.finish()
        for name in names:
            if name not in self._there:
                self._there = {**self._there, name: loop.staging.bring(route.parts[name])}
                if route.kind not in SHORTCUTS and name not in route.asked:
                    route.asked, route.step = route.asked | {name}, None
        return self._there


class DeviceLoop(LoopState):
    """The loop on a device; see `streaming.loop.Loop`.

    All loops of a backend share one queue. Its lock is held while work is put in, but not while a thread waits for
    results, so streams in different threads wait for each other only while the device works.

    Args:
        device: the device on which the loop runs.
        queue: the queue that orders all work.
        lock: the lock that a thread holds while it adds work.
        executables: the programs of the manifest's batch size.
        initial: first values of the states.
        settled: a function that is called when a program has run twice; engines have then compiled their kernels.
    """

    piecewise = leading = False
    turning = True
    output: StreamSoftmax

    def __init__(
        self,
        manifest: Manifest,
        device: Device,
        queue: Queue,
        lock: Lock,
        backend: str,
        executables: Sequence[Executable],
        initial: Initial,
        settled: Callable[[str], None],
    ) -> None:
        programs = [item.program for item in executables]
        states = manifest.states_of(programs[0].update)
        super().__init__(manifest, states, lock)
        self.manifest, self.output = manifest, WholeSoftmax(manifest)
        self._executables = {item.program.name: item for item in executables}
        self._programs = Programs(manifest, programs, backend)
        self._device, self._queue, self._settled = device, queue, settled
        self._tail = Tail(device, queue, lock)
        self.staging = Staging(device, queue, self._tail)
        self._blocks: dict[Hashable, tuple[Inputs, Results]] = {}
        self._calls: dict[tuple[str, int], DeviceCall] = {}
        self._steps, self._routes, self._routes_by_key = Steps(), dict[Hashable, _Route](), dict[Key, _Route]()
        self._settling: str | None = None
        # wait for unfinished work before the loop's memory is freed
        weakref.finalize(self, self._tail.drain).atexit = False
        with lock:
            opened = open_placements(device, queue, self._tail, states, initial, self.counters)
        self.placements: tuple[DevicePlacement, ...] = opened
        self._growing = next((placement for placement in opened if placement.grows), None)
        self.clear(np.arange(manifest.batch_size))

    @property
    def recorded(self) -> dict[str, str]:
        """The status of each call's records, by program and side: "recorded", or why its steps are not recorded."""
        return {f"{name}, side {side}": call.recording.said for (name, side), call in self._calls.items()}

    def finish(self) -> None:
        """Wait until all work that this loop put into the queue is done."""
        self._tail.wait()
        if self._settling is not None:
            program, self._settling = self._settling, None
            self._settled(program)

    def run(self, inputs: Mapping[str, Array], counts: Ids, want: Want = "rows", commit: bool = True) -> SegmentResult:
        """Run one segment; see `Loop.run`."""
        self.finish()  # the previous step uses the same staged inputs and results
        length, targets = self._programs.length_of(inputs), inputs.get("targets")
        if not self.count(counts):
            width = self.output.clusters[-1][1]
            return idle_result(self.manifest, self.output, width, counts, length, targets)
        side, growing = self.counters.side, self._growing
        shapes = () if growing is None else growing.shapes[side]
        key = want, length, len(counts), side, shapes
        route = self._routes_by_key.get(key) or self._find_route(key, inputs)
        step = route.step or self._find_step(route)
        for name, staged, whole in route.reads:
            if whole is not None:
                whole.fill(0)
            staged[...] = inputs[name]
        for staged, count in route.counts:
            staged[...] = count
        call = route.call
        with self._lock:
            with self._tail:
                step()
            if growing is not None:
                growing.shapes[1 - side] = route.after
            if commit:  # do what `commit` does, without taking the lock a second time
                self.counters.advance(self._batch, self._spill)
            else:
                self._tried, self._computed = (inputs, len(counts)), self._batch
        if call.settling:
            call.settling, self._settling = False, call.name
        return _Pending(self, route, step.arrived, counts, length, targets)

    def _find_route(self, key: Key, inputs: Mapping[str, Any]) -> _Route:
        """Make the `_Route` for a kind of segment; the loop must have no unfinished work."""
        want, length, b, side, _ = key
        shapes = tuple(shape for placement in self.placements for shape in placement.shapes[side])
        program = self._programs.find(want, length, shapes)
        call = self._tie(program, side)
        host = call.inputs.host
        input_shapes = {name: np.shape(value) for name, value in inputs.items() if name in host}
        which = program.name, side, b, length, *input_shapes
        if which not in self._routes:
            staged = ((name, host[name][tuple(map(slice, shape))], host[name]) for name, shape in input_shapes.items())
            reads = tuple((name, part, None if part.shape == whole.shape else whole) for name, part, whole in staged)
            parts = self._parts(program, call.results, b, length)
            asked, fits = self._wanted(program, parts), self.staging.fits
            late = [part.size for name, part in parts.items() if name not in asked or not fits(room_for({name: part}))]
            if late:
                self.staging.open_buffers(max(late))
            after = () if self._growing is None else self._growing.after(program)
            self._routes[which] = _Route(program.kind, call, after, reads, self._staged(call), parts, asked)
        self._routes_by_key[key] = self._routes[which]
        return self._routes_by_key[key]

    def _parts(self, program: Program, results: Results, b: int, length: int) -> dict[str, Part]:
        """Return the parts of a program's results for b sequences and `length` positions."""
        if program.kind not in SHORTCUTS:
            return {entry.name: results.part(entry.name, entry.sizes(b, length)) for entry in self.manifest.outputs}
        first, *others = results.addresses
        parts = {first: results.part(first, (b, length)[: SHORTCUTS[program.kind]])}
        return parts | {name: results.part(name, ()) for name in others}

    def _wanted(self, program: Program, parts: Mapping[str, Part]) -> frozenset[str]:
        """Return the names of the results to fetch together with the first step.

        For a program "step" the set is empty: the program returns all outputs, and the caller's reads show which are
        needed.
        """
        if program.kind == "step":
            return frozenset()
        first, *others = parts
        if program.kind != "next":
            return frozenset((first,))
        fits = self.staging.fits(room_for({name: parts[name] for name in others}))
        return frozenset(others) if fits else frozenset()

    def _find_step(self, route: _Route) -> Step:
        """Choose the step that fetches all results in `route.asked` that fit into staging memory."""
        parts: dict[str, Part] = {}
        for name, part in route.parts.items():
            if name in route.asked and self.staging.fits(room_for({**parts, name: part})):
                parts[name] = part
        if self.staging.grow(room_for(parts)):
            self._steps.forget()
            for other in self._routes.values():
                other.step = None
        step = self._steps.find(route.call, parts, self.staging.arrived)
        features, route.rows = self.manifest.logprobs, None
        if features is not None and features.name in parts and route.kind not in SHORTCUTS:
            route.rows = features.axes.rows(step.arrived[features.name])
        route.best = BestWords(self.manifest.clusters, step.arrived) if parts and route.kind == "next" else None
        route.step = step
        return step

    def _staged(self, call: DeviceCall) -> tuple[tuple[Array, Array], ...]:
        """Return pairs (staged array, counters to copy there) of a call; one pair if the program reads all counters."""
        read = [name for name in self.counts if name in call.inputs.host]
        if len(read) == len(self.counters.read):
            return ((call.inputs.rows(read[0], len(read)), self.counters.read),)
        return tuple((call.inputs.host[name], self.counts[name]) for name in read)

    def _tie(self, program: Program, side: int) -> DeviceCall:
        """Return the program's call for states on `side`; each call is made once.

        Programs whose inputs and outputs besides the states are the same share the blocks for these.
        """
        name = program.name
        if (name, side) not in self._calls:
            inputs, outputs = dict[str, int](), dict[str, int]()
            for placement in self.placements:
                before, after = placement.addresses(program, side)
                inputs |= before
                outputs |= after
            memory, executable = (inputs, outputs), self._executables[name]
            key = tuple(spec for spec in (*program.inputs, *program.outputs) if spec.name not in inputs | outputs)
            with self._lock, self._device.current():
                if key not in self._blocks:
                    self._blocks[key] = open_blocks(self._device, executable, memory, tuple(self.counts))
                self._calls[name, side] = DeviceCall(executable, self._queue, *self._blocks[key], memory)
        return self._calls[name, side]
