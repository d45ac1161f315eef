"""Counts ranks: the places of the reference's best tokens in the bundle's order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from txl_report.schema.verification import Ranks

WITHIN = (1, 2, 5, 10)
"""Values k: positions are counted at which the reference's best token is among the bundle's k best tokens."""
BEST = WITHIN[-1]
"""Number of best tokens of each side whose overlap is counted."""
MANY, BLOCK = 5000, 64
"""Least number of columns at which maxima of blocks of 64 are computed first, to save time: the 10 best tokens lie in
the 10 best blocks."""


@dataclass
class RankCounts:
    """Counts how far reference and bundle agree in the order of tokens, near-ties included.

    Attributes:
        positions: number of positions counted.
        within: for each k in `WITHIN`, the number of positions at which the reference's best token is among the
            bundle's k best. Equally likely tokens do not count as better.
        best: number of best tokens whose overlap is counted: `BEST`, or all of a smaller vocabulary.
        shared: over all positions, the number of the reference's best tokens that are among the bundle's best.
    """

    positions: int = 0
    within: dict[int, int] = field(default_factory=lambda: dict.fromkeys(WITHIN, 0))
    best: int = 0
    shared: int = 0

    def add(self, favourite: NDArray[np.intp], expected: NDArray[Any], found: NDArray[Any]) -> None:
        """Add n positions to the counts.

        Args:
            favourite: the reference's best token at each position, [n].
            expected, found: log-probabilities of the reference and of the bundle, [n, V]; a token with NaN ranks first.

        Example:
            >>> counts = RankCounts()
            >>> logprobs = np.log([[0.5, 0.3, 0.2]])
            >>> counts.add(np.array([1]), logprobs, logprobs)  # the second best word: not the best, among the five best
            >>> counts.positions, counts.within[1], counts.within[5]
            (1, 0, 1)
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
        """Return the sum of both counts."""
        within = {number: self.within[number] + other.within[number] for number in WITHIN}
        return RankCounts(
            self.positions + other.positions, within, max(self.best, other.best), self.shared + other.shared
        )

    def summary(self) -> Ranks | None:
        """Return the counts in the report's form; None if no position was counted."""
        within = {str(number): count for number, count in self.within.items()}
        return Ranks(self.positions, within, self.best, self.shared) if self.positions else None


def _per_row(truths: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return the number of true values in each row of [n, V], as [n]; fast if there are few."""
    return np.bincount(np.flatnonzero(truths) // truths.shape[1], minlength=len(truths))


def _among_best(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask [n, V] of each row's `BEST` largest values; NaN counts as largest, but its mask is False."""
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
