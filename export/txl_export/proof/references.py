"""A model in plain PyTorch, run as the runtime runs streams.

Of independent sequences each runs on its own, at its own state: whatever a batch does to its neighbours cannot happen
here. Sequences in lockstep run together, as the model has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.tables import StateTensor
from txl_runtime.streaming.programs import Programs
from txl_runtime.streaming.stream import Stream
from txl_runtime.types import Array, Arrays, Ids

States: TypeAlias = dict[str, Array | None]
"""State tensors by name; None where one is absent."""
Indices: TypeAlias = NDArray[np.integer]


class Reference(Protocol):
    """A step in plain PyTorch, arrays in and arrays out.

    Attributes:
        described: what it is and what it computes in, for the report.
        small: whether it is so small that one thread runs it best.
    """

    described: str
    small: bool

    def fresh(self, count: int) -> States:
        """The states of that many sequences before the first step."""

    def step(
        self, inputs: Arrays, states: Mapping[str, Array | None], valid: Ids | None
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """One step: outputs and states. `valid` counts rows, for a model that takes it."""

    def in_single(self) -> Reference | None:
        """The same in float32; None where it is that already."""


class ReferenceStreams:
    """Sequences that advance together through the reference.

    Attributes:
        count: b, how many.
        length_of: T of a segment's inputs.
    """

    def __init__(self, manifest: Manifest, reference: Reference, count: int) -> None:
        self._manifest, self._reference, self.count = manifest, reference, count
        self._apart = manifest.can.run_apart
        self._tables = {state.name: state for state in manifest.states}
        self._read = manifest.given
        self.length_of = Programs(manifest, ()).length_of
        self._held: list[States] = []
        self.reset()

    def run(self, inputs: Arrays, counts: Ids, commit: bool = True) -> list[tuple[Indices, dict[str, Array]]]:
        """One segment: sequences that ran, and their outputs, of all positions of the program that holds it.

        Inputs have as many positions as the segment; idle sequences are not run, and keep their state.
        """
        length = self._length(inputs)
        found = []
        for group, rows in self._groups(counts):
            given = {entry.name: self._padded(entry.name, inputs, rows, length) for entry in self._read}
            valid = counts[rows] if self._manifest.can.run_ragged else None
            outputs, after = self._reference.step(given, self._held[group], valid)
            if commit:
                self._held[group] = dict(after)
            found.append((rows, outputs))
        return found

    def state(self) -> States:
        """Every state tensor of all sequences."""
        if not self._apart:
            return dict(self._held[0])
        joined: States = {}
        for name, table in self._tables.items():
            parts = [held[name] for held in self._held]
            some = [part for part in parts if part is not None]
            joined[name] = table.axes.concatenated(some) if some else None
        return joined

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """As `Stream.reset`."""
        if not self._apart:
            self._held = [self._reference.fresh(self.count)]
        elif rows is None:
            self._held = [self._reference.fresh(1) for _ in range(self.count)]
        else:
            for row in rows:
                self._held[row] = self._reference.fresh(1)

    def select(self, rows: Sequence[int]) -> None:
        """As `Stream.select`."""
        self.count = len(rows)
        if self._apart:
            self._held = [self._held[row] for row in rows]
            return
        self._held = [{name: _along(self._tables[name], values, rows) for name, values in self._held[0].items()}]

    def copy(self, source: int, target: int) -> None:
        """Give one sequence the state of another."""
        self._held[target] = self._held[source]

    def snapshot(self) -> list[States]:
        """What `restore` goes back to; arrays are never written to, so nothing is copied."""
        return list(self._held)

    def restore(self, snapshot: list[States]) -> None:
        """Go back."""
        self._held = list(snapshot)

    def _groups(self, counts: Ids) -> list[tuple[int, Indices]]:
        """Which sequences run together, with the place of their states."""
        if self._apart:
            return [(row, np.array([row])) for row in np.flatnonzero(counts).tolist()]
        return [(0, np.arange(self.count))] if counts.any() else []

    def _length(self, inputs: Arrays) -> int:
        """L of the smallest program that holds the segment."""
        length = self.length_of(inputs)
        return min(known for known in self._manifest.segment_lengths if known >= length)

    def _padded(self, name: str, inputs: Arrays, rows: Indices, length: int) -> Array:
        """An input of some sequences, with zeros behind the segment up to the program's length."""
        entry = next(entry for entry in self._read if entry.name == name)
        values = inputs[name][entry.axes.at(rows)]
        behind = length - entry.axes.length(values) if entry.axes.positions else 0
        return np.pad(values, [(0, behind if axis in entry.axes.positions else 0) for axis in range(values.ndim)])


def hand_over(stream: Stream, manifest: Manifest, states: States) -> None:
    """Let a bundle's stream go on from the reference's states, as close as its types hold them."""
    types = {state.name: state.dtype for state in manifest.states}
    with np.errstate(over="ignore"):  # what is too large is infinite
        held = {name: values.astype(types[name]) for name, values in states.items() if values is not None}
    stream.restore(replace(stream.snapshot(), states=held))


def run_together(
    sides: Sequence[ReferenceStreams], inputs: Arrays, counts: Ids
) -> Iterator[tuple[str, Indices, list[Array]]]:
    """One segment on each side: every output of the sequences that ran, by "output" and its name, and every state."""
    for parts in zip(*[side.run(inputs, counts) for side in sides], strict=True):
        for name in parts[0][1]:
            yield f"output {name}", parts[0][0], [outputs[name] for _, outputs in parts]
    states = [side.state() for side in sides]
    for name in states[0]:
        held = [values for state in states if (values := state[name]) is not None]
        if len(held) == len(sides):
            yield f"state {name}", np.arange(len(counts)), held


def _along(table: StateTensor, values: Array | None, rows: Sequence[int]) -> Array | None:
    """Some sequences of a state; all of one that they share."""
    return None if values is None else values[table.axes.at(np.asarray(rows))]
