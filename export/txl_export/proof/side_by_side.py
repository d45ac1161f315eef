"""A bundle and its reference, side by side: what is done to one is done to the other, and then they are compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from txl_runtime.bundle.tables import Output
from txl_runtime.model import Model
from txl_runtime.types import Array, Ids

from txl_export.proof.bits import IDLE, KEPT, Bits, named, rows_of
from txl_export.proof.distributions import Distributions
from txl_export.proof.input_source import poisoned
from txl_export.proof.references import Indices, Reference, ReferenceStreams, hand_over
from txl_export.proof.tensor_errors import StepChain, TensorErrors

FULL = 0.99
"""A state is full when this share has changed of all values that ever change."""

CHEAP_STATE, SPARSE_STATE = 64_000_000, 8
"""States of more bytes than the first number are compared after every eighth segment and the last, not after each."""

LAST, NEVER = 8, 1 << 40
"""A whole number that has become larger with each of so many segments, and never smaller, counts: it may mean something
else later. One that went back once, as the place in a ring does, has been everywhere."""


class SideBySide:
    """One stream of the bundle and as many sequences of the reference.

    Args:
        model: the bundle.
        reference: what it should be equal to.
        chain: takes what is found.
        bits: takes what is found of bits.
        folder: for snapshots.
        handing_over: whether the bundle goes on from the reference's state after every segment.

    Attributes:
        chain: what was found.
        stream: the bundle's.
    """

    def __init__(
        self, model: Model, reference: Reference, chain: StepChain, bits: Bits, folder: Path, handing_over: bool = False
    ) -> None:
        self._handing_over = handing_over
        self._manifest, self.chain, self._bits, self._folder = model.manifest, chain, bits, folder
        self.stream = model.stream(chain.streams)
        self._truth = ReferenceStreams(model.manifest, reference, chain.streams)
        self._fresh = self._truth.state()
        self._changed: dict[str, list[int]] = {state.name: [] for state in model.manifest.states}
        self._numbers = {state.name: _Numbers() for state in model.manifest.states if state.dtype == "int32"}
        self._saved: tuple[Path, Any, int] | None = None
        chain.every = 1 if model.manifest.state_bytes * chain.streams <= CHEAP_STATE else SPARSE_STATE
        exact = {"int32", "bool"}
        chain.outputs = {
            entry.name: TensorErrors(entry.dtype in exact, entry.role == "logprobs") for entry in model.manifest.outputs
        }
        chain.states = {entry.name: TensorErrors(entry.dtype in exact) for entry in model.manifest.states}
        output = model.manifest.logprobs
        self._distributions = Distributions(chain, int(output.shape[-1])) if output is not None else None

    @property
    def count(self) -> int:
        """b, the number of sequences."""
        return self._truth.count

    def segment(self, inputs: dict[str, Array], counts: Ids, commit: bool = True) -> None:
        """One segment on both sides. Whatever does not count is NaN for the bundle."""
        length = self._truth.length_of(inputs)
        idle = [] if commit and counts.all() else np.flatnonzero(counts == 0).tolist()
        before = self.stream.state() if idle or not commit else {}
        expected = self._truth.run(inputs, counts, commit)
        given = inputs if (counts == length).all() else poisoned(self._manifest, inputs, counts)
        found = self.stream.run(given, lengths=counts, commit=commit)
        for output in self._manifest.outputs:
            self._compare(output, expected, found.get(output.name), counts, length)
        self._score(inputs, expected, found, counts)
        self.chain.segments += 1
        self.chain.positions += int(counts.sum())
        self.chain.rows.append(int(counts.sum()))
        after: dict[str, Array] | None = None
        if idle or not commit:
            after = self.stream.state()
            if commit:
                before, now = (rows_of(self._manifest, named({}, state), idle) for state in (before, after))
                self._bits.compare(IDLE, before, now)
            else:
                self._bits.compare(KEPT, before, after)
        if self.chain.segments % self.chain.every == 0:
            self._compare_state(after)
        if self._handing_over and commit:
            hand_over(self.stream, self._manifest, self._truth.state())

    def finish(self) -> None:
        """Compare the states that the last segment left, where that was not done yet."""
        if self.chain.segments % self.chain.every:
            self._compare_state()

    def _compare_state(self, found: dict[str, Array] | None = None) -> None:
        """Every state tensor, and how much of each has changed since the beginning."""
        given: dict[str, Array] = self.stream.state() if found is None else found
        for name, expected in self._truth.state().items():
            values, errors = given.get(name), self.chain.states[name]
            if expected is None:
                expected = values = np.zeros(0) if values is None or not values.size else values
            errors.add((expected, np.zeros(0) if values is None else values))
            fresh = self._fresh[name]
            same = fresh is not None and fresh.shape == expected.shape
            self._changed[name].append(int((expected != fresh).sum()) if same else expected.size)
            if name in self._numbers:
                self._numbers[name].add(expected)

    def filling(self) -> tuple[str, ...]:
        """States that are not full, or have not been for as long as they took."""
        return tuple(name for name, counts in self._changed.items() if 2 * _full_after(counts) > len(counts))

    def counting(self) -> tuple[str, ...]:
        """States of whole numbers that were still changing in one direction when the chain ended."""
        return tuple(name for name, numbers in self._numbers.items() if numbers.counting)

    def full_from(self) -> int:
        """The first segment that met states that were all full."""
        return max((_full_after(counts) * self.chain.every for counts in self._changed.values()), default=0)

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Forget everything, or some sequences."""
        self.stream.reset(rows)
        self._truth.reset(rows)

    def select(self, rows: Sequence[int]) -> None:
        """Reorder, drop or duplicate sequences."""
        self.stream.select(rows)
        self._truth.select(rows)

    def save(self) -> None:
        """Write the bundle's state into a file, and keep the reference's."""
        path = self._folder / "snapshot.safetensors"
        self.stream.snapshot().save(path)
        self._saved = path, self._truth.snapshot(), self.count

    def restore(self) -> None:
        """Go back to what was saved, with as many sequences as there were then."""
        assert self._saved is not None, "something was saved"
        path, snapshot, count = self._saved
        if count != self.count:
            self.select([row % self.count for row in range(count)])
        state = self.stream.snapshot()
        self.stream.restore(type(state).load(path))
        self._truth.restore(snapshot)

    def copy(self, source: int, target: int) -> None:
        """Give one sequence the state of another."""
        self.stream.put(target, self.stream.take(source))
        self._truth.copy(source, target)

    def _compare(
        self,
        output: Output,
        expected: list[tuple[Indices, dict[str, Array]]],
        found: Array | None,
        counts: Ids,
        length: int,
    ) -> None:
        """One output of the sequences that ran, in the rows that count."""
        errors = self.chain.outputs[output.name]
        if not expected:
            errors.add()
            return
        if found is None or found.shape != output.sizes(self.count, length):
            errors.add((np.zeros(1), np.zeros(0)))
            return
        pairs = []
        for rows, returned in expected:
            for index, row in enumerate(rows.tolist()):
                count = int(counts[row])
                theirs = returned[output.name][output.axes.window(0, count, index)]
                pairs.append((theirs, found[output.axes.window(0, count, row)]))
        if output.axes.batch is None:
            pairs = pairs[:1]
        if output.role == "logprobs" and self._distributions is not None:
            for theirs, ours in pairs:
                self._distributions.compare(theirs.reshape(-1, theirs.shape[-1]), ours.reshape(-1, ours.shape[-1]))
        errors.add(*pairs)

    def _score(
        self,
        inputs: dict[str, Array],
        expected: list[tuple[Indices, dict[str, Array]]],
        found: dict[str, Array],
        counts: Ids,
    ) -> None:
        """The likelihood of each token that follows one in this segment, on both sides."""
        tokens, logprobs = self._manifest.tokens, self._manifest.logprobs
        if tokens is None or logprobs is None or not self._manifest.can.pair_tokens:
            return
        for rows, returned in expected:
            for index, row in enumerate(rows.tolist()):
                targets = inputs[tokens.name][row, 1 : counts[row]]
                places = np.arange(len(targets)), targets
                self.chain.theirs -= float(returned[logprobs.name][index][places].sum())
                self.chain.ours -= float(found[logprobs.name][row][places].astype(np.float64).sum())
                self.chain.targets += len(targets)


def _full_after(changed: list[int]) -> int:
    """How many segments it took until nearly everything had changed that ever did."""
    most = max(changed, default=0)
    return next((index + 1 for index, count in enumerate(changed) if count >= FULL * most), 0) if most else 0


class _Numbers:
    """Whole numbers of one state: whether any has only ever become larger, or only smaller, and still does."""

    def __init__(self) -> None:
        self._held: Array | None = None
        self._up: Any = 0
        self._down: Any = 0

    def add(self, values: Array) -> None:
        """What the state holds now; where it has another shape all begins anew."""
        if self._held is None or self._held.shape != values.shape:
            self._up = self._down = 0
        else:
            self._up = np.where(
                values > self._held, self._up + 1, np.where(values < self._held, -NEVER, np.minimum(self._up, 0))
            )
            self._down = np.where(
                values < self._held, self._down + 1, np.where(values > self._held, -NEVER, np.minimum(self._down, 0))
            )
        self._held = values

    @property
    def counting(self) -> bool:
        """Whether one has changed in one direction for long."""
        return bool((np.maximum(self._up, self._down) >= LAST).any())
