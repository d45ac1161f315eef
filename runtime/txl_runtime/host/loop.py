"""The loop on the CPU: programs bound to arrays of NumPy once, and states that are never copied between segments.

Where graphs leave B open, a segment is computed up to the last sequence that is not idle. A sequence that is left out
keeps its side of the state; when it next runs beside one of the other side, it is copied there before: at most once for
each time that it was left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.open_batch import batch_axes
from txl_runtime.bundle.tables import Program
from txl_runtime.errors import UsageError
from txl_runtime.host.engine import Engine
from txl_runtime.host.placements import Replaced, Side, open_placements
from txl_runtime.host.softmax import open_output
from txl_runtime.streaming.loop import Loop, Resident
from txl_runtime.streaming.outputs import SegmentResult, idle_result
from txl_runtime.streaming.programs import Programs, Shapes, Want, features_of, leaves_rows_open
from txl_runtime.streaming.state import Initial, LoopState
from txl_runtime.types import Array, Arrays, Call, Floats, Ids

Copies = tuple[tuple[Array, Array], ...]
"""To, and from."""
Key = tuple[int, int, int, int, Shapes]
"""Of a segment: its length, b, how many sequences are computed, their side, and the shapes that are held there."""


class _Bound(NamedTuple):
    """A program tied to arrays of the first sequences on one side; without a call where it leaves rows open.

    Attributes:
        call: runs the program.
        before, after: copies around it, where the first sequences do not lie together in the arrays of all B.
        change: of states whose shapes may change, the set that is read and the one that is written.
    """

    call: Call | None = None
    before: Copies = ()
    after: Copies = ()
    change: tuple[Side, Side] | None = None


class _Route(NamedTuple):
    """How segments of one kind go.

    Attributes:
        program: that runs them.
        bound: its call.
        reads: the caller's inputs by name, the part of an array that each goes to, and the array where that is larger.
        behind: results of sequences that are not computed.
        rows, given: of the result, as `SegmentResult` has them.
    """

    program: Program
    bound: _Bound
    reads: tuple[tuple[str, Array, Array | None], ...]
    behind: tuple[Array, ...]
    rows: Floats | None
    given: Arrays


class HostLoop(LoopState, Loop):
    """See `streaming.loop.Loop`.

    Args:
        manifest: of the bundle.
        engine: that has opened the programs.
        update: their rule.
        programs: those of segments.
        initial: what states are before anything was seen.
    """

    piecewise = True

    def __init__(
        self, manifest: Manifest, engine: Engine, update: str, programs: Sequence[Program], initial: Initial
    ) -> None:
        states = manifest.states_of(update)
        super().__init__(manifest, states, nullcontext())
        self._manifest, self._engine, self._programs = manifest, engine, Programs(manifest, programs)
        self.placements = self._placements = open_placements(states, initial, self.counters)
        shaped = [placement for placement in self._placements if isinstance(placement, Replaced) and placement.shaped]
        self._shaped = shaped[0] if shaped else None
        self.output, features = open_output(programs[0].kind, manifest, engine), features_of(programs[0], manifest)
        self._width = 0 if features is None else int(features.shape[-1])
        self.leading = all(program.open_batch for program in programs) and not any(part.grows for part in shaped)
        self._exchanged: dict[str, tuple[dict[str, Array], dict[str, Array]]] = {}
        self._bound: dict[tuple[str, int, int], _Bound] = {}
        self._routes: dict[Key, _Route] = {}
        self.clear(np.arange(manifest.batch_size))

    def resident(self, tokens: Any) -> None:
        """See `Loop`; there is nothing that is not read as an array."""
        return

    def fetch(self, tokens: Resident) -> Ids:
        """See `Loop`; there is nothing to fetch, since `resident` finds nothing."""
        raise UsageError(f"tokens are a {type(tokens).__name__}, expected an array in the host's memory")

    def run(
        self, inputs: Mapping[str, Array | Resident], counts: Ids, want: Want = "rows", commit: bool = True
    ) -> SegmentResult:
        """See `Loop`. What the result has is a view of what the program returned."""
        given: Mapping[str, Any] = inputs  # arrays alone, since `resident` finds nothing
        length, targets, rows = self._programs.length_of(given), given.get("targets"), self.count(counts)
        if not rows:
            return idle_result(self._manifest, self.output, self._width, counts, length, targets)
        if self.leading:
            self._join(rows)
        else:
            rows = self._batch
        side, shaped = self.counters.side, self._shaped
        key = length, len(counts), rows, side, () if shaped is None else shaped.sides[side].shapes
        route = self._routes.get(key) or self._open_route(key)
        for name, part, whole in route.reads:
            if whole is not None:
                whole.fill(0)
            part[...] = given[name]
        features, returned = self._compute(route, side) if route.bound.call else self._compute_open(route, key)
        for array in route.behind:
            array.fill(0)
        self._computed = rows
        if commit:
            self.commit()
        return SegmentResult(features, counts, length, targets, self.output, self._manifest.outputs, returned)

    def _compute(self, route: _Route, side: int) -> tuple[Floats | None, Arrays]:
        """Run a program on the arrays that it is bound to."""
        call, before, after, change = route.bound
        assert call is not None
        if change is not None and self._shaped is not None:
            self._shaped.settle(side, change[0])
        for to, array in before:
            to[...] = array
        call()
        for to, array in after:
            to[...] = array
        if change is not None and self._shaped is not None:
            self._shaped.sides[1 - side] = change[1]
        return route.rows, route.given

    def _compute_open(self, route: _Route, key: Key) -> tuple[Floats | None, Arrays]:
        """Run a program that leaves rows open; it returns new arrays, which are kept as they are."""
        program, (length, b, _, side, _), shaped = route.program, key, self._shaped
        assert shaped is not None
        fed = {**self._exchanged[program.name][0], **self.counts, **shaped.inputs(side)}
        found = self._engine.run(program, {spec.name: fed[spec.name] for spec in program.inputs})
        shaped.adopt(1 - side, found)
        return self._shown(program, found, b, length)

    def _join(self, rows: int) -> None:
        """Bring the first sequences to one side, the first one's. A sequence's state is the same before and after."""
        sides = self.counters.sides[:rows]
        if max(sides.tolist()) != min(sides.tolist()):  # numpy would take longer for so few values
            for row in np.flatnonzero(sides != sides[0]).tolist():
                for placement in self._placements:
                    placement.join(row, int(sides[0]))
                sides[row] = sides[0]

    def _open_route(self, key: Key) -> _Route:
        """The way of segments like this one."""
        length, b, rows, side, shapes = key
        program = self._programs.find("rows", length, shapes)
        taken, returned = self._exchanged.get(program.name) or self._exchange(program)
        reads = []
        for entry in self._manifest.inputs:
            if entry.name in taken:
                whole = taken[entry.name]
                part = whole[entry.axes.window(0, length, slice(b))]
                reads.append((entry.name, part, None if part.shape == whole.shape else whole))
        if leaves_rows_open(program):
            route = _Route(program, _Bound(), tuple(reads), (), None, {})
        else:
            axes = batch_axes(self._manifest, program)
            behind = tuple(
                array[(*[slice(None)] * axes[name], slice(rows, b))] for name, array in returned.items() if name in axes
            )
            bound = self._bound.get((program.name, side, rows)) or self._bind(program, side, rows)
            shown = self._shown(program, returned, b, length)
            route = _Route(program, bound, tuple(reads), behind if rows < b else (), *shown)
        if len(self._routes) > 4096:  # states that grow row by row have ever new shapes
            self._routes.clear()
        self._routes[key] = route
        return route

    def _exchange(self, program: Program) -> tuple[dict[str, Array], dict[str, Array]]:
        """Arrays for what a program reads beside states and counters, and for what it returns beside states."""
        states = self._manifest.states_of(program.update)
        carried = {name for state in states for name in (state.input, state.output)} | self.counts.keys()
        taken, returned = (
            {spec.name: np.zeros(spec.fixed, np.dtype(spec.dtype)) for spec in side if spec.name not in carried}
            for side in (program.inputs, program.outputs)
        )
        self._exchanged[program.name] = taken, returned
        return taken, returned

    def _bind(self, program: Program, side: int, rows: int) -> _Bound:
        """Tie a program to arrays of the first sequences, on one side."""
        (taken, returned), read = self._exchanged[program.name], {spec.name for spec in program.inputs}
        inputs = {**taken, **{name: count for name, count in self.counts.items() if name in read}}
        outputs = dict(returned)
        for placement in self._placements:
            more, after = placement.bound(program, side)
            inputs |= more
            outputs |= after
        axes = batch_axes(self._manifest, program)
        (inputs, before), (outputs, behind) = (_of_first(arrays, axes, rows) for arrays in (inputs, outputs))
        call, shaped = self._engine.bind(program, inputs, outputs), self._shaped
        change = shaped.around(program, side) if shaped is not None and shaped.grows else None
        found = _Bound(call, before, tuple((array, own) for own, array in behind), change)
        self._bound[program.name, side, rows] = found
        return found

    def _shown(self, program: Program, returned: Arrays, b: int, length: int) -> tuple[Floats | None, Arrays]:
        """What a result has of b sequences and T positions: views of the feature rows, and of the table's outputs."""
        features, rows, sequences, positions = features_of(program, self._manifest), None, slice(b), slice(length)
        if features is not None:
            rows = features.axes.rows(returned[features.name][features.axes.at(sequences, positions)])
        table = (entry for entry in self._manifest.outputs if entry.name in returned)
        return rows, {entry.name: returned[entry.name][entry.axes.at(sequences, positions)] for entry in table}


def _of_first(arrays: Arrays, axes: Mapping[str, int], rows: int) -> tuple[dict[str, Array], Copies]:
    """Arrays of the first sequences; what does not lie together gets an array of its own, paired with where it lies.

    Args:
        arrays: of all B, by name.
        axes: of sequences, by name.
        rows: how many.
    """
    first, pairs = dict(arrays), []
    for name, axis in axes.items():
        if name in first:
            part = first[name] = arrays[name][(*[slice(None)] * axis, slice(rows))]
            if not part.flags.c_contiguous:
                first[name] = np.zeros(part.shape, part.dtype)
                pairs.append((first[name], part))
    return first, tuple(pairs)
