"""Ranks of the reference's best tokens in the bundle's order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from txl_report.schema.verification import Ranks

WITHIN = (1, 2, 5, 10)
"""Values of k: positions are counted at which the reference's best token is among the bundle's k best."""
BEST = WITHIN[-1]
"""Number of best tokens of both sides whose overlap is counted."""
MANY, BLOCK = 5000, 64
"""From 5000 columns on the maximum of each block of 64 is found first: the 10 best lie in the 10 best blocks."""


@dataclass
class RankCounts:
    """Running counts of agreement in order, near-ties included.

    Attributes:
        positions: number of positions counted.
        within: for each k in `WITHIN`, the positions at which the reference's best token is among the bundle's k best;
            equally likely tokens do not precede it.
        best: number of best tokens whose overlap is counted: `BEST`, or all of a smaller vocabulary.
        shared: the sum over positions of the reference's best tokens that are among the bundle's.
    """

    positions: int = 0
    within: dict[int, int] = field(default_factory=lambda: dict.fromkeys(WITHIN, 0))
    best: int = 0
    shared: int = 0

    def add(self, favourite: NDArray[np.intp], expected: NDArray[Any], found: NDArray[Any]) -> None:
        """Count n positions.

        Args:
            favourite: the reference's best token at each, [n].
            expected, found: log-probabilities of the reference and of the bundle, [n, V]; a token with NaN precedes
                all others.
        """
        of_favourite = found[np.arange(len(found)), favourite]
        before = _per_row(~(found <= of_favourite[:, None]))
        self.positions += len(found)
        for number in WITHIN:
            self.within[number] += int(np.count_nonzero(before < number))
        self.best = min(BEST, found.shape[1])
        both = _among_best(expected)
        both &= _among_best(found)
        self.shared += int(np.minimum(_per_row(both), self.best).sum())  # equal values can make more than 10 best

    def joined(self, other: RankCounts) -> RankCounts:
        """Return the counts over both."""
        within = {number: self.within[number] + other.within[number] for number in WITHIN}
        return RankCounts(
            self.positions + other.positions, within, max(self.best, other.best), self.shared + other.shared
        )

    def found(self) -> Ranks | None:
        """Return the counts as the report has them; None without positions."""
        within = {str(number): count for number, count in self.within.items()}
        return Ranks(self.positions, within, self.best, self.shared) if self.positions else None


def _per_row(truths: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return the number of true values in each row of [n, V], as [n]; fast if few are true."""
    return np.bincount(np.flatnonzero(truths) // truths.shape[1], minlength=len(truths))


def _among_best(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask [n, V] of the `BEST` largest values of each row; a NaN takes one of their places and is false."""
    if rows.shape[1] <= BEST:
        return np.ones(rows.shape, bool)
    return rows >= _least_of_best(rows)[:, None]


def _least_of_best(rows: NDArray[Any]) -> NDArray[Any]:
    """Return the `BEST`-th largest value of each row of [n, V], as [n]."""
    count, width = rows.shape
    if width >= MANY:
        blocks = width // BLOCK
        whole = rows[:, : blocks * BLOCK].reshape(count, BLOCK, blocks)
        chosen = np.argpartition(whole.max(axis=1), blocks - BEST, axis=1)[:, blocks - BEST :]
        inside = np.take_along_axis(whole, chosen[:, None, :], axis=2).reshape(count, -1)
        rows = np.concatenate([inside, rows[:, blocks * BLOCK :]], axis=1)
    least: NDArray[Any] = np.partition(rows, rows.shape[1] - BEST, axis=1)[:, rows.shape[1] - BEST]
    return least
