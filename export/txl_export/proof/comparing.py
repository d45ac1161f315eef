"""How far each tensor of a step was from the reference, segment by segment, and what one chain of segments reached."""

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
"""What memory rows that the runtime counts are called: all tensors of them are compared as one."""
STATES = "all states"
"""How states are called where they are taken together."""
DRIFT_ROWS = 64
"""The drift of a chain is not judged on quarters of fewer rows: those say more of their inputs than of the state."""
PIECE = 1_000_000
"""Values compared at a time: a vocabulary can be large."""


@dataclass
class Sums:
    """Of some values: how many, their sum, and the sums of squares of them and of their differences."""

    count: int = 0
    summed: float = 0.0
    of_squares: float = 0.0
    squared: float = 0.0

    def add(self, exact: Array, difference: Array) -> None:
        """Some more values. Of an infinite value the difference counts, and not its size."""
        self.add_finite(np.where(np.isfinite(exact), exact, 0), difference)

    def add_finite(self, exact: Array, difference: Array) -> None:
        """Some more values, none of which is infinite or NaN itself."""
        self.count += exact.size
        self.summed += float(exact.sum())
        self.of_squares += float(np.einsum("i,i->", exact, exact))
        self.squared += or_infinite(np.einsum("i,i->", difference, difference))

    def joined(self, other: Sums) -> Sums:
        """Both."""
        return Sums(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    @property
    def root_mean_square(self) -> float:
        """Of the values."""
        return math.sqrt(self.of_squares / max(self.count, 1))

    @property
    def size(self) -> float:
        """The standard deviation of the values; where they are all alike, their size."""
        mean = self.summed / max(self.count, 1)
        spread = math.sqrt(max(self.of_squares / max(self.count, 1) - mean**2, 0.0))
        return spread if spread > 1e-6 * abs(mean) else abs(mean)

    @property
    def deviation(self) -> float:
        """Root of the mean squared difference, relative to `size`."""
        error = math.sqrt(self.squared / max(self.count, 1))
        return error / self.size if self.size else (math.inf if error else 0.0)


def or_infinite(value: float) -> float:
    """NaN counts as infinitely far."""
    return math.inf if math.isnan(value) else float(value)


class TensorErrors:
    """Compares one output or state along one chain (see "mask" in `ladder.LIMITS`).

    Args:
        exact: whether its values are whole numbers or truths, which have to be equal.
        nats: whether they are log-probabilities.
        mask: from which size on values are compared relative to themselves; None for that of `LIMITS`.

    Attributes:
        tensor: what was found.
        decades: counts of the errors of inexact values, see `counts_of`.
        usual: of the values below `mask`.
    """

    def __init__(self, exact: bool = False, nats: bool = False, mask: float | None = None) -> None:
        self.mask = limit_of("mask") if mask is None else mask
        self.tensor = Tensor(exact=exact, nats=nats, largest=0.0, mean=[], most=[])
        self.decades, self.usual, self._large = counts_of([]), Sums(), Sums()
        self._large_relative = 0.0
        self._total, self._most, self._count, self._wrong = 0.0, 0.0, 0, False

    @property
    def exact(self) -> bool:
        """See `Tensor`."""
        return self.tensor.exact

    @property
    def largest(self) -> float:
        """See `Tensor`."""
        return self.tensor.largest or 0.0

    @property
    def shapes(self) -> int:
        """See `Tensor`."""
        return self.tensor.shapes

    @property
    def deviation(self) -> float:
        """Root of the mean squared Δ over the whole chain, relative to the standard deviation of the reference's
        values; where those are all alike, relative to their size. Values from `mask` on that are fewer than
        the others are relative to themselves.
        """
        if self._large.count > self.usual.count:
            return self.usual.joined(self._large).deviation
        relative = math.sqrt(self._large_relative / max(self._large.count, 1))
        return max(self.usual.deviation, relative)

    @property
    def spread(self) -> float:
        """The standard deviation of the values below `mask`, in the unit of the drift curve."""
        return self.usual.size / self._scale

    def add(self, *pairs: tuple[Array, Array]) -> None:
        """Compare one segment's values: pairs of expected and found ones."""
        self.compare(*pairs)
        self.end_segment()

    def compare(self, *pairs: tuple[Array, Array]) -> None:
        """Compare some of one segment's values: pairs of expected and found ones."""
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
        """Errors of some of one segment's values: their sum, the largest, and how many values there were."""
        self._total, self._most, self._count = self._total + total, max(self._most, most), self._count + count

    def end_segment(self) -> None:
        """Let the segment be done: one more point of the curves."""
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
    """The values of all pairs, some at a time."""
    for expected, found in pairs:
        one, other = expected.ravel(), found.ravel()
        for first in range(0, one.size, PIECE):
            yield one[first : first + PIECE], other[first : first + PIECE]


@dataclass
class ChainErrors:
    """One chain of segments while it is compared.

    Attributes:
        chain: as the report has it.
        outputs, states: how far each was from the reference.
        kl: per position, KL divergence of the runtime from the reference, nats.
        ranks: where the reference's best tokens stand, near-ties included.
    """

    chain: Chain
    outputs: dict[str, TensorErrors] = field(default_factory=dict)
    states: dict[str, TensorErrors] = field(default_factory=dict)
    kl: list[float] = field(default_factory=list)
    ranks: RankCounts = field(default_factory=RankCounts)

    @property
    def name(self) -> str:
        """What kind of segments."""
        return self.chain.name

    def found(self) -> Chain:
        """The chain with every tensor."""
        self.chain.outputs = {name: errors.tensor for name, errors in self.outputs.items()}
        self.chain.states = {name: errors.tensor for name, errors in self.states.items()}
        return self.chain

    def early_and_late(self, curve: Sequence[float | None]) -> tuple[float, float] | None:
        """Mean of a curve over the first and the last quarter of the segments that met a full state; None if too few
        did.
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
        """Every tensor that is not compared exactly, with its early and late mean error; None where too little ran."""
        for kind, every in ((self.outputs, 1), (self.states, self.chain.every)):
            for name, errors in kind.items():
                if not errors.exact:
                    curve = [point for point in errors.tensor.mean for _ in range(every)]
                    yield name, errors, self.early_and_late(curve[: self.chain.segments])

    def spread(self) -> dict[str, tuple[Unit, NDArray[np.int64]]]:
        """Unit and counts of every output that is not compared exactly, and of all states as one: there may be many."""
        found = {name: (one.tensor.unit, one.decades) for name, one in self.outputs.items() if not one.exact}
        states = [errors.decades for errors in self.states.values() if not errors.exact]
        return found | ({STATES: ("relative", np.sum(states, axis=0))} if states else {})
