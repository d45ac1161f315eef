"""Runs each segment and operation on a bundle and its reference, and compares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from txl_runtime.bundle.tables import Output
from txl_runtime.listener import Listener
from txl_runtime.model import Model
from txl_runtime.types import Array, Ids

from txl_export.proof.bits import IDLE, KEPT, Bits, named, rows_of
from txl_export.proof.comparing import MEMORY, ChainErrors, TensorErrors
from txl_export.proof.distributions import Distributions
from txl_export.proof.filling import Filling
from txl_export.proof.heap import trim
from txl_export.proof.input_source import poisoned
from txl_export.proof.references import Indices, Reference, ReferenceStreams, Returned, hand_over, in_pieces

CHEAP_STATE, CHEAP_ROWS, SPARSE = 64_000_000, 8_000_000, 8
"""Limits in bytes: of all states together, and of a sequence's states if the reference computes them only to compare.
Larger states are compared after every eighth segment and the last, instead of after each segment."""


@dataclass(frozen=True)
class Trial:
    """A bundle, its reference, and all that the chains of a verification share.

    Attributes:
        model: the bundle.
        reference: the model that the bundle should equal.
        samples: real inputs by name, or None.
        bits: the counts of values with wrong bits.
        folder: the folder for snapshots.
        listener: the receiver of progress.
        handing_over: whether the bundle continues from the reference's state after every segment.
        begun: numbers of the samples that chains of whole segments began.
        drawn: see `InputSource`.
    """

    model: Model
    reference: Reference
    samples: Mapping[str, Any] | None
    bits: Bits
    folder: Path
    listener: Listener
    handing_over: bool = False
    begun: set[int] = field(default_factory=set)
    drawn: set[tuple[str, int]] = field(default_factory=set)


class SideBySide:
    """A stream of the bundle and a stream of the reference, with the same number of sequences.

    Attributes:
        errors: the errors found so far.
        stream: the bundle's stream.
    """

    def __init__(self, trial: Trial, errors: ChainErrors) -> None:
        chain, model, reference = errors.chain, trial.model, trial.reference
        self._trial, self._manifest, self.errors = trial, model.manifest, errors
        manifest = model.manifest
        self.stream = model.stream(chain.streams)
        self._truth = ReferenceStreams(manifest, reference, chain.streams)
        states = {state.name: state for state in manifest.states if not state.counted}
        fresh = self._truth.state() if states else {}
        self._filling = {name: Filling(fresh[name], state.dtype == "int32") for name, state in states.items()}
        self._saved: tuple[Path, Any, int] | None = None
        self._rows_full_from = None if manifest.can.count_rows else 0
        exact = {"int32", "bool"}
        errors.outputs = {
            entry.name: TensorErrors(entry.dtype in exact, nats, reference.mask(nats))
            for entry, nats in ((entry, entry.role == "logprobs") for entry in manifest.outputs)
        }
        errors.states = {name: TensorErrors(state.dtype in exact) for name, state in states.items()}
        if len(states) < len(manifest.states):
            errors.states[MEMORY] = TensorErrors()
        cheap = manifest.state_bytes * chain.streams <= CHEAP_STATE
        cheap &= reference.resumes or manifest.state_bytes <= CHEAP_ROWS
        chain.every = 1 if cheap else SPARSE
        self._distributions = {
            entry.name: Distributions(errors, errors.outputs[entry.name], int(entry.shape[-1]))
            for entry in manifest.outputs
            if entry.role == "logprobs"
        }

    @property
    def count(self) -> int:
        """The number of sequences, b."""
        return self._truth.count

    def segment(self, inputs: dict[str, Array], counts: Ids, commit: bool = True) -> None:
        """Run one segment on both sides and compare them; the bundle gets NaN at positions beyond counts [b].

        For example, {"x": [2, 5, 8]} with counts [5, 3].
        """
        chain, manifest = self.errors.chain, self._manifest
        if manifest.can.count_rows and self._rows_full_from is None:
            full = self.stream.fill.min() == manifest.memory_length
            self._rows_full_from = chain.segments if full else None
        idle = [] if commit and counts.all() else np.flatnonzero(counts == 0).tolist()
        before = self._unchanged_states(self.stream.state(), idle, commit) if idle or not commit else {}
        self._run(inputs, counts, commit)
        chain.segments += 1
        chain.positions += int(counts.sum())
        chain.rows.append(int(counts.sum()))
        after: dict[str, Array] | None = None
        if idle or not commit:
            after = self.stream.state()
            self._trial.bits.compare(IDLE if commit else KEPT, before, self._unchanged_states(after, idle, commit))
        if (chain.segments - 1) % chain.every == 0:
            self._compare_state(after)
        if self._trial.handing_over and commit:
            hand_over(self.stream, manifest, self._truth.state())

    def _unchanged_states(self, state: dict[str, Array], idle: list[int], commit: bool) -> dict[str, Array]:
        """Return the states that a segment must not change: those of idle sequences, or all if commit is False."""
        return rows_of(self._manifest, named({}, state), idle) if commit else named({}, state)

    def finish(self) -> None:
        """Compare the states after the last segment, unless `segment` has compared them."""
        if (self.errors.chain.segments - 1) % self.errors.chain.every:
            self._compare_state()

    def _run(self, inputs: dict[str, Array], counts: Ids, commit: bool) -> None:
        """Run both sides and compare outputs; large arrays are freed when this function returns."""
        length, large = self._truth.length_of(inputs), self._trial.reference.large
        if large:
            self._trial.model.backend.release_pages()  # the reference needs the memory
        expected = self._truth.run(inputs, counts, commit)
        if large:
            trim()  # else blocks that the reference has freed would add to the runtime's memory
        arrays = inputs if (counts == length).all() else poisoned(self._manifest, inputs, counts)
        results = self.stream.run(arrays, lengths=counts, commit=commit)
        for output in self._manifest.outputs:
            self._compare(output, expected, results.get(output.name), inputs, counts)
        if large:
            trim()

    def _compare_state(self, held: dict[str, Array] | None = None) -> None:
        """Compare every state tensor, one at a time, and record how many values have changed since the start."""
        rows = self.stream.iter_memory() if MEMORY in self.errors.states else iter(())
        replaced = (self.stream.state() if held is None else held) if self._filling else {}
        for name, expected in self._truth.shown():
            if name in self._filling:
                self._compare_replaced(name, expected, replaced.get(name))
                continue
            known, found = next(rows)
            assert known == name, "both sides have the same tensors of memory"
            assert expected is not None, "memory rows are always there"
            self.errors.states[MEMORY].compare((expected, found))
        if MEMORY in self.errors.states:
            self.errors.states[MEMORY].end_segment()

    def _compare_replaced(self, name: str, expected: Array | None, values: Array | None) -> None:
        if expected is None:
            expected = values = np.zeros(0) if values is None or not values.size else values
        self.errors.states[name].add((expected, np.zeros(0) if values is None else values))
        self._filling[name].add(expected)

    def filling(self) -> tuple[str, ...]:
        """Return the names of states that may still be filling, see `Filling.filling`."""
        return tuple(name for name, state in self._filling.items() if state.filling)

    def counting(self) -> tuple[str, ...]:
        """Return the names of integer states that still changed in one direction when the chain ended."""
        return tuple(name for name, state in self._filling.items() if state.counting)

    def full_from(self) -> int | None:
        """Return the index of the first segment that began with full states; None if memory rows never were full."""
        if self._rows_full_from is None:
            return None
        full = (state.full_after * self.errors.chain.every for state in self._filling.values())
        return max(self._rows_full_from, *full, 0)

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Reset some sequences, or all for None, on both sides."""
        self.stream.reset(rows)
        self._truth.reset(rows)

    def select(self, rows: Sequence[int]) -> None:
        """Reorder, drop or duplicate sequences on both sides."""
        self.stream.select(rows)
        self._truth.select(rows)

    def save(self) -> None:
        """Write the bundle's state to a file, and keep the reference's state in memory."""
        path = self._trial.folder / "snapshot.safetensors"
        self.stream.snapshot().save(path)
        self._saved = path, self._truth.snapshot(), self.count

    def restore(self) -> None:
        """Go back to the saved states, and to the number of sequences that they have."""
        assert self._saved is not None, "something was saved"
        path, snapshot, count = self._saved
        if count != self.count:
            self.select([row % self.count for row in range(count)])
        state = self.stream.snapshot()
        self.stream.restore(type(state).load(path))
        self._truth.restore(snapshot)

    def copy(self, source: int, target: int) -> None:
        """Give the sequence `target` the state of `source`, on both sides."""
        self.stream.put(target, self.stream.take(source))
        self._truth.copy(source, target)

    def _compare(
        self,
        output: Output,
        expected: list[tuple[Indices, Mapping[str, Returned]]],
        found: Array | None,
        inputs: dict[str, Array],
        counts: Ids,
    ) -> None:
        """Compare one output at valid positions of the sequences that ran; a wrong shape is an error."""
        errors, length = self.errors.outputs[output.name], self._truth.length_of(inputs)
        ran = [(returned[output.name], index, row) for rows, returned in expected for index, row in enumerate(rows)]
        wrong = found is None or found.shape != output.sizes(self.count, length)
        if found is None or wrong:
            errors.compare(*[(np.zeros(1), np.zeros(0))] * bool(ran))
            ran = []
        pairs = []
        for returned, index, row in ran if output.axes.batch is not None else ran[:1]:
            for first, end, theirs in in_pieces(output, returned, index, int(counts[row])):
                assert found is not None
                ours = found[output.axes.window(first, end, row)]
                if output.name not in self._distributions or theirs.shape != ours.shape:
                    pairs.append((theirs, ours))
                    continue
                flat = (side.reshape(-1, side.shape[-1]) for side in (theirs, ours))
                self._distributions[output.name].compare(*flat)
                if output is self._manifest.logprobs:
                    self._score(inputs, int(row), first, int(counts[row]), theirs, ours)
        errors.add(*pairs)

    def _score(self, inputs: dict[str, Array], row: int, first: int, count: int, theirs: Array, ours: Array) -> None:
        """Add both sides' negative log-likelihood of each token in the segment that follows one of the positions."""
        tokens, chain = self._manifest.tokens, self.errors.chain
        if tokens is None or not self._manifest.can.pair_tokens:
            return
        targets = inputs[tokens.name][row, first + 1 : count][: len(theirs)]
        places = np.arange(len(targets)), targets
        chain.theirs = (chain.theirs or 0.0) - float(theirs[places].sum())
        chain.ours = (chain.ours or 0.0) - float(ours[places].astype(np.float64).sum())
        chain.targets += len(targets)
