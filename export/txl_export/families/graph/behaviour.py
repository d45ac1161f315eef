"""What a foreign graph does along its axes and over many runs: sequences, positions, and how long a change lasts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from txl_export.families.graph.pairing import State
from txl_export.families.graph.running import EndedError, RunError, Runner
from txl_export.families.graph.trying import Inputs

STEPS = 256
"""Runs over which a change of a state is followed."""
SECONDS = 10.0
"""That following the changes of all states may take together."""
TOLD = 1e-6
"""What counts as another result, relative to its largest number: rounding is none."""
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Lasting:
    """How long a change of a state can be told.

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
        """Whether the change could be told at the last run that was looked at."""
        return 0 < self.runs == self.followed


@dataclass
class Axes:
    """What the axes are; each as the name of an input or output with the number of its axis.

    Attributes:
        batch: where sequences stand; empty where that could not be found.
        sequences: how many there are, None where any number runs.
        independent: whether a sequence is what it would be without the others; None where there is but one.
        reaching: inputs through which a sequence reaches another one.
        segment: where positions stand that come one after the other.
        lengths: sizes of the segment that run; empty where it is fixed.
    """

    batch: dict[str, int] = field(default_factory=dict)
    sequences: int | None = None
    independent: bool | None = None
    reaching: list[str] = field(default_factory=list)
    segment: dict[str, int] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)


class Behaviour:
    """A graph with its states, run along chains.

    Args:
        inputs: with sizes for which the graph runs.
        runner: with the graph.
        states: of it.
    """

    def __init__(self, inputs: Inputs, runner: Runner, states: Sequence[State]) -> None:
        self._inputs, self._runner, self._states = inputs, runner, states
        self._given = inputs.draw(0)
        self._first = runner.run(self._given)
        self._returned = {state.output for state in states}

    def axes(self) -> Axes:
        """Find sequences and positions by changing sizes, and single places along them.

        Raises:
            EndedError: see `Runner.run`.
        """
        found = Axes()
        sizes, roles = self._inputs.sizes, self._inputs.roles
        batch, segment = ([name for name, role in roles.items() if role == kind] for kind in ("batch", "segment"))
        if segment:
            length = sizes[segment[0]]
            found.segment = self._moving(segment, length + 1) or self._moving(segment, 2 * length)
            found.lengths = [n for n in dict.fromkeys((1, length, length + 1, 2 * length)) if self._runs(segment, n)]
        count = sizes[batch[0]] if batch else self._common(found.segment)
        if batch:
            found.batch = self._moving(batch, count + 1)
        elif count > 1:
            found.batch = dict.fromkeys(self._data(), 0)
        found.sequences = None if batch and found.batch else count
        if not segment:
            found.segment = self._causal(set(found.batch.items()))
        if count > 1 and found.batch:
            self._sequences(found, count)
        return found

    def lasting(self, told: Callable[[], None]) -> Iterable[Lasting]:
        """Follow a change of each state over runs, where none grows with each run; `told` is called after each.

        Raises:
            EndedError: see `Runner.run`.
        """
        if any(state.grows is not None for state in self._states):
            return
        until = time.monotonic() + min(SECONDS, self._runner.left * 0.8)
        for number, state in enumerate(self._states):
            now = time.monotonic()
            yield self._follow(state, now + (until - now) / (len(self._states) - number))
            told()

    # ---- axes

    def _data(self) -> list[str]:
        states = {state.input for state in self._states}
        return [name for name in self._given if name not in states and self._inputs.varies(name)]

    def _common(self, segment: Mapping[str, int]) -> int:
        """How many sequences there are where no axis is open: what all data and all other results begin with."""
        arrays = {**{name: self._given[name] for name in self._data()}, **self._first}
        firsts = {
            array.shape[0] if array.ndim and segment.get(name) != 0 else 1
            for name, array in arrays.items()
            if name not in self._returned
        }
        return firsts.pop() if len(firsts) == 1 and self._data() else 1

    def _runs(self, symbols: Sequence[str], size: int) -> bool:
        with contextlib.suppress(RunError):
            return bool(self._runner.run(self._inputs.draw(0, dict.fromkeys(symbols, size))))
        return False

    def _moving(self, symbols: Sequence[str], size: int) -> dict[str, int]:
        """The axes that grow where symbols do; none where the graph does not run then."""
        try:
            given = self._inputs.draw(0, dict.fromkeys(symbols, size))
            returned = self._runner.run(given)
        except RunError:
            return {}
        pairs = ((name, array, {**self._given, **self._first}[name]) for name, array in {**given, **returned}.items())
        return {
            name: next(axis for axis in range(array.ndim) if array.shape[axis] != before.shape[axis])
            for name, array, before in pairs
            if array.shape != before.shape and array.ndim == before.ndim
        }

    def _changed(self, names: Iterable[str], axis_of: Mapping[str, int], place: int) -> Arrays:
        """Results where some inputs are others at one place of an axis; none where the graph does not run then."""
        feeds, other = dict(self._given), self._inputs.draw(1)
        for name in names:
            feeds[name] = feeds[name].copy()
            at = (slice(None),) * axis_of[name] + (place,)
            feeds[name][at] = other[name][at]
        with contextlib.suppress(RunError):
            return self._runner.run(feeds)
        return {}

    def _sequences(self, found: Axes, count: int) -> None:
        """Whether the first sequence reaches the others, and through which inputs."""
        for state in self._states:
            if state.input not in found.batch:
                places = [axis for axis, size in enumerate(self._given[state.input].shape) if size == count]
                results = {axis: self._changed([state.input], {state.input: axis}, 0) for axis in places}
                own = [
                    axis for axis, after in results.items() if after and not self._reached(after, state.output, axis)
                ]
                if places:
                    found.batch[state.input] = found.batch[state.output] = (own or places)[0]
        for name, array in self._first.items():
            if name not in self._returned and array.ndim and array.shape[0] == count:
                found.batch.setdefault(name, 0)
        fed = {state.input for state in self._states} | {*self._data()}
        tried = {
            name: self._changed([name], found.batch, 0) for name in self._given if name in found.batch.keys() & fed
        }
        found.reaching = [
            name
            for name, after in tried.items()
            if any(self._reached(after, each, found.batch[each]) for each in after if each in found.batch)
        ]
        found.independent = not found.reaching if tried else None

    def _reached(self, after: Arrays, output: str, axis: int) -> bool:
        """Whether any place but the first one of a result has changed."""
        before, now = self._first[output], after[output]
        if before.shape != now.shape or axis >= before.ndim:
            return True
        others = (slice(None),) * axis + (slice(1, None),)
        return _differ(before[others], now[others])

    def _causal(self, taken: set[tuple[str, int]]) -> dict[str, int]:
        """Axes of data and results where a later place changes no earlier one, but an earlier one a later."""
        for name in self._data():
            for axis, size in enumerate(self._given[name].shape):
                if size < 2 or (name, axis) in taken:
                    continue
                first, last = (self._changed([name], {name: axis}, place) for place in (0, size - 1))
                for output, before in self._first.items() if first and last else ():
                    if output in self._returned or before.shape[axis : axis + 1] != (size,):
                        continue
                    earlier = (slice(None),) * axis + (slice(0, -1),)
                    if not _differ(before[earlier], last[output][earlier]) and self._reached(first, output, axis):
                        return {name: axis, output: axis}
        return {}

    # ---- chains

    def _follow(self, state: State, until: float) -> Lasting:
        name, other = state.input, self._inputs.draw(1)[state.input]
        held = [{each.input: self._given[each.input] for each in self._states} for _ in range(2)]
        held[1][name] = other if not np.array_equal(other, held[0][name]) else held[0][name] + np.ones((), other.dtype)
        runs = followed = 0
        itself = True
        while followed < STEPS and (time.monotonic() < until or not followed):
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
            if not any(_differ(held[0][each], held[1][each]) for each in held[0]):
                break
        return Lasting(name, runs, followed, itself)


def _differ(before: NDArray[Any], after: NDArray[Any]) -> bool:
    """Whether two results are further apart than rounding takes them."""
    if before.shape != after.shape:
        return True
    if before.dtype.kind != "f":
        return not np.array_equal(before, after)
    finite = np.isfinite(before)
    scale = np.abs(before[finite]).max(initial=1e-3)
    return not np.allclose(before, after, rtol=0, atol=TOLD * scale, equal_nan=True)
