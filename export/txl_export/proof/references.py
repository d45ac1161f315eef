"""A model in plain PyTorch, run as the runtime runs streams.

Of independent sequences each has a state of its own. Sequences in lockstep run together, as the model has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import Output, StateTensor
from txl_runtime.ladder import limit_of
from txl_runtime.streaming.programs import Programs
from txl_runtime.streaming.stream import Stream
from txl_runtime.types import Array, Arrays, Ids

States: TypeAlias = dict[str, Array | None]
"""State tensors by name; None where one is absent."""
Indices: TypeAlias = NDArray[np.integer]
Returned: TypeAlias = Array | Callable[[int], Iterator[Array]]
"""An output of some sequences: the array; or, where that would be large, what gives one sequence's positions that
count, some at a time, each good until the next is asked for."""


class Reference(Protocol):
    """A step in plain PyTorch, arrays in and arrays out.

    Attributes:
        described: what it is and what it computes in, for the report.
        small: whether it is so small that one thread runs it best.
        large: whether it is so large that it needs the memory that the bundle can do without for a while.
        together: whether it computes independent sequences at once, none of which can change another. Its states have
            the batch first, and one step has as many positions that count in each. Otherwise each runs on its own, so
            that whatever a batch does to its neighbours cannot happen.
        masks: whether a log-probability may stand for "never" ("mask" in `ladder.LIMITS`).
        resumes: whether its states are those of the bundle, so that each side can go on from the other's.
        below: inputs of whole numbers of which nothing is known, with what random ones stay below.
        flags: inputs of truths, with the value that each has while an episode lasts, if it has one.
    """

    described: str
    small: bool
    large: bool = False
    together: bool = False
    masks: bool = True
    resumes: bool = True
    below: Mapping[str, int] = MappingProxyType({})
    flags: Mapping[str, bool] = MappingProxyType({})

    def fresh(self, count: int) -> States:
        """The states of that many sequences before the first step."""

    def step(
        self, inputs: Arrays, states: States, valid: Ids | None
    ) -> tuple[Mapping[str, Returned], Mapping[str, Array]]:
        """One step: outputs and states. `valid` counts rows, for a model that takes it. It may empty `states`."""

    def in_single(self) -> Reference | None:
        """The same in float32; None where it is that already."""

    def precisions(self) -> tuple[Reference, Reference] | None:
        """The same in float64 and in float32; None where it does not run in both."""
        single = self.in_single()
        return None if single is None else (self, single)

    def mask(self, nats: bool) -> float:
        """From which size on values of an output are compared relative to themselves."""
        return limit_of("mask") if self.masks or not nats else np.inf

    def shown(self, states: States) -> Iterator[tuple[str, Array]]:
        """Of one that does not resume: the memory rows of one sequence [1, rows, ...] by the bundle's names."""
        return iter(())


class ReferenceStreams:
    """Sequences that advance together through the reference.

    Attributes:
        count: b, how many.
        length_of: T of a segment's inputs.
    """

    def __init__(self, manifest: Manifest, reference: Reference, count: int) -> None:
        self._manifest, self.reference, self.count = manifest, reference, count
        self._apart = manifest.can.run_apart
        self._tables = {state.name: state for state in manifest.states}
        self.length_of = Programs(manifest, ()).length_of
        self._held: list[States] = []
        self.reset()

    def run(self, inputs: Arrays, counts: Ids, commit: bool = True) -> list[tuple[Indices, Mapping[str, Returned]]]:
        """One segment: sequences that ran, and their outputs, of all positions of the program that holds it.

        Inputs have as many positions as the segment; idle sequences are not run, and keep their state.
        """
        length = self._length(inputs)
        found = []
        for places, rows in self._groups(counts):
            given = {entry.name: self._padded(entry.name, inputs, rows, length) for entry in self._manifest.given}
            valid = counts[rows] if self._manifest.can.run_ragged else None
            outputs, after = self.reference.step(given, self._taken(places, commit), valid)
            if commit:
                for index, place in enumerate(places):
                    one = slice(index, index + 1) if len(places) > 1 else ...
                    self._held[place] = {name: values[one] for name, values in after.items()}
            found.append((rows, outputs))
        return found

    def state(self) -> States:
        """Every state tensor of all sequences, of a reference that resumes."""
        if not self._apart:
            return dict(self._held[0])
        joined: States = {}
        for name, table in self._tables.items():
            parts = [held[name] for held in self._held]
            some = [part for part in parts if part is not None]
            joined[name] = table.axes.concatenated(some) if some else None
        return joined

    def shown(self) -> Iterator[tuple[str, Array | None]]:
        """Every state tensor of all sequences, one at a time, because all of them can be several times the model;
        memory rows as `Stream.iter_memory` has them, zeros before those of shorter sequences.
        """
        if self.reference.resumes:
            yield from self.state().items()
            return
        for tensors in zip(*(self.reference.shown(held) for held in self._held), strict=True):
            rows = max(values.shape[1] for _, values in tensors)
            joined = np.zeros((len(tensors), rows, *tensors[0][1].shape[2:]), tensors[0][1].dtype)
            for row, (_, values) in enumerate(tensors):
                joined[row, rows - values.shape[1] :] = values[0]
            yield tensors[0][0], joined

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """As `Stream.reset`."""
        if not self._apart:
            self._held = [self.reference.fresh(self.count)]
        elif rows is None:
            self._held = [self.reference.fresh(1) for _ in range(self.count)]
        else:
            for row in rows:
                self._held[row] = self.reference.fresh(1)

    def select(self, rows: Sequence[int]) -> None:
        """As `Stream.select`."""
        self.count = len(rows)
        if self._apart:
            self._held = [dict(self._held[row]) for row in rows]
            return
        self._held = [{name: _along(self._tables[name], values, rows) for name, values in self._held[0].items()}]

    def copy(self, source: int, target: int) -> None:
        """Give one sequence the state of another."""
        self._held[target] = dict(self._held[source])

    def snapshot(self) -> list[States]:
        """What `restore` goes back to; arrays are never written to, so nothing is copied."""
        return [dict(held) for held in self._held]

    def restore(self, snapshot: list[States]) -> None:
        """Go back."""
        self._held = [dict(held) for held in snapshot]

    def _groups(self, counts: Ids) -> list[tuple[list[int], Indices]]:
        """Which sequences run together, with the places of their states."""
        if not self._apart:
            return [([0], np.arange(self.count))] if counts.any() else []
        live: list[int] = np.flatnonzero(counts).tolist()
        if not self.reference.together:
            return [([row], np.array([row])) for row in live]
        alike: dict[object, list[int]] = {}
        for row in live:
            shapes = [None if values is None else values.shape for values in self._held[row].values()]
            alike.setdefault((int(counts[row]), *shapes), []).append(row)
        return [(rows, np.array(rows)) for rows in alike.values()]

    def _taken(self, places: list[int], commit: bool) -> States:
        """The states of a group for one step, which may empty them; no more is copied than has to be."""
        if len(places) == 1:
            return self._held[places[0]] if commit else dict(self._held[places[0]])
        joined: States = {}
        for name in list(self._held[places[0]]):
            parts = [self._held[place].pop(name) if commit else self._held[place][name] for place in places]
            joined[name] = np.concatenate([part for part in parts if part is not None])
        return joined

    def _length(self, inputs: Arrays) -> int:
        """L of the smallest program that holds the segment."""
        length = self.length_of(inputs)
        return min(known for known in self._manifest.segment_lengths if known >= length)

    def _padded(self, name: str, inputs: Arrays, rows: Indices, length: int) -> Array:
        """An input of some sequences, with zeros behind the segment up to the program's length."""
        entry = next(entry for entry in self._manifest.given if entry.name == name)
        values = inputs[name][entry.axes.at(rows)]
        behind = length - entry.axes.length(values) if entry.axes.positions else 0
        widths = [(0, behind if axis in entry.axes.positions else 0) for axis in range(values.ndim)]
        return np.pad(values, widths) if widths else values


def hand_over(stream: Stream, manifest: Manifest, states: States) -> None:
    """Let a bundle's stream go on from the reference's states, as close as its types hold them."""
    types = {state.name: state.dtype for state in manifest.states}
    with np.errstate(over="ignore"):  # what is too large is infinite
        held = {name: values.astype(types[name]) for name, values in states.items() if values is not None}
    stream.restore(replace(stream.snapshot(), states=held))


def in_pieces(output: Output, returned: Returned, index: int, count: int) -> Iterator[tuple[int, int, Array]]:
    """What a reference returned for one sequence in the rows that count: rows [first, end) and values of each piece."""
    if not callable(returned):
        yield 0, count, returned[output.axes.window(0, count, index)]
        return
    first = 0
    for some in returned(index):
        yield first, first + len(some), some
        first += len(some)
    assert first == count, "every row that counts is compared"


def whole(returned: Returned, count: int) -> Array:
    """An output of `count` sequences as one array."""
    if not callable(returned):
        return returned
    return np.stack([np.concatenate([some.copy() for some in returned(row)]) for row in range(count)])


def run_together(
    sides: Sequence[ReferenceStreams], inputs: Arrays, counts: Ids
) -> Iterator[tuple[str, Indices, list[Returned]]]:
    """One segment on each side: every output of the sequences that ran, by "output" and its name, and every state."""
    for parts in zip(*[side.run(inputs, counts) for side in sides], strict=True):
        rows = parts[0][0]
        for name in parts[0][1]:
            yield f"output {name}", rows, [outputs[name] for _, outputs in parts]
    for tensors in zip(*[side.shown() for side in sides], strict=True):
        held: list[Returned] = [values for _, values in tensors if values is not None]
        if len(held) == len(sides):
            yield f"state {tensors[0][0]}", np.arange(len(counts)), held


def _along(table: StateTensor, values: Array | None, rows: Sequence[int]) -> Array | None:
    """Some sequences of a state; all of one that they share."""
    return None if values is None else values[table.axes.at(np.asarray(rows))]
