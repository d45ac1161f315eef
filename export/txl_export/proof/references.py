"""Runs a model in plain PyTorch the way the runtime runs streams.

Independent sequences have separate states. Sequences in lockstep run together as one batch of the model.
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
"""State tensors by name; None for a state that does not exist yet."""
Indices: TypeAlias = NDArray[np.integer]
Returned: TypeAlias = Array | Callable[[int], Iterator[Array]]
"""An output of some sequences: an array; or, if the array would be large, a function of a sequence's index that yields
its valid positions in pieces. The next piece overwrites a piece."""


class Reference(Protocol):
    """A step in plain PyTorch that takes and returns arrays.

    Attributes:
        described: a description of the model and its precision, for the report.
        small: whether the model runs fastest in one thread.
        large: whether the model needs memory that the bundle can temporarily release.
        together: whether independent sequences run in one batch, because by construction none changes another. States
            then have the batch on axis 0, and all sequences of a step have the same number of valid positions.
            Otherwise each sequence runs alone, because a batch could mix them.
        masks: whether a log-probability may stand for "never" ("mask" in `ladder.LIMITS`).
        resumes: whether the reference has the bundle's states, so that each side can continue from the other's.
        below: for each integer input of unknown range, the upper limit (exclusive) of its random values.
        flags: for each boolean input that ends episodes, the value with which an episode continues.
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
        """Return the states of `count` sequences before the first step."""

    def step(
        self, inputs: Arrays, states: States, valid: Ids | None
    ) -> tuple[Mapping[str, Returned], Mapping[str, Array]]:
        """Run one step; return outputs and states. The step may empty `states`; `valid` [n] counts valid rows.

        For example, inputs {"x": [2, 5, 8]} and `valid` [5, 3].
        """

    def in_single(self) -> Reference | None:
        """Return the reference in float32; None if the reference is in float32 already."""

    def precisions(self) -> tuple[Reference, Reference] | None:
        """Return the reference in float64 and in float32; None if only one of them can run."""
        single = self.in_single()
        return None if single is None else (self, single)

    def mask(self, nats: bool) -> float:
        """Return the absolute value from which an output's errors are relative to the value itself."""
        return limit_of("mask") if self.masks or not nats else np.inf

    def shown(self, states: States) -> Iterator[tuple[str, Array]]:
        """Yield a sequence's memory rows [1, rows, ...] by the bundle's names, if the reference does not resume."""
        return iter(())


class ReferenceStreams:
    """Runs sequences of the reference together, with their states, as `Stream` does.

    Attributes:
        count: b, the number of sequences.
        length_of: returns the number of positions T of a segment's inputs.
    """

    def __init__(self, manifest: Manifest, reference: Reference, count: int) -> None:
        self._manifest, self.reference, self.count = manifest, reference, count
        self._apart = manifest.can.run_apart
        self._tables = {state.name: state for state in manifest.states}
        self.length_of = Programs(manifest, ()).length_of
        self._held: list[States] = []
        self.reset()

    def run(self, inputs: Arrays, counts: Ids, commit: bool = True) -> list[tuple[Indices, Mapping[str, Returned]]]:
        """Run one segment; return (indices of sequences, their outputs) for each group of sequences that ran together.

        Inputs have T positions. Outputs have the length L of the smallest program that fits, e.g. 8 for T = 5.
        Sequences with count 0 do not run and keep their state.
        """
        length = self._length(inputs)
        results = []
        for places, rows in self._groups(counts):
            arrays = {entry.name: self._padded(entry.name, inputs, rows, length) for entry in self._manifest.given}
            valid = counts[rows] if self._manifest.can.run_ragged else None
            outputs, after = self.reference.step(arrays, self._states_of(places, commit), valid)
            if commit:
                for index, place in enumerate(places):
                    one = slice(index, index + 1) if len(places) > 1 else ...
                    self._held[place] = {name: values[one] for name, values in after.items()}
            results.append((rows, outputs))
        return results

    def state(self) -> States:
        """Return every state tensor of all sequences; only for a reference that resumes."""
        if not self._apart:
            return dict(self._held[0])
        joined: States = {}
        for name, table in self._tables.items():
            parts = [held[name] for held in self._held]
            some = [part for part in parts if part is not None]
            joined[name] = table.axes.concatenated(some) if some else None
        return joined

    def shown(self) -> Iterator[tuple[str, Array | None]]:
        """Yield every state tensor of all sequences; one at a time, because together they may exceed the model's size
        several times.

        Memory rows are [b, rows, ...] as in `Stream.iter_memory`, with zeros before the rows of shorter sequences. For
        example, ("layers.00.hidden", [2, 16, 32]).
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
        """Reset some sequences, or all for None, as `Stream.reset` does."""
        if not self._apart:
            self._held = [self.reference.fresh(self.count)]
        elif rows is None:
            self._held = [self.reference.fresh(1) for _ in range(self.count)]
        else:
            for row in rows:
                self._held[row] = self.reference.fresh(1)

    def select(self, rows: Sequence[int]) -> None:
        """Reorder, drop or duplicate sequences, as `Stream.select` does."""
        self.count = len(rows)
        if self._apart:
            self._held = [dict(self._held[row]) for row in rows]
            return
        self._held = [{name: _along(self._tables[name], values, rows) for name, values in self._held[0].items()}]

    def copy(self, source: int, target: int) -> None:
        """Give the sequence `target` the state of `source`."""
        self._held[target] = dict(self._held[source])

    def snapshot(self) -> list[States]:
        """Return the states for `restore`; nothing is copied, because arrays are never written to."""
        return [dict(held) for held in self._held]

    def restore(self, snapshot: list[States]) -> None:
        """Go back to the states of a snapshot."""
        self._held = [dict(held) for held in snapshot]

    def _groups(self, counts: Ids) -> list[tuple[list[int], Indices]]:
        """Return, for each group that runs together, the indices of its states and the indices of its sequences."""
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

    def _states_of(self, places: list[int], commit: bool) -> States:
        """Return a group's states, joined for one step; with `commit` the step may empty them, which saves copies."""
        if len(places) == 1:
            return self._held[places[0]] if commit else dict(self._held[places[0]])
        joined: States = {}
        for name in list(self._held[places[0]]):
            parts = [self._held[place].pop(name) if commit else self._held[place][name] for place in places]
            joined[name] = np.concatenate([part for part in parts if part is not None])
        return joined

    def _length(self, inputs: Arrays) -> int:
        """Return the length L of the smallest program that holds the segment."""
        length = self.length_of(inputs)
        return min(known for known in self._manifest.segment_lengths if known >= length)

    def _padded(self, name: str, inputs: Arrays, rows: Indices, length: int) -> Array:
        """Return an input of some sequences, padded with zeros after the segment: [b, T] becomes [len(rows), L]."""
        entry = next(entry for entry in self._manifest.given if entry.name == name)
        values = inputs[name][entry.axes.at(rows)]
        behind = length - entry.axes.length(values) if entry.axes.positions else 0
        widths = [(0, behind if axis in entry.axes.positions else 0) for axis in range(values.ndim)]
        return np.pad(values, widths) if widths else values


def hand_over(stream: Stream, manifest: Manifest, states: States) -> None:
    """Set a bundle's stream to the reference's states, rounded to the stream's dtypes."""
    types = {state.name: state.dtype for state in manifest.states}
    with np.errstate(over="ignore"):  # a value beyond float16 becomes infinite
        held = {name: values.astype(types[name]) for name, values in states.items() if values is not None}
    stream.restore(replace(stream.snapshot(), states=held))


def in_pieces(output: Output, returned: Returned, index: int, count: int) -> Iterator[tuple[int, int, Array]]:
    """Yield (first, end, values of positions [first, end)) for each piece of a sequence's valid positions.

    For example, 5 positions come as (0, 3, …) and (3, 5, …).
    """
    if not callable(returned):
        yield 0, count, returned[output.axes.window(0, count, index)]
        return
    first = 0
    for some in returned(index):
        yield first, first + len(some), some
        first += len(some)
    assert first == count, "every row that counts is compared"


def whole(returned: Returned, count: int) -> Array:
    """Return an output of `count` sequences as one array. For example, [2, 5, 256]."""
    if not callable(returned):
        return returned
    return np.stack([np.concatenate([some.copy() for some in returned(row)]) for row in range(count)])


def run_together(
    sides: Sequence[ReferenceStreams], inputs: Arrays, counts: Ids
) -> Iterator[tuple[str, Indices, list[Returned]]]:
    """Run one segment on each side; yield name, sequences and each side's values, for every output and state.

    For example, ("logprobs", [0, 1], [one array per side]).
    """
    for parts in zip(*[side.run(inputs, counts) for side in sides], strict=True):
        rows = parts[0][0]
        for name in parts[0][1]:
            yield f"output {name}", rows, [outputs[name] for _, outputs in parts]
    for tensors in zip(*[side.shown() for side in sides], strict=True):
        held: list[Returned] = [values for _, values in tensors if values is not None]
        if len(held) == len(sides):
            yield f"state {tensors[0][0]}", np.arange(len(counts)), held


def _along(table: StateTensor, values: Array | None, rows: Sequence[int]) -> Array | None:
    """Return some sequences of a state; a state without an axis of sequences is returned as it is."""
    return None if values is None else values[table.axes.at(np.asarray(rows))]
