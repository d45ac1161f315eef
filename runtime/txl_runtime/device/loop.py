"""The loop on a device: memory that never leaves it, and work that is put into one queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from txl_runtime.device.memory import DeviceMemory, DeviceRing, DeviceRolled
from txl_runtime.device.on_device import OnDevice
from txl_runtime.errors import BackendError
from txl_runtime.streaming.loop import Resident
from txl_runtime.streaming.memory import LoopState, RowsResult
from txl_runtime.streaming.parts import Parts
from txl_runtime.streaming.programs import Want
from txl_runtime.streaming.state import Initial
from txl_runtime.types import Array, Floats, Ids, Indices

KINDS: dict[Want, tuple[str, ...]] = {
    "rows": ("logprobs",),
    "last": ("last", "next", "logprobs"),
    "next": ("next", "last", "logprobs"),
    "nll": ("score", "logprobs"),
}
"""The kinds of programs that compute what is wanted, the one of the least beside it first."""


class Programs:
    """Executables of one update rule. "logprobs" serve every call; the others are shortcuts.

    Args:
        backend: its name, for messages.
        executables: what is loaded.
    """

    def __init__(self, backend: str, executables: Sequence[Executable]) -> None:
        self._backend = backend
        self._executables = sorted(executables, key=lambda item: item.program.segment_length)
        self.all: tuple[Program, ...] = tuple(item.program for item in self._executables)

    def find(self, want: Want, length: int) -> Executable:
        """The program of the shortest segments that hold so many tokens; of several, the best for what is wanted.

        So a shortcut is not taken where log-probabilities have a shorter program, which is less work.

        Raises:
            BackendError: there is none.
        """
        kinds = KINDS[want]
        able = [item for item in self._executables if item.program.kind in kinds]
        fitting = [item for item in able if item.program.segment_length >= length]
        if not fitting:
            raise BackendError(f"backend {self._backend} has no program for {length} tokens; build the engines again")
        return min(fitting, key=lambda item: (item.program.segment_length, kinds.index(item.program.kind)))


class _Route(NamedTuple):
    """How segments of one kind and shape go, on one side of the memory.

    Attributes:
        kind: of the program: "logprobs" gives rows, "last", "next" and "score" what is wanted itself.
        reads: inputs of the caller, by name, and where each is staged.
        valid: where the positions that count are put.
        counts: where counters are staged, and the counters.
        step: what is put into the queue.
        rows: the program's first result where it arrives with the step.
        part: the same where it is still on the device.
        parts: of a program "next": what it returned beside.
        call: the program, tied to memory.
    """

    kind: str
    reads: tuple[tuple[str, Array], ...]
    valid: Ids
    counts: tuple[tuple[Array, Array], ...]
    step: Step
    rows: Floats | None
    part: Part
    parts: Parts | None
    call: DeviceCall


class _Pending(RowsResult):
    """The result of a step that is still in the queue; to ask for any of it is to wait for the step."""

    __slots__ = ("_given", "_loop", "_route")

    def __init__(self, loop: DeviceLoop, route: _Route, counts: Ids, targets: Ids | None) -> None:
        self._loop, self._route, self._given = loop, route, route.rows
        self._counts, self._targets, self._output = counts, targets, loop.output

    def rows(self) -> Floats:
        """See `loop.Result`."""
        self._loop.finish()
        if self._given is None:
            self._given = self._loop.staging.bring(self._route.part)
        return self._given

    def last(self) -> Floats:
        """See `loop.Result`."""
        return self.rows() if self._route.kind in ("last", "next") else super().last()

    def parts(self) -> Parts | None:
        """See `loop.Result`."""
        self._loop.finish()
        return self._route.parts

    def nll(self) -> Floats:
        """See `loop.Result`."""
        return self.rows() if self._route.kind == "score" else super().nll()


class DeviceLoop(LoopState, OnDevice):
    """See `streaming.loop.Loop` and `OnDevice`: the programs return log-probabilities, or what is made of them."""

    def __init__(
        self,
        manifest: Manifest,
        device: Device,
        queue: Queue,
        lock: Lock,
        programs: Programs,
        initial: Initial,
        settled: Callable[[str], None],
    ) -> None:
        update = programs.all[0].update
        OnDevice.__init__(self, manifest, device, queue, lock, settled)
        LoopState.__init__(self, update, manifest, lock)
        self._programs = programs
        self._routes: dict[tuple[str, tuple[int, int], int, bool], _Route] = {}
        kind = DeviceRing if update == "ring" else DeviceRolled
        with lock:
            self.memory: DeviceMemory = kind(device, queue, manifest, initial, self.counters, self._tail)
        self.clear(np.arange(manifest.batch_size))

    def run(
        self, inputs: Mapping[str, Array | Resident], counts: Ids, want: Want = "rows", commit: bool = True
    ) -> _Pending:
        """See `Loop`."""
        self.finish()  # what is on its way reads and writes what this step will
        tokens = next(iter(inputs.values()))
        there = tokens if isinstance(tokens, DeviceTokens) else None
        key = (want, tokens.shape, self.counters.side, there is not None)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = self._open_route(inputs, len(counts), want, there)
        for name, staged in route.reads:
            staged[...] = inputs[name]
        route.valid[...] = counts
        for staged, count in route.counts:
            staged[...] = count
        call = route.call
        with self._lock:
            with self._tail:
                if there is not None:
                    assert self.manifest.tokens is not None
                    self._send(call.inputs, self.manifest.tokens.name, there)
                route.step()
            if commit:
                self.advance()
        if call.settling:
            call.settling, self._settling = False, call.name
        targets = inputs.get("targets")
        assert targets is None or isinstance(targets, np.ndarray)
        return _Pending(self, route, counts, targets)

    def prepare_reorder(self, rows: Indices) -> None:
        """See `Loop`."""
        self.memory.prepare_reorder(rows)

    def _open_route(
        self, inputs: Mapping[str, Array | Resident], b: int, want: Want, there: DeviceTokens | None
    ) -> _Route:
        """The way of segments like this one; nothing may be on its way."""
        tokens = next(iter(inputs.values()))
        length = tokens.shape[1]
        executable = self._programs.find(want, length)
        side, kind = self.counters.side, executable.program.kind
        call = self._tie(executable, side, self.memory.addresses(side), executable.program.name, tuple(self.counts))
        first, *others = (s.name for s in executable.program.outputs if s.name in call.results.addresses)
        part = call.results.part(first, (b,) if kind in ("last", "next") else (b, length))
        parts = {name: call.results.part(name, ()) for name in others} if kind == "next" else {first: part}
        if not self.staging.fits(room_for(parts)):
            parts = {}
        if first not in parts:
            self.staging.open_buffers(part.size)
        if self.staging.grow(room_for(parts)):
            self._routes.clear()
            self._steps.forget()
        step = self._steps.find(call, parts, self.staging.arrived, there is not None)
        host = call.inputs.host
        given = {name: tuple(map(slice, value.shape)) for name, value in inputs.items() if value is not there}
        reads = tuple((name, host[name][cut]) for name, cut in given.items() if name in host)
        rows, counts = step.arrived.get(first), self._staged(call)
        best = Parts(self.manifest.clusters, step.arrived) if kind == "next" and parts else None
        return _Route(kind, reads, self.valid[:b], counts, step, rows, part, best, call)

    def _staged(self, call: DeviceCall) -> tuple[tuple[Array, Array], ...]:
        """Where a program's counters are staged, and those counters; all of them at once if it reads all."""
        read = [name for name in self.counts if name in call.inputs.host]
        if len(read) == len(self.counts):
            return ((call.inputs.rows(read[0], len(read)), self.counters.read),)
        return tuple((call.inputs.host[name], self.counts[name]) for name in read)
