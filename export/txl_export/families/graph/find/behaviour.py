"""Runs a graph with changed inputs to find sequences and positions, and how many runs a change of a state lasts."""

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
"""Maximum number of runs for which a change of a state is followed."""
SECONDS = 4.0
"""Seconds of processor time for following changes of all states."""
TOLD = 1e-6
"""Largest difference at which results count as equal, relative to the largest number; rounding stays below it."""


@dataclass(frozen=True)
class Lasting:
    """The number of runs for which a change of a state shows in results.

    Attributes:
        state: the name of its input.
        runs: the last run, counted from 1, in which results besides the state's own output differ; 0 if the state has
            no effect.
        followed: the number of runs that were made.
        itself: whether the state's own output still differs in the last run.
    """

    state: str
    runs: int
    followed: int
    itself: bool

    @property
    def open(self) -> bool:
        """True if the change still showed in the last run."""
        return 0 < self.runs == self.followed


@dataclass
class Axes:
    """Axes of sequences and positions, by the name of an input or output.

    Attributes:
        batch: the axis of sequences; {} if it was not found.
        sequences: the number of sequences; None if any number runs.
        independent: whether the other sequences leave a sequence's results the same; None if there is only one
            sequence.
        reaching: inputs through which a sequence changes results of other sequences.
        segment: the axis of successive positions.
        positions: the same axis, if an output has as many positions as an input, so that segments can be chained.
        lengths: segment lengths that run; [] if the length is fixed.
    """

    batch: dict[str, int] = field(default_factory=dict)
    sequences: int | None = None
    independent: bool | None = None
    reaching: list[str] = field(default_factory=list)
    segment: dict[str, int] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)


class Behaviour:
    """Runs a graph with changed inputs, and in chains in which each run takes the states of the run before."""

    def __init__(self, inputs: Inputs, runner: Runner, states: Sequence[State]) -> None:
        self._inputs, self._runner, self._states = inputs, runner, states
        self._given, self._first = inputs.given, inputs.first
        self._returned = {state.output for state in states}

    def axes(self) -> Axes:
        """Find the axes of sequences and positions: from nodes, otherwise from names of open sizes, otherwise axis 0.

        Raises:
            EndedError: see `Runner.run`.
        """
        result, sizes, roles = Axes(), self._inputs.sizes, self._inputs.roles
        batch, segment = ([name for name, role in roles.items() if role == kind] for kind in ("batch", "segment"))
        if segment:
            length = sizes[segment[0]]
            moving = {n: self._moving(segment, n) for n in sorted({1, length, length + 1, 2 * length})}
            result.lengths = [n for n, axes in moving.items() if axes is not None]
            result.segment = moving[length + 1] or moving[2 * length] or {}
        kinds, shapes = self._inputs.structure.kinds, self._shapes()
        result.segment = (result.segment or self._fixed(kinds.positions)) | dict(self._inputs.told)
        if batch:
            count = sizes[batch[0]]
            result.batch = self._moving(batch, count + 1) or {}
        else:
            spread = self._fixed(kinds.sequences)
            count = next((shapes[name][axis] for name, axis in spread.items()), 0) or self._common(result.segment)
            if count > 1:
                result.batch = spread or {name: 0 for name in self._data() if result.segment.get(name) != 0}
        result.sequences = None if batch and result.batch else count
        if count > 1 and result.batch:
            self._sequences(result, count)
        result.positions = self._come_back(result) | dict(self._inputs.told)
        return result

    def lasting(self, told: Callable[[], None]) -> Iterable[Lasting]:
        """Yield for each state how long a change of it lasts, and call `told`; yield nothing if a state grows.

        Raises:
            EndedError: see `Runner.run`.
        """
        if any(state.grows is not None for state in self._states):
            return
        end = self._runner.seconds_left - min(SECONDS, self._runner.seconds_left * 0.8)
        for number, state in enumerate(self._states):
            left = self._runner.seconds_left
            yield self._follow(state, left - (left - end) / (len(self._states) - number))
            told()

    # ---- axes

    def _data(self) -> list[str]:
        states = {state.input for state in self._states}
        return [name for name in self._given if name not in states and self._inputs.varies(name)]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of data inputs, and of results that are no states."""
        results = {name: array.shape for name, array in self._first.items() if name not in self._returned}
        return {name: self._given[name].shape for name in self._data()} | results

    def _fixed(self, places: Mapping[str, int]) -> dict[str, int]:
        """Return the entries of `places` for data and results, if all these axes have one size; otherwise {}."""
        shapes = self._shapes()
        batch_axes = {name: places[name] for name in shapes if name in places}
        return batch_axes if len({shapes[name][axis] for name, axis in batch_axes.items()}) == 1 else {}

    def _common(self, segment: Mapping[str, int]) -> int:
        """Return the number of sequences that no node or name shows: the common first size of data and results.

        States must have this size on some axis; otherwise the first axis is positions or frames, and the number is 1.
        """
        firsts = {shape[0] if shape and segment.get(name) != 0 else 1 for name, shape in self._shapes().items()}
        held = [self._given[state.input].shape for state in self._states]
        common = firsts.pop() if len(firsts) == 1 and self._data() else 1
        return common if not held or any(common in sizes for sizes in held) else 1

    def _come_back(self, axes: Axes) -> dict[str, int]:
        """Return the axes of positions in data and results, if some result has the same number of positions."""
        inner = {name for state in self._states for name in (state.input, state.output)}
        places, arrays = (
            {name: axis for name, axis in axes.segment.items() if name not in inner},
            self._given | self._first,
        )
        # without other evidence, a graph of token ids takes one position for each sequence, or a fixed number of
        # positions
        if not places:
            for name in sorted(self._inputs.structure.rows.keys() & self._given.keys()):
                shape = self._given[name].shape
                others = [axis for axis in range(len(shape)) if axis != axes.batch.get(name, -1)]
                ones = [axis for axis in others if shape[axis] == 1]
                for axis in ones[-1:] or (others if len(others) == 1 else ()):
                    size = shape[axis : axis + 1]
                    results = [one for one, array in self._first.items() if array.shape[axis : axis + 1] == size]
                    places = {one: axis for one in (name, *results) if one not in inner}
        counts = {arrays[name].shape[axis] for name, axis in places.items()}
        return places if len(counts) == 1 and places.keys() & self._first.keys() else {}

    def _moving(self, symbols: Sequence[str], size: int) -> dict[str, int] | None:
        """Return the axes whose sizes change if `symbols` get a size; None if the graph does not run with that size."""
        try:
            inputs = self._inputs.draw(0, dict.fromkeys(symbols, size))
            arrays, before = {**inputs, **self._runner.run(inputs)}, {**self._given, **self._first}
        except RunError:
            return None
        sizes = {name: enumerate(zip(one.shape, before[name].shape, strict=False)) for name, one in arrays.items()}
        unlike = {name: [axis for axis, (now, then) in axes if now != then] for name, axes in sizes.items()}
        return {name: axes[0] for name, axes in unlike.items() if axes}

    def _changed(self, name: str, axis: int) -> Arrays:
        """Return results for an input changed at index 0 of an axis; {} if the graph does not run with this input."""
        feeds, at = {**self._given, name: self._given[name].copy()}, (slice(None),) * axis + (0,)
        feeds[name][at] = self._inputs.draw(1)[name][at]
        with contextlib.suppress(RunError):
            return self._runner.run(feeds)
        return {}

    def _reached(self, after: Arrays, output: str, axis: int) -> bool:
        """Return whether a result changed at an index other than 0 of an axis."""
        before, now, at = self._first[output], after[output], (slice(None),) * axis + (slice(1, None),)
        return axis >= before.ndim or before.shape != now.shape or _differ(before[at], now[at])

    def _sequences(self, axes: Axes, count: int) -> None:
        """Record whether the first sequence influences the others, and through which inputs."""
        alike = self._inputs.structure.kinds.alike
        roots = {alike[place] for place in axes.batch.items() if place in alike}
        for state in self._states:
            places = [axis for axis, size in enumerate(self._given[state.input].shape) if size == count]
            if places and state.input not in axes.batch:
                own = [axis for axis in places if alike.get((state.input, axis)) in roots]
                axes.batch[state.input] = axes.batch[state.output] = [*own, *places][0]
        for name, shape in self._shapes().items():
            if name in self._first and shape[:1] == (count,) and axes.segment.get(name) != 0:
                axes.batch.setdefault(name, 0)
        fed = {state.input for state in self._states} | {*self._data()}
        tried = {name: self._changed(name, axis) for name, axis in axes.batch.items() if name in fed}
        axes.reaching = [
            name
            for name, after in tried.items()
            if any(self._reached(after, each, axes.batch[each]) for each in after.keys() & axes.batch.keys())
        ]
        axes.independent = not axes.reaching if tried else None

    # ---- chains

    def _follow(self, state: State, end: float) -> Lasting:
        """Follow a change for at most `STEPS` runs, or until `end` seconds of processor time are left."""
        arrays = {each.input: self._given[each.input] for each in self._states}
        name, runs, followed, itself = state.input, 0, 0, True
        held = [arrays, {**arrays, name: other_than(arrays[name], self._inputs.draw(1)[name])}]
        while followed < STEPS and (self._runner.seconds_left > end or not followed):
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
            if not any(_differ(held[0][each], held[1][each]) for each in arrays):
                break
        return Lasting(name, runs, followed, itself)


def _differ(before: Array, after: Array) -> bool:
    """Return whether two results differ by more than rounding."""
    if before.dtype.kind != "f" or before.shape != after.shape:
        return not np.array_equal(before, after)
    scale = np.abs(before[np.isfinite(before)]).max(initial=1e-3)
    return not np.allclose(before, after, rtol=0, atol=TOLD * scale, equal_nan=True)


def open_sizes(inputs: Inputs, states: Sequence[State], axes: Axes) -> dict[str, int]:
    """Return open sizes, with values that ran, that are neither sequences nor positions nor fixed by a weight."""
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
    """Return the name of an open size of an input: its symbol, or INPUT:AXIS if the file gives it no name."""
    return f"{name}:{axis}" if symbol.startswith("input ") else symbol
