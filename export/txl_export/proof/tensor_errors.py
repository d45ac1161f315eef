"""How far one tensor of a step was from the reference, segment by segment, and what a chain of segments reached."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field

import numpy as np
from txl_runtime.ladder import MASK
from txl_runtime.types import Array

from txl_export.proof.decades import Decades, joined
from txl_export.proof.parity import Chain

STATES = "all states"
"""How states are called where they are taken together."""
PIECE = 1_000_000
"""Values compared at a time: a vocabulary can be large."""


@dataclass
class _Sums:
    """Of some values: how many, their sum, and the sums of squares of them and of their differences."""

    count: int = 0
    summed: float = 0.0
    of_squares: float = 0.0
    squared: float = 0.0

    def add(self, exact: Array, difference: Array) -> None:
        """Some more; what is infinite itself counts by its difference alone."""
        finite = np.where(np.isfinite(exact), exact, 0)
        self.count += exact.size
        self.summed += float(finite.sum())
        self.of_squares += float(np.square(finite).sum())
        self.squared += _or_infinite(np.square(difference).sum())

    def joined(self, other: _Sums) -> _Sums:
        """Both."""
        return _Sums(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

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


def _or_infinite(value: float) -> float:
    """NaN counts as infinitely far."""
    return math.inf if math.isnan(value) else float(value)


@dataclass
class TensorErrors:
    """One output or state in one chain.

    Attributes:
        exact: whether its values are whole numbers or truths, which have to be equal.
        nats: whether they are log-probabilities, whose differences are not relative to anything.
        largest: largest |Δ| relative to max(1, largest |value| of the reference so far), and of values from
            `ladder.MASK` on relative to each itself; of exact values, how many differed.
        mean: per segment, the mean of that: the drift curve.
        most: per segment, the largest of that.
        shapes: segments in which the tensor had another shape than the reference's.
        scale: max(1, largest |value| below `ladder.MASK` so far); 1 of log-probabilities.
    """

    exact: bool = False
    nats: bool = False
    largest: float = 0.0
    mean: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    shapes: int = 0
    scale: float = 1.0
    _decades: Decades = field(default_factory=Decades)
    _usual: _Sums = field(default_factory=_Sums)
    _large: _Sums = field(default_factory=_Sums)
    _large_relative: float = 0.0

    def add(self, *pairs: tuple[Array, Array]) -> None:
        """Compare one segment's values: pairs of expected and found ones."""
        wrong = sum(expected.shape != found.shape for expected, found in pairs)
        if wrong:
            self.shapes += 1
            self._note(math.inf, math.inf)
        elif self.exact:
            differing = sum(int((expected != found).sum()) for expected, found in pairs)
            self.largest += differing
            self._note(differing / max(sum(expected.size for expected, _ in pairs), 1), float(differing))
        else:
            self._add_floats(pairs)

    @property
    def deviation(self) -> float:
        """Root of the mean squared Δ over the whole chain, relative to the standard deviation of the reference's
        values; where those are all alike, relative to their size. Values from `ladder.MASK` on that are fewer than
        the others are relative to themselves.
        """
        if self._large.count > self._usual.count:
            return self._usual.joined(self._large).deviation
        relative = math.sqrt(self._large_relative / max(self._large.count, 1))
        return max(self._usual.deviation, relative)

    @property
    def spread(self) -> float:
        """The standard deviation of the values below `ladder.MASK`, in the unit of `mean`."""
        return self._usual.size / self.scale

    @property
    def decades(self) -> Decades:
        """How the errors of inexact values are spread: of log-probabilities |Δ|, of others as in `largest`."""
        return self._decades

    def document(self) -> dict[str, object]:
        """For the report, as plain JSON."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def _add_floats(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        for expected, _ in () if self.nats else pairs:
            sizes = np.abs(expected)
            self.scale = max(self.scale, float(sizes.max(initial=0, where=sizes < MASK)))
        total, largest, count = 0.0, 0.0, 0
        for expected, found in _pieces(pairs):
            exact = expected.astype(np.float64)
            sizes = np.abs(exact)
            usual = ~(sizes >= MASK)
            with np.errstate(all="ignore"):  # NaN and infinities are judged below
                difference = np.where(exact == found, 0, np.abs(found - exact))
                apart = np.where(difference == 0, 0, difference / np.where(usual, self.scale, sizes))
                summed, most = (_or_infinite(value) for value in (apart.sum(), apart.max()))
                self._decades.add(apart, most)
                total, largest, count = total + summed, max(largest, most), count + exact.size
                if usual.all():
                    self._usual.add(exact, difference)
                else:
                    self._usual.add(exact[usual], difference[usual])
                    self._large.add(exact[~usual], difference[~usual])
                    self._large_relative += _or_infinite(np.square(apart[~usual]).sum())
        self._note(total / max(count, 1), largest)

    def _note(self, mean: float, largest: float) -> None:
        self.mean.append(mean)
        self.most.append(largest)
        if not self.exact:
            self.largest = max(self.largest, largest)


def _pieces(pairs: Sequence[tuple[Array, Array]]) -> Iterator[tuple[Array, Array]]:
    """The values of all pairs, some at a time."""
    for expected, found in pairs:
        one, other = expected.ravel(), found.ravel()
        for first in range(0, one.size, PIECE):
            yield one[first : first + PIECE], other[first : first + PIECE]


@dataclass
class StepChain(Chain):
    """One chain of any step.

    Attributes:
        outputs, states: how far each was from the reference.
        every: states were compared after every segment, or after every so many and the last.
        targets: tokens that followed one in the same segment, where the model reads nothing but tokens.
        theirs, ours: the negative log-likelihood of those by the reference and by the bundle, in nats.
        filling: states that were not full when the chain ended, or had not been for as long again.
        counting: states of whole numbers that were still changing in one direction when the chain ended.
    """

    outputs: dict[str, TensorErrors] = field(default_factory=dict)
    states: dict[str, TensorErrors] = field(default_factory=dict)
    every: int = 1
    targets: int = 0
    theirs: float = 0.0
    ours: float = 0.0
    filling: tuple[str, ...] = ()
    counting: tuple[str, ...] = ()

    def drifts(self) -> Iterator[tuple[str, TensorErrors, tuple[float, float] | None]]:
        """Every tensor that is not compared exactly, with its early and late mean error; None where too little ran."""
        for kind, every in ((self.outputs, 1), (self.states, self.every)):
            for name, errors in kind.items():
                if not errors.exact:
                    yield name, errors, self.early_and_late_of(np.repeat(errors.mean, every)[: self.segments].tolist())

    def spread(self) -> dict[str, tuple[str, Decades]]:
        """Every output that is not compared exactly; the states together, because there may be many."""
        found = {
            name: ("nats" if errors.nats else "relative", errors.decades)
            for name, errors in self.outputs.items()
            if not errors.exact
        }
        states = [errors.decades for errors in self.states.values() if not errors.exact]
        return found | ({STATES: ("relative", joined(states))} if states else {})

    def document(self) -> dict[str, object]:
        """As of every chain, with numbers for each tensor."""
        tensors = {
            kind: {name: errors.document() for name, errors in getattr(self, kind).items()}
            for kind in ("outputs", "states")
        }
        return super().document() | tensors
