"""Finds the largest length up to which a segment equals single steps, by running both ways from the same state.

E.g. five tokens run as a segment of 5, and as five segments of 1; outputs of each position and final states are
compared. An LSTM gives the same both ways. A Transformer-XL without a window does not: with a full memory, position 3
of a segment sees 3 rows more than a single step. So states are filled before the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.types import Array, Arrays

from txl_export.proof.input_source import InputSource
from txl_export.proof.references import Reference, ReferenceStreams, States, whole
from txl_export.proof.threads import few_threads

MOST = 8
"""Longest segment that is compared, in positions, if the model runs any length; drafts of a lookup are shorter."""
TIMES = 2
"""Number of comparisons with full states; a comparison with initial states precedes them."""
MOST_FILLED = 4096
"""Maximum number of positions that are run to fill the states."""
SINGLE, DOUBLE = 1e-4, 1e-6
"""Largest difference that counts as rounding, relative to max(1, the largest value): in float32 and in float64."""


def stepwise(manifest: Manifest, refer: Callable[[], Reference]) -> int | None:
    """Return the largest T for which segments of up to T positions equal single steps.

    Segments of 2 … `MOST` positions are compared. If the model runs only exact lengths, its lengths in this range are
    compared, or else its shortest above 1.

    Args:
        refer: makes the reference; called only if there is anything to compare.

    Returns:
        T; 1 if even the shortest segments differ, or there are none. None if the model cannot score tokens or run
            single steps.
    """
    can, longest = manifest.can, manifest.segment_lengths[0]
    if not can.score or not can.run_single:
        return None
    known = range(2, min(MOST, longest) + 1) if can.run_ragged else manifest.segment_lengths
    lengths = sorted(length for length in known if length > 1)
    if not lengths:
        return 1
    lengths = [length for length in lengths if length <= MOST] or lengths[:1]
    reference = refer()
    with few_threads(reference.small):
        pair = _Pair(manifest, reference)
        full = -(-rows_of(manifest) // longest)
        # A length above `MOST`, e.g. 64, is compared only once, because its single steps take long.
        for segments in (0, full, *[1] * (TIMES - 1)) if lengths[0] <= MOST else (full,):
            pair.advance(segments)
            lengths = pair.alike(lengths)
            if not lengths:
                return 1
    return lengths[-1]


def rows_of(manifest: Manifest) -> int:
    """Return the number of positions after which states count as full: M, or the largest size of a state besides B."""
    if manifest.can.count_rows:
        return min(manifest.memory_length, MOST_FILLED)
    sizes = [size for state in manifest.states for axis, size in enumerate(state.shape) if axis != state.batch_axis]
    return min(max(sizes, default=0), MOST_FILLED)


class _Pair:
    """A stream of the reference that runs the same tokens as a segment and as single steps."""

    def __init__(self, manifest: Manifest, reference: Reference) -> None:
        self._manifest = manifest
        self._count = 1 if manifest.can.run_apart else manifest.batch_size
        self._streams = ReferenceStreams(manifest, reference, self._count)
        # Random tokens, because with equal tokens results would not show which positions a position attends to.
        self._source = InputSource(manifest, None, np.random.default_rng(0))
        self._outputs = {output.name: output.axes for output in manifest.outputs}

    def advance(self, segments: int) -> None:
        """Run some segments of the longest length, to fill the states."""
        longest = self._manifest.segment_lengths[0]
        for _ in range(segments):
            self._run(self._source.take(self._count, longest), longest)

    def alike(self, lengths: Sequence[int]) -> list[int]:
        """Return the ascending lengths before the first length at which a segment differs from single steps.

        Afterwards the stream has the state after all single steps.
        """
        inputs, before = self._source.take(self._count, lengths[-1]), self._streams.snapshot()
        steps, after = list[dict[str, Array]](), dict[int, list[States]]()
        for at in range(lengths[-1]):
            steps.append(self._run(self._cut(inputs, at, at + 1), 1))
            if at + 1 in lengths:
                after[at + 1] = self._streams.snapshot()
        counts = list[int]()
        for length in lengths:
            self._streams.restore(before)
            outputs = self._run(self._cut(inputs, 0, length), length)
            same = _same_states(self._streams.snapshot(), after[length])
            if not same or not all(self._same_outputs(outputs, steps[at], at, length) for at in range(length)):
                break
            counts.append(length)
        self._streams.restore(after[lengths[-1]])
        return counts

    def _run(self, inputs: Arrays, length: int) -> dict[str, Array]:
        (_, outputs), *_ = self._streams.run(inputs, np.full(self._count, length, np.int32))
        return {name: whole(returned, self._count) for name, returned in outputs.items()}

    def _cut(self, inputs: Arrays, first: int, end: int) -> dict[str, Array]:
        return {entry.name: inputs[entry.name][entry.axes.window(first, end)] for entry in self._manifest.given}

    def _same_outputs(self, outputs: Arrays, step: Arrays, at: int, length: int) -> bool:
        """Compare position `at` of a segment with a step; an output without positions belongs to the last position."""
        return all(
            _same(outputs[name][axes.window(at, at + 1)], step[name][axes.window(0, 1)])
            for name, axes in self._outputs.items()
            if axes.positions or at == length - 1
        )


def _same_states(some: Sequence[States], others: Sequence[States]) -> bool:
    return all(_same(one[name], other[name]) for one, other in zip(some, others, strict=True) for name in one)


def _same(one: Array | None, other: Array | None) -> bool:
    """Return whether two arrays are equal up to rounding; NaN equals NaN, and None equals None."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape:
        return False
    if one.dtype.kind != "f":
        return bool((one == other).all())
    limit = DOUBLE if one.dtype == np.float64 else SINGLE
    finite = np.abs(other[np.isfinite(other)])
    return bool(np.allclose(one, other, rtol=0, atol=limit * max(1.0, finite.max(initial=0)), equal_nan=True))
