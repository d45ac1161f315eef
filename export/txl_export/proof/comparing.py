"""Computes errors of each output and state against the reference, per segment and over a chain of segments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray
from txl_report.schema.verification import Chain, Tensor, Unit
from txl_runtime.ladder import limit_of
from txl_runtime.types import Array

from txl_export.proof.decades import counts_of
from txl_export.proof.ranks import RankCounts

MEMORY = "memory"
"""Name in reports for all tensors of counted memory rows, taken together."""
STATES = "all states"
"""Name in reports for all states, taken together."""
DRIFT_ROWS = 64
"""Least number of rows in a quarter of a chain for judging drift: with fewer rows, errors depend more on the inputs
than on the state."""
PIECE = 1_000_000
"""Number of values compared at a time, 8 MB in float64: an output over a vocabulary may be much larger."""


@dataclass
class Sums:
    """Sums over values x and their errors d: count, Σ x, Σ x² (`of_squares`), Σ d² (`squared`)."""

    count: int = 0
    summed: float = 0.0
    of_squares: float = 0.0
    squared: float = 0.0

    def add(self, exact: Array, difference: Array) -> None:
        """Add values [n] and their errors [n]; an infinite or NaN value counts as 0, its error as it is.

        For example, `add([1.0, nan], [0.1, nan])` adds the values 1 and 0, and makes Σ d² infinite.
        """
        self.add_finite(np.where(np.isfinite(exact), exact, 0), difference)

    def add_finite(self, exact: Array, difference: Array) -> None:
        """Add values [n], all finite, and their errors [n]; `add_finite([1.0, 2.0], [0.1, 0.0])` adds 0.01 to Σ d²."""
        self.count += exact.size
        self.summed += float(exact.sum())
        self.of_squares += float(np.einsum("i,i->", exact, exact))
        self.squared += or_infinite(np.einsum("i,i->", difference, difference))

    def joined(self, other: Sums) -> Sums:
        """Return the sums over both sets of values."""
        return Sums(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    @property
    def root_mean_square(self) -> float:
        """√(Σ x² / n) of the values x."""
        return math.sqrt(self.of_squares / max(self.count, 1))

    @property
    def size(self) -> float:
        """The standard deviation of the values, or |mean| if |mean| is more than 1e6 times as large."""
        mean = self.summed / max(self.count, 1)
        spread = math.sqrt(max(self.of_squares / max(self.count, 1) - mean**2, 0.0))
        return spread if spread > 1e-6 * abs(mean) else abs(mean)

    @property
    def deviation(self) -> float:
        """√(Σ d² / n) / `size`: the root mean square error relative to the values' spread."""
        error = math.sqrt(self.squared / max(self.count, 1))
        return error / self.size if self.size else (math.inf if error else 0.0)


def or_infinite(value: float) -> float:
    """Return the value as a float, infinity for NaN."""
    return math.inf if math.isnan(value) else float(value)


class TensorErrors:
    """Compares one output or state along a chain ("mask" in `ladder.LIMITS` explains large values).

    Args:
        exact: whether the values are integers or booleans, which have to be equal.
        nats: whether the values are log-probabilities.
        mask: absolute value from which errors are relative to the value itself; None for "mask" of `LIMITS`.

    Attributes:
        tensor: the results for the report: curves per segment and the largest error.
        decades: counts of the errors of floats by decade, see `counts_of`.
        usual: the sums over the values below `mask`.
    """

    def __init__(self, exact: bool = False, nats: bool = False, mask: float | None = None) -> None:
        self.mask = limit_of("mask") if mask is None else mask
        self.tensor = Tensor(exact=exact, nats=nats, largest=0.0, mean=[], most=[])
        self.decades, self.usual, self._large = counts_of([]), Sums(), Sums()
        self._large_relative = 0.0
        self._total, self._most, self._count, self._wrong = 0.0, 0.0, 0, False

    @property
    def exact(self) -> bool:
        """True if the values have to be equal, see `Tensor`."""
        return self.tensor.exact

    @property
    def largest(self) -> float:
        """The largest error so far; the number of differing values if `exact`."""
        return self.tensor.largest or 0.0

    @property
    def shapes(self) -> int:
        """The number of segments with a wrong shape."""
        return self.tensor.shapes

    @property
    def deviation(self) -> float:
        """The root mean square error over the whole chain, relative to `Sums.size` of the reference's values.

        Errors of values of at least `mask` are relative to each value, unless most values are that large.
        """
        if self._large.count > self.usual.count:
            return self.usual.joined(self._large).deviation
        relative = math.sqrt(self._large_relative / max(self._large.count, 1))
        return max(self.usual.deviation, relative)

    @property
    def spread(self) -> float:
        """`Sums.size` of the values below `mask`, divided by the scale of the curve that shows drift."""
        return self.usual.size / self._scale

    def add(self, *pairs: tuple[Array, Array]) -> None:
        """Compare all values of a segment, (expected, found) pairs of arrays, and end the segment.

        For example, one pair of arrays [2, 5, 256].
        """
        self.compare(*pairs)
        self.end_segment()

    def compare(self, *pairs: tuple[Array, Array]) -> None:
        """Compare some values of a segment, (expected, found) pairs of arrays.

        For example, one pair of arrays [2, 5, 256].
        """
        if any(expected.shape != found.shape for expected, found in pairs):
            self._wrong = True
        elif self.exact:
            differing = float(sum(int((expected != found).sum()) for expected, found in pairs))
            self.take(differing, self._most + differing, sum(expected.size for expected, _ in pairs))
            whole = [int(expected.max()) for expected, _ in pairs if expected.dtype.kind == "i" and expected.size]
            known = () if self.tensor.reached is UNSET else (self.tensor.reached,)
            self.tensor.reached = max((*known, *whole), default=UNSET)
        else:
            self._compare_floats(pairs)

    def take(self, total: float, most: float, count: int) -> None:
        """Add errors of some values of a segment: their sum, their maximum, and the number of values."""
        self._total, self._most, self._count = self._total + total, max(self._most, most), self._count + count

    def end_segment(self) -> None:
        """End the segment: append its mean and largest error to the curves."""
        tensor = self.tensor
        if self._wrong:
            tensor.shapes += 1
            self._total = self._most = math.inf
        tensor.mean.append(self._total / max(self._count, 1))
        tensor.most.append(self._most)
        tensor.largest = self.largest + self._most if self.exact else max(self.largest, self._most)
        self._total, self._most, self._count, self._wrong = 0.0, 0.0, 0, False

    @property
    def _scale(self) -> float:
        return self.tensor.scale or 1.0

    def _compare_floats(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        for expected, _ in () if self.tensor.nats else pairs:
            sizes = np.abs(expected)
            self.tensor.scale = max(self._scale, float(sizes.max(initial=0, where=sizes < self.mask)))
        for expected, found in _pieces(pairs):
            exact = expected.astype(np.float64)
            sizes = np.abs(exact)
            with np.errstate(all="ignore"):  # NaN and infinities are judged below
                if float(sizes.max(initial=0)) < self.mask:
                    difference = np.abs(found - exact)
                    self._note(difference / self._scale)
                    self.usual.add_finite(exact, difference)
                    continue
                usual = ~(sizes >= self.mask)
                difference = np.where(exact == found, 0, np.abs(found - exact))
                apart = np.where(difference == 0, 0, difference / np.where(usual, self._scale, sizes))
                self._note(apart)
                self.usual.add(exact[usual], difference[usual])
                self._large.add(exact[~usual], difference[~usual])
                self._large_relative += or_infinite(np.square(apart[~usual]).sum())

    def _note(self, apart: Array) -> None:
        most = or_infinite(apart.max())
        self.decades += counts_of(apart, largest=most)
        self.take(or_infinite(apart.sum()), most, apart.size)


def _pieces(pairs: Sequence[tuple[Array, Array]]) -> Iterator[tuple[Array, Array]]:
    """Yield the flattened values of all pairs, at most `PIECE` at a time."""
    for expected, found in pairs:
        one, other = expected.ravel(), found.ravel()
        for first in range(0, one.size, PIECE):
            yield one[first : first + PIECE], other[first : first + PIECE]


@dataclass
class ChainErrors:
    """The errors of one chain of segments, collected while it runs.

    Attributes:
        chain: the chain's row of the report.
        outputs, states: the errors of each tensor by name.
        kl: KL(reference ‖ bundle) of each position, in nats.
        ranks: ranks of the reference's best tokens in the bundle's order, near-ties included.
    """

    chain: Chain
    outputs: dict[str, TensorErrors] = field(default_factory=dict)
    states: dict[str, TensorErrors] = field(default_factory=dict)
    kl: list[float] = field(default_factory=list)
    ranks: RankCounts = field(default_factory=RankCounts)

    @property
    def name(self) -> str:
        """The chain's label, e.g. "segments of 8"."""
        return self.chain.name

    def row(self) -> Chain:
        """Return the chain's row of the report, with the errors of every tensor."""
        self.chain.outputs = {name: errors.tensor for name, errors in self.outputs.items()}
        self.chain.states = {name: errors.tensor for name, errors in self.states.items()}
        return self.chain

    def early_and_late(self, curve: Sequence[float | None]) -> tuple[float, float] | None:
        """Return a curve's means over the first and the last quarter of the segments that began with full states.

        Return None if states never were full, or if there are fewer than 8 such segments or `DRIFT_ROWS` rows in a
        quarter.
        """
        first = self.chain.full_from
        means, rows = (np.array(values[first or 0 :], np.float64) for values in (curve, self.chain.rows))
        quarter = len(means) // 4
        ends = (slice(0, quarter), slice(len(means) - quarter, None))
        if first is None or quarter < 2 or min(rows[end].sum() for end in ends) < DRIFT_ROWS:
            return None
        early, late = (float(np.average(means[end], weights=rows[end])) for end in ends)
        return early, late

    def drifts(self) -> Iterator[tuple[str, TensorErrors, tuple[float, float] | None]]:
        """Yield name, errors, and the mean errors of `early_and_late`, for every tensor of floats."""
        for kind, every in ((self.outputs, 1), (self.states, self.chain.every)):
            for name, errors in kind.items():
                if not errors.exact:
                    curve = [point for point in errors.tensor.mean for _ in range(every)]
                    yield name, errors, self.early_and_late(curve[: self.chain.segments])

    def spread(self) -> dict[str, tuple[Unit, NDArray[np.int64]]]:
        """Return unit and counts by decade for each output of floats, and for all states of floats together.

        For example, {"logprobs": ("nats", [512, 7, 0])}: 512 values in the first decade, 7 in the second.
        """
        decades = {name: (one.tensor.unit, one.decades) for name, one in self.outputs.items() if not one.exact}
        states = [errors.decades for errors in self.states.values() if not errors.exact]
        return decades | ({STATES: ("relative", np.sum(states, axis=0))} if states else {})
