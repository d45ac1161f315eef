"""The loop on the CPU: programs are bound once to NumPy arrays, and states mostly stay in place.

A state is copied between segments in four cases: its graphs leave the batch size open and its sequences are on both
sides (`placements`); its axis of sequences is not the first; a sequence is idle and the state's mask was removed from
the graph (`idle_masks`); or a segment wrote rows behind the last slot of a ring.

If graphs leave the batch size open, a segment is computed up to the last sequence that is not idle. The sequences after
it stay on their side. When such a sequence next runs together with a sequence on the opposite side, it is first copied
to that side: at most once for each time that it was left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np

from txl_runtime.bundle.axes import Axes
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Program, axes_of
from txl_runtime.host.engine import Engine
from txl_runtime.host.growing import Growing
from txl_runtime.host.placements import HostPlacement, Replaced, Ring, open_placements
from txl_runtime.host.softmax import open_output
from txl_runtime.streaming.loop import LoopState
from txl_runtime.streaming.outputs import SegmentResult, idle_result
from txl_runtime.streaming.programs import Programs, Shapes, Want, features_of
from txl_runtime.streaming.state import Initial
from txl_runtime.types import Array, Arrays, Call, Floats, Ids

Key = tuple[int, int, int, int, Shapes]
"""A kind of segment: (length, number of sequences b, number of computed sequences, their side, the states' shapes)."""


class _Route(NamedTuple):
    """The call and arrays for segments of one kind.

    Attributes:
        call: function that runs the program.
        reads: (name, part, whole) for each input from the caller: `part` receives the input; `whole` is the array
            around it, which is zeroed, or None if both are the same.
        behind: views of the results of sequences that are not computed; the loop sets them to 0.
        kept: (old, new) arrays, [B, ...] each, of the states in which the loop must restore idle sequences.
        rows, given: arguments of `SegmentResult`.
    """

    call: Call
    reads: tuple[tuple[str, Array, Array | None], ...]
    behind: tuple[Array, ...]
    kept: tuple[tuple[Array, Array], ...]
    rows: Floats | None
    given: Arrays


class HostLoop(LoopState):
    """The loop on the CPU; see `streaming.loop.Loop`.

    Args:
        initial: first values of the states.
        ring: the placement class for ring states.
    """

    piecewise = True

    def __init__(
        self,
        manifest: Manifest,
        engine: Engine,
        update: str,
        programs: Sequence[Program],
        initial: Initial,
        ring: type[HostPlacement] = Ring,
    ) -> None:
        states = manifest.states_of(update)
        super().__init__(manifest, states, nullcontext())
        self._manifest, self._engine, self._programs = manifest, engine, Programs(manifest, programs)
        self.output, features = open_output(programs[0].kind, manifest, engine), features_of(programs[0], manifest)
        self._width = 0 if features is None else int(features.shape[-1])
        replaced: type[HostPlacement] = Replaced
        if any(state.absent or state.rows is not None for state in states):
            replaced = Growing
        self.placements: tuple[HostPlacement, ...] = open_placements(states, initial, self.counters, replaced, ring)
        self._growing = next((placement for placement in self.placements if placement.grows), None)
        self._shapes: Sequence[Shapes] = ((), ()) if self._growing is None else self._growing.shapes
        self.leading = all(program.open_batch for program in programs) and self._growing is None
        self._arrays: dict[str, tuple[dict[str, Array], dict[str, Array]]] = {}
        self._calls: dict[tuple[str, int, int], Call] = {}
        self._apart: dict[tuple[str, int], Array] = {}
        self._routes: dict[Key, _Route] = {}
        self.clear(np.arange(manifest.batch_size))

    def run(self, inputs: Mapping[str, Array], counts: Ids, want: Want = "rows", commit: bool = True) -> SegmentResult:
        """Run one segment; see `Loop.run`. The result's arrays are views of the program's outputs."""
        length, targets, rows = self._programs.length_of(inputs), inputs.get("targets"), self.count(counts)
        if not rows:
            return idle_result(self._manifest, self.output, self._width, counts, length, targets)
        if not self.leading:
            rows = self._batch
        elif self.counters.apart:
            self._join(rows)
        side = self.counters.side
        key = length, len(counts), rows, side, self._shapes[side]
        route = self._routes.get(key) or self._open_route(key)
        for name, part, whole in route.reads:
            if whole is not None:
                whole.fill(0)
            part[...] = inputs[name]
        route.call()
        if route.kept:
            self._keep(route.kept, rows)
        for array in route.behind:
            array.fill(0)
        if commit:
            self.counters.advance(rows, self._spill)
        else:
            self._tried, self._computed = (inputs, len(counts)), rows
        return SegmentResult(route.rows, counts, length, targets, self.output, self._manifest.outputs, route.given)

    def _join(self, rows: int) -> None:
        """Copy the first `rows` sequences into the set of arrays that holds sequence 0, so that one step reads all."""
        sides = self.counters.sides[:rows]
        if max(sides.tolist()) != min(sides.tolist()):  # Python's max is faster than NumPy's for a few numbers
            for row in np.flatnonzero(sides != sides[0]).tolist():
                for placement in self.placements:
                    placement.join(row, int(sides[0]))
                sides[row] = sides[0]

    def _keep(self, states: Sequence[tuple[Array, Array]], rows: int) -> None:
        """Overwrite what the program wrote for idle sequences among the first `rows` with their old state."""
        counts = self.counters.valid[:rows].tolist()
        if 0 in counts:
            idle = [row for row, count in enumerate(counts) if not count]
            for before, after in states:
                for row in idle:
                    after[row] = before[row]

    def _open_route(self, key: Key) -> _Route:
        """Make the `_Route` for a kind of segment."""
        length, b, rows, side, shapes = key
        program = self._programs.find("rows", length, shapes)
        inputs, returned = self._exchanged(program)
        reads = []
        for entry in self._manifest.inputs:
            if entry.name in inputs:
                whole = inputs[entry.name]
                part = whole[entry.axes.window(0, length, slice(b))]
                reads.append((entry.name, part, None if part.shape == whole.shape else whole))
        outputs, features = [*self._manifest.outputs], features_of(program, self._manifest)
        shown = slice(b), slice(length)
        views = {entry.name: returned[entry.name][entry.axes.at(*shown)] for entry in outputs if entry.name in returned}
        row_view = None
        if features is not None:
            row_view = features.axes.rows(returned[features.name][features.axes.at(*shown)])
            outputs.append(features)
        behind = tuple(
            returned[entry.name][entry.axes.at(slice(rows, b))]
            for entry in outputs
            if rows < b and entry.name in returned and entry.axes.batch is not None
        )
        call = self._calls.get((program.name, side, rows)) or self._bind(program, side, rows)
        names = self._engine.kept(program) if rows > 1 else ()  # a sequence that is computed alone is not idle
        pairs = tuple(pair for placement in self.placements for pair in placement.kept(names, side) if names)
        if len(self._routes) > 4096:  # a state that grows by a row per step has a new shape in every step
            self._routes.clear()
        self._routes[key] = _Route(call, tuple(reads), behind, pairs, row_view, views)
        return self._routes[key]

    def _exchanged(self, program: Program) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return (arrays of inputs except states and counters, arrays of outputs except states) of a program."""
        if program.name not in self._arrays:
            states = self._manifest.states_of(program.update)
            carried = {name for state in states for name in (state.input, state.output)} | self.counts.keys()
            inputs, returned = (
                {spec.name: np.zeros(spec.fixed, np.dtype(spec.dtype)) for spec in side if spec.name not in carried}
                for side in (program.inputs, program.outputs)
            )
            self._arrays[program.name] = inputs, returned
        return self._arrays[program.name]

    def _bind(self, program: Program, side: int, rows: int) -> Call:
        """Return a call that runs a program on the first `rows` sequences, whose states are on `side`."""
        state_inputs, returned = self._exchanged(program)
        names = {spec.name for spec in program.inputs}
        inputs = {**state_inputs, **{name: counts for name, counts in self.counts.items() if name in names}}
        outputs, growing = dict(returned), self._growing
        for placement in self.placements:
            if placement is not growing:
                read, written = placement.bound(program, side)
                inputs |= read
                outputs |= written
        if growing is None:
            call = self._call_of_first(program, inputs, outputs, rows)
        else:
            call = growing.call(self._engine, program, side, inputs, outputs)
        self._calls[program.name, side, rows] = call
        return call

    def _call_of_first(self, program: Program, inputs: Arrays, outputs: Arrays, rows: int) -> Call:
        """Return a call for the first `rows` sequences, which also copies arrays whose first part is not contiguous."""
        axes = axes_of(self._manifest, program)
        (bound, before), (filled, after) = (self._of_first(arrays, axes, rows) for arrays in (inputs, outputs))
        run = self._engine.bind(program, bound, filled)
        if not before and not after:
            return run

        def call() -> None:
            for array, part in before:
                np.copyto(array, part)
            run()
            for array, part in after:
                np.copyto(part, array)

        return call

    def _of_first(
        self, arrays: Arrays, axes: Mapping[str, Axes], rows: int
    ) -> tuple[Arrays, list[tuple[Array, Array]]]:
        """Return the first `rows` sequences of arrays, and a pair (copy, part) for each part that is not contiguous.

        For example, [L, :rows, F] of [L, B, F] needs a copy. A copy is not needed between two steps, so the copies for
        all values of `rows` share memory.
        """
        first, apart = {name: array[axes[name].at(slice(rows))] for name, array in arrays.items()}, []
        for name, part in first.items():
            if not part.flags.c_contiguous:
                key = name, arrays[name].size
                if key not in self._apart:
                    self._apart[key] = np.zeros(arrays[name].size, part.dtype)
                first[name] = self._apart[key][: part.size].reshape(part.shape)
                apart.append((first[name], part))
        return first, apart
