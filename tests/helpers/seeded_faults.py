"""Faults that the code of the device could have, each put into it while a test runs, which has to find it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_ins import cuda as stand_in
from txl_runtime.device import backend, blocks, call, cuda, cuda_context, loop, placements, staging, tail
from txl_runtime.device.engines import opening, running

RING = (("plain", "ring"), ("short", "ring"))
ROLLED = (("plain", "rolled"),)
ANY = (("plain", "ring"), ("plain", "rolled"), ("recurrent", "replace"), ("counting", "replace"))
STEPS = (("recurrent", "replace"), ("growing", "replace"))
BIASED = (("biased", "ring"), ("biased", "rolled"))
Fault = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[Fault, tuple[tuple[str, str], ...]]] = {}


def fault(title: str, kinds: tuple[tuple[str, str], ...] = ANY) -> Callable[[Fault], Fault]:
    """Enter a fault; `kinds` are those of `random_operations` that can have it."""

    def enter(put: Fault) -> Fault:
        FAULTS[title] = put, kinds
        return put

    return enter


def _around(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a method by one that is given the old one first."""
    before = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments, **options: change(before, *arguments, **options))


# --- waiting ------------------------------------------------------------------------------------------------------


@fault("a result is read before its step is done")
def _(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Any) -> None:
        self._marked = self._unmarked = False

    patch.setattr(tail.Tail, "wait", forget)


@fault("an event is recorded before the work that it ends")
def _(patch: pytest.MonkeyPatch) -> None:
    record = tail.Tail._mark

    def enter(before: Any, self: Any) -> None:
        before(self)
        record(self)

    _around(patch, tail.Tail, "__enter__", enter)
    patch.setattr(tail.Tail, "_mark", lambda self: None)


@fault("an event is recorded once and never again")
def _(patch: pytest.MonkeyPatch) -> None:
    def mark(before: Any, self: Any) -> None:
        if not hasattr(self, "once"):
            self.once = before(self)
        self._marked, self._unmarked = True, False

    _around(patch, tail.Tail, "_mark", mark)


@fault("inputs are staged while the step before still reads them")
def _(patch: pytest.MonkeyPatch) -> None:
    def run(before: Any, self: Any, *arguments: Any, **options: Any) -> Any:
        self.finish = lambda: None
        try:
            result = before(self, *arguments, **options)
        finally:
            del self.finish
        return result

    _around(patch, loop.DeviceLoop, "run", run)


@fault("memory goes while work on it is on its way")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tail.Tail, "drain", lambda self: None)


@fault("the waiting thread has no context")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_context.Current, "__enter__", lambda self: None)


@fault("a piece of a result is read before it is there", STEPS)
def _(patch: pytest.MonkeyPatch) -> None:
    def take(self: Any, found: Any, which: int, start: int, size: int) -> None:
        found[start : start + size] = self._buffers[which][:size]

    patch.setattr(staging.Staging, "_take", take)


# --- memory that engines work in -----------------------------------------------------------------------------------


@fault("engines of two queues work in one memory")
def _(patch: pytest.MonkeyPatch) -> None:
    def open_loop(before: Any, self: Any, *arguments: Any) -> Any:
        self.queue = self.device.queue()
        return before(self, *arguments)

    _around(patch, backend.DeviceBackend, "open_loop", open_loop)


@fault("engines are given what the smallest needs", (("plain", "ring"), ("short", "rolled")))
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(opening, "max", min, raising=False)


@fault("the memory that engines work in goes when the first of them has it")
def _(patch: pytest.MonkeyPatch) -> None:
    def prepare(before: Any, self: Any, *arguments: Any) -> Any:
        launch, lent = before(self, *arguments), self.workspace
        self.workspace = lent and SimpleNamespace(address=lent.address, size=lent.size)
        return launch

    _around(patch, running.EngineExecutable, "_prepare", prepare)


@fault("what the loop records records itself as well")
def _(patch: pytest.MonkeyPatch) -> None:
    def init(before: Any, self: Any, library: Any, *arguments: Any) -> None:
        before(self, library, *arguments)
        if self._config is not None:
            self._config.cuda_graph_strategy = library.module.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE

    _around(patch, running.EngineExecutable, "__init__", init)


# --- weights that engines share ------------------------------------------------------------------------------------


def _laid_out(patch: pytest.MonkeyPatch, change: Callable[[dict[str, int]], dict[str, int]]) -> None:
    """Change where engines are told that their weights lie."""
    _around(patch, running.SharedWeights, "addresses", lambda before, self, given: change(dict(before(self, given))))


@fault("two weights of an engine change places", RING)
def _(patch: pytest.MonkeyPatch) -> None:
    _laid_out(patch, lambda places: dict(zip(places, [*places.values()][::-1], strict=True)))


@fault("one weight of an engine is forgotten", RING)
def _(patch: pytest.MonkeyPatch) -> None:
    _laid_out(patch, lambda places: dict([*places.items()][:-1]))


@fault("shared weights go when the first engine has their addresses", RING)
def _(patch: pytest.MonkeyPatch) -> None:
    def prepare(before: Any, self: Any, *arguments: Any) -> Any:
        launch, shared = before(self, *arguments), self.weights
        if shared is not None:
            shared._block = SimpleNamespace(address=shared._block.address, size=shared._block.size)
        return launch

    _around(patch, running.EngineExecutable, "_prepare", prepare)


@fault("nobody waits until shared weights are on the device", RING)
def _(patch: pytest.MonkeyPatch) -> None:
    def give(before: Any, executables: Any, bundle: Any, device: Any, queue: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(cuda.Queue, "wait", lambda self: None)
            before(executables, bundle, device, queue)

    for owner in (opening, stand_in):
        _around(patch, owner, "give_weights", give)


# --- copies in and out --------------------------------------------------------------------------------------------


@fault("a record does not have the copy in")
def _(patch: pytest.MonkeyPatch) -> None:
    def put(self: Any) -> None:
        if not self.call.runs:
            self.call.inputs.send(self.call.queue)
        self.call.engine()
        self.fetch()

    patch.setattr(call._Work, "put", put)


@fault("a record does not have the copies out")
def _(patch: pytest.MonkeyPatch) -> None:
    def fetch(before: Any, self: Any) -> None:
        if not self.call.runs:
            before(self)

    _around(patch, call._Work, "fetch", fetch)


@fault("results are copied before the program ran")
def _(patch: pytest.MonkeyPatch) -> None:
    def put(self: Any) -> None:
        self.call.inputs.send(self.call.queue)
        self.fetch()
        self.call.engine()

    patch.setattr(call._Work, "put", put)


@fault("inputs are copied behind the program")
def _(patch: pytest.MonkeyPatch) -> None:
    def put(self: Any) -> None:
        self.call.engine()
        self.call.inputs.send(self.call.queue)
        self.fetch()

    patch.setattr(call._Work, "put", put)


@fault("the record of another set of results is replayed")
def _(patch: pytest.MonkeyPatch) -> None:
    def find(self: Any, before: Any, parts: Any, staged: Any) -> Any:
        key = (before, ())
        if key not in self._made:
            self._made[key] = call.Step(before, parts, staged, None)
        return self._made[key]

    patch.setattr(call.Steps, "find", find)


@fault("all loops get their results in one place")
def _(patch: pytest.MonkeyPatch) -> None:
    place: list[Any] = []

    def grow(before: Any, self: Any, size: int) -> bool:
        if not place:
            before(self, 2**16)
            place.append(self.arrived)
        changed = self.arrived is not place[0]
        self.arrived = place[0]
        return changed

    _around(patch, staging.Staging, "grow", grow)


@fault("the record of the other side of the memory is replayed", ROLLED)
def _(patch: pytest.MonkeyPatch) -> None:
    def find(before: Any, self: Any, tied: Any, *arguments: Any) -> Any:
        self.first = getattr(self, "first", {})
        return before(self, self.first.setdefault(tied.name, tied), *arguments)

    _around(patch, call.Steps, "find", find)


@fault("rows of results are taken for one piece")
def _(patch: pytest.MonkeyPatch) -> None:
    def part(before: Any, *arguments: Any) -> Any:
        found = before(*arguments)
        return found._replace(pitch=found.width)

    _around(patch, blocks.Results, "part", part)


@fault("results are copied a row short")
def _(patch: pytest.MonkeyPatch) -> None:
    def fetch(before: Any, self: Any, *arguments: Any) -> None:
        before(self._replace(rows=max(1, self.rows - 1)), *arguments)

    _around(patch, blocks.Part, "fetch", fetch)


# --- counts -------------------------------------------------------------------------------------------------------


def _stale(patch: pytest.MonkeyPatch, index: int) -> None:
    """One of the counters [valid, fill, head] is staged as it was when the program was tied to memory."""

    def staged(before: Any, self: Any, tied: Any) -> Any:
        found = []
        for places, counts in before(self, tied):
            rows, values = (np.atleast_2d(array) for array in (places, counts))
            found += [(rows[row], values[row].copy() if row == index else values[row]) for row in range(len(rows))]
        return tuple(found)

    _around(patch, loop.DeviceLoop, "_staged", staged)


for index, (counter, kinds) in enumerate({"valid": RING[:1] + ROLLED, "fill": RING[:1] + ROLLED, "head": RING}.items()):
    fault(f"{counter} is stale", kinds)(partial(_stale, index=index))


@fault("a step that is not committed is", ANY)
def _(patch: pytest.MonkeyPatch) -> None:
    def run(before: Any, self: Any, inputs: Any, counts: Any, want: Any = "rows", commit: bool = True) -> Any:
        return before(self, inputs, counts, want, True)

    _around(patch, loop.DeviceLoop, "run", run)


@fault("a step is committed before its work is in the queue", RING)
def _(patch: pytest.MonkeyPatch) -> None:
    def run(before: Any, self: Any, inputs: Any, counts: Any, want: Any = "rows", commit: bool = True) -> Any:
        if commit:
            self.finish()
            self._computed = self._batch if self.count(counts) else 0
            self.commit()
        return before(self, inputs, counts, want, False)

    _around(patch, loop.DeviceLoop, "run", run)


# --- memory -------------------------------------------------------------------------------------------------------


@fault("sides are swapped", (*ROLLED, *STEPS))
def _(patch: pytest.MonkeyPatch) -> None:
    def addresses(before: Any, self: Any, program: Any, side: int) -> Any:
        return before(self, program, 1 - side)

    _around(patch, placements.DevicePlacement, "addresses", addresses)


@fault("both sides are one", (*ROLLED, *STEPS))
def _(patch: pytest.MonkeyPatch) -> None:
    _around(
        patch, placements.DevicePlacement, "addresses", lambda before, self, program, side: before(self, program, 0)
    )


@fault("the side does not turn", (*ROLLED, *STEPS))
def _(patch: pytest.MonkeyPatch) -> None:
    def run(before: Any, self: Any, *arguments: Any, **options: Any) -> Any:
        side = self.counters.side
        result = before(self, *arguments, **options)
        self.counters.sides[:] = side
        return result

    _around(patch, loop.DeviceLoop, "run", run)


@fault("spilled rows are not moved to the front", RING)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placements.Ring, "spill", lambda self, row, count: None)


@fault("one spilled row stays behind", RING)
def _(patch: pytest.MonkeyPatch) -> None:
    _around(patch, placements.Ring, "spill", lambda before, self, row, count: before(self, row, count - 1))


@fault("spilled rows of another sequence are moved", RING)
def _(patch: pytest.MonkeyPatch) -> None:
    _around(patch, placements.Ring, "spill", lambda before, self, row, count: before(self, 0, count))


@fault("nothing is cleared", (*BIASED, *STEPS))
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placements.DevicePlacement, "clear", lambda self, rows: None)


@fault("of several states one is cleared", (("counting", "replace"), ("recurrent", "replace")))
def _(patch: pytest.MonkeyPatch) -> None:
    def clear(self: Any, side: int, rows: Any, shapes: Any) -> None:
        for row in rows:
            self._begin(side, row, next(iter(self._pieces(shapes))))

    patch.setattr(placements.DevicePlacement, "_clear", clear)


@fault("the template is not copied", (*BIASED, ("counting", "replace"), ("recurrent", "replace")))
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placements.DevicePlacement, "_keep", lambda self, fresh: 0)


@fault("zeros are half as wide", (("plain", "rolled"), *STEPS))
def _(patch: pytest.MonkeyPatch) -> None:
    def zero(before: Any, self: Any, to: int, width: int, rows: int = 1, pitch: int = 0) -> None:
        before(self, to, width // 2, rows, pitch)

    _around(patch, cuda.Queue, "zero", zero)


@fault("new memory is not zeroed", ANY)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda.Queue, "zero", lambda *_, **__: None)


@fault("sequences change places without a spare", RING)
def _(patch: pytest.MonkeyPatch) -> None:
    def reorder(self: Any, rows: Any, side: int) -> None:
        (pieces,) = self._pieces(())
        with self._tail:
            for row, old in enumerate(rows.tolist()):
                if row != old:
                    self._copy(self._at(0, row, pieces), self._at(0, old, pieces), pieces)
        self.clear(np.arange(len(rows), self._batch))

    patch.setattr(placements.Ring, "reorder", reorder)


@fault("sequences are taken from the wrong row", ANY)
def _(patch: pytest.MonkeyPatch) -> None:
    for owner in (placements.Ring, placements.DevicePlacement):
        _around(patch, owner, "reorder", lambda before, self, rows, side: before(self, np.maximum(rows - 1, 0), side))


@fault("a row that is put goes to another sequence", ANY)
def _(patch: pytest.MonkeyPatch) -> None:
    for owner in (placements.Rolled, placements.Replaced):
        _around(patch, owner, "put", lambda before, self, row, tensors: before(self, 0, tensors))


@fault("states grow without their shapes", (("growing", "replace"),))
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placements, "shapes_after", lambda program, states: tuple(tuple(state.shape) for state in states))


@fault("two threads put work in at once", (("plain", "ring"),))
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(backend, "open_lock", contextlib.nullcontext)


THREADED = "two threads put work in at once"
"""The fault that shows in threads alone."""
