"""Run a foreign graph along its axes and many times, for its sequences, positions, and how long a change lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from txl_runtime.sandbox.process import EndedError
from txl_runtime.types import Array, Arrays

from txl_export.families.graph.find.pairing import State
from txl_export.families.graph.find.trying import Inputs, other_than
from txl_export.families.graph.take.running import RunError, Runner

STEPS = 256
"""Runs over which a change of a state is followed."""
SECONDS = 4.0
"""Processor time that following the changes of all states may take together."""
TOLD = 1e-6
"""Results differ that are further apart than this, relative to the largest number: rounding is none."""


@dataclass(frozen=True)
class Lasting:
    """The runs after which a change of a state can still be told.

    Attributes:
        state: its input's name.
        runs: the last run whose other results differ, counted from 1; 0 where none does, so that the state is dead.
        followed: runs that were looked at.
        itself: whether the state's own output differs still.
    """

    state: str
    runs: int
    followed: int
    itself: bool

    @property
    def open(self) -> bool:
        """The change could be told at the last run that was looked at."""
        return 0 < self.runs == self.followed


@dataclass
class Axes:
    """Axes of sequences and positions, each as the name of an input or output with the number of its axis.

    Attributes:
        batch: where sequences stand; empty where that could not be found.
        sequences: how many there are, None where any number runs.
        independent: whether a sequence is what it would be without the others; None where there is but one.
        reaching: inputs through which a sequence reaches another one.
        segment: where positions stand that come one after the other.
        positions: the same where an output has as many as an input, so that a chain of segments is a sequence.
        lengths: sizes of the segment that run; empty where it is fixed.
    """

    batch: dict[str, int] = field(default_factory=dict)
    sequences: int | None = None
    independent: bool | None = None
    reaching: list[str] = field(default_factory=list)
    segment: dict[str, int] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)


class Behaviour:
    """A graph with its states, run along chains; its first run was found."""

    def __init__(self, inputs: Inputs, runner: Runner, states: Sequence[State]) -> None:
        self._inputs, self._runner, self._states = inputs, runner, states
        self._given, self._first = inputs.given, inputs.first
        self._returned = {state.output for state in states}

    def axes(self) -> Axes:
        """Find sequences and positions: by the nodes, by the names of open sizes, then axis 0.

        Raises:
            EndedError: see `Runner.run`.
        """
        found, sizes, roles = Axes(), self._inputs.sizes, self._inputs.roles
        batch, segment = ([name for name, role in roles.items() if role == kind] for kind in ("batch", "segment"))
        if segment:
            length = sizes[segment[0]]
            moving = {n: self._moving(segment, n) for n in sorted({1, length, length + 1, 2 * length})}
            found.lengths = [n for n, axes in moving.items() if axes is not None]
            found.segment = moving[length + 1] or moving[2 * length] or {}
        kinds, shapes = self._inputs.structure.kinds, self._shapes()
        found.segment = (found.segment or self._fixed(kinds.positions)) | dict(self._inputs.told)
        if batch:
            count = sizes[batch[0]]
            found.batch = self._moving(batch, count + 1) or {}
        else:
            spread = self._fixed(kinds.sequences)
            count = next((shapes[name][axis] for name, axis in spread.items()), 0) or self._common(found.segment)
            if count > 1:
                found.batch = spread or {name: 0 for name in self._data() if found.segment.get(name) != 0}
        found.sequences = None if batch and found.batch else count
        if count > 1 and found.batch:
            self._sequences(found, count)
        found.positions = self._come_back(found) | dict(self._inputs.told)
        return found

    def lasting(self, told: Callable[[], None]) -> Iterable[Lasting]:
        """Follow a change of each state over runs, where none grows with each run; `told` is called after each.

        Raises:
            EndedError: see `Runner.run`.
        """
        if any(state.grows is not None for state in self._states):
            return
        end = self._runner.left - min(SECONDS, self._runner.left * 0.8)
        for number, state in enumerate(self._states):
            left = self._runner.left
            yield self._follow(state, left - (left - end) / (len(self._states) - number))
            told()

    # ---- axes

    def _data(self) -> list[str]:
        states = {state.input for state in self._states}
        return [name for name in self._given if name not in states and self._inputs.varies(name)]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of data, and of results that are no state."""
        results = {name: array.shape for name, array in self._first.items() if name not in self._returned}
        return {name: self._given[name].shape for name in self._data()} | results

    def _fixed(self, places: Mapping[str, int]) -> dict[str, int]:
        """Those axes of data and of results that are no state, where they have one size."""
        shapes = self._shapes()
        found = {name: places[name] for name in shapes if name in places}
        return found if len({shapes[name][axis] for name, axis in found.items()}) == 1 else {}

    def _common(self, segment: Mapping[str, int]) -> int:
        """Count sequences where neither a node nor a name says it: all data and all other results begin with as many.

        States have as many somewhere; of positions along the first axis, or frames, they have not.
        """
        firsts = {shape[0] if shape and segment.get(name) != 0 else 1 for name, shape in self._shapes().items()}
        held = [self._given[state.input].shape for state in self._states]
        common = firsts.pop() if len(firsts) == 1 and self._data() else 1
        return common if not held or any(common in sizes for sizes in held) else 1

    def _come_back(self, axes: Axes) -> dict[str, int]:
        """Axes of positions in data and results: only where something that is returned has as many of them."""
        inner = {name for state in self._states for name in (state.input, state.output)}
        places, arrays = (
            {name: axis for name, axis in axes.segment.items() if name not in inner},
            self._given | self._first,
        )
        if not places:  # of a graph that reads token ids: one of each sequence, or a fixed number
            for name in sorted(self._inputs.structure.rows.keys() & self._given.keys()):
                shape = self._given[name].shape
                others = [axis for axis in range(len(shape)) if axis != axes.batch.get(name, -1)]
                ones = [axis for axis in others if shape[axis] == 1]
                for axis in ones[-1:] or (others if len(others) == 1 else ()):
                    size = shape[axis : axis + 1]
                    results = [one for one, found in self._first.items() if found.shape[axis : axis + 1] == size]
                    places = {one: axis for one in (name, *results) if one not in inner}
        counts = {arrays[name].shape[axis] for name, axis in places.items()}
        return places if len(counts) == 1 and places.keys() & self._first.keys() else {}

    def _moving(self, symbols: Sequence[str], size: int) -> dict[str, int] | None:
        """The axes that have another size where symbols have this one; None where the graph does not run then."""
        try:
            given = self._inputs.draw(0, dict.fromkeys(symbols, size))
            arrays, before = {**given, **self._runner.run(given)}, {**self._given, **self._first}
        except RunError:
            return None
        sizes = {name: enumerate(zip(one.shape, before[name].shape, strict=False)) for name, one in arrays.items()}
        unlike = {name: [axis for axis, (now, then) in axes if now != then] for name, axes in sizes.items()}
        return {name: axes[0] for name, axes in unlike.items() if axes}

    def _changed(self, name: str, axis: int) -> Arrays:
        """Results where an input is another at the first place of an axis; none where the graph does not run then."""
        feeds, at = {**self._given, name: self._given[name].copy()}, (slice(None),) * axis + (0,)
        feeds[name][at] = self._inputs.draw(1)[name][at]
        with contextlib.suppress(RunError):
            return self._runner.run(feeds)
        return {}

    def _reached(self, after: Arrays, output: str, axis: int) -> bool:
        """Return whether a result has changed anywhere but at the first place."""
        before, now, at = self._first[output], after[output], (slice(None),) * axis + (slice(1, None),)
        return axis >= before.ndim or before.shape != now.shape or _differ(before[at], now[at])

    def _sequences(self, found: Axes, count: int) -> None:
        """Note whether the first sequence reaches the others, and through which inputs."""
        alike = self._inputs.structure.kinds.alike
        roots = {alike[place] for place in found.batch.items() if place in alike}
        for state in self._states:
            places = [axis for axis, size in enumerate(self._given[state.input].shape) if size == count]
            if places and state.input not in found.batch:
                own = [axis for axis in places if alike.get((state.input, axis)) in roots]
                found.batch[state.input] = found.batch[state.output] = [*own, *places][0]
        for name, shape in self._shapes().items():
            if name in self._first and shape[:1] == (count,) and found.segment.get(name) != 0:
                found.batch.setdefault(name, 0)
        fed = {state.input for state in self._states} | {*self._data()}
        tried = {name: self._changed(name, axis) for name, axis in found.batch.items() if name in fed}
        found.reaching = [
            name
            for name, after in tried.items()
            if any(self._reached(after, each, found.batch[each]) for each in after.keys() & found.batch.keys())
        ]
        found.independent = not found.reaching if tried else None

    # ---- chains

    def _follow(self, state: State, end: float) -> Lasting:
        """Follow a change while more than so much processor time is left, once at least."""
        given = {each.input: self._given[each.input] for each in self._states}
        name, runs, followed, itself = state.input, 0, 0, True
        held = [given, {**given, name: other_than(given[name], self._inputs.draw(1)[name])}]
        while followed < STEPS and (self._runner.left > end or not followed):
            feeds = self._inputs.draw(100 + followed)
            try:
                results = [self._runner.run({**feeds, **states}) for states in held]
            except (RunError, EndedError):
                if not followed:
                    raise
                break
            followed += 1
            if any(_differ(results[0][output], results[1][output]) for output in results[0] if output != state.output):
                runs = followed
            held = [{each.input: result[each.output] for each in self._states} for result in results]
            itself = _differ(*(states[name] for states in held))
            if not any(_differ(held[0][each], held[1][each]) for each in given):
                break
        return Lasting(name, runs, followed, itself)


def _differ(before: Array, after: Array) -> bool:
    """Return whether two results are further apart than rounding takes them."""
    if before.dtype.kind != "f" or before.shape != after.shape:
        return not np.array_equal(before, after)
    scale = np.abs(before[np.isfinite(before)]).max(initial=1e-3)
    return not np.allclose(before, after, rtol=0, atol=TOLD * scale, equal_nan=True)


def open_sizes(inputs: Inputs, states: Sequence[State], axes: Axes) -> dict[str, int]:
    """Sizes that a file leaves open and that neither a weight decides nor are sequences or positions, with numbers that
    ran.
    """
    grown = {state.input: state.grows for state in states}
    return {
        name_of_size(port.name, axis, size): inputs.given[port.name].shape[axis]
        for port in inputs.foreign.inputs
        for axis, size in enumerate(port.shape)
        if isinstance(size, str)
        and size not in inputs.fixed
        and axis not in (axes.batch.get(port.name), axes.positions.get(port.name), grown.get(port.name))
    }


def name_of_size(name: str, axis: int, symbol: str) -> str:
    """Name an open size of an input: its symbol, or INPUT:AXIS where the file leaves it unnamed."""
    return f"{name}:{axis}" if symbol.startswith("input ") else symbol
