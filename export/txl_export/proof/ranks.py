"""Where the tokens that the reference likes best stand in the bundle's order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from txl_report.schema.verification import Ranks

WITHIN = (1, 2, 5, 10)
"""Numbers of the bundle's best tokens, among which the reference's best is looked for."""
BEST = WITHIN[-1]
"""So many of the best tokens of both sides are compared."""
MANY, BLOCK = 5000, 64
"""Of as many columns, the largest value of each block is found first: the ten best lie in the ten best blocks."""


@dataclass
class RankCounts:
    """Agreement in order, near-ties included, counted as it comes.

    Attributes:
        positions: looked at.
        within: by number of best tokens, the positions at which the reference's best token is among so many of the
            bundle's. Tokens that are as likely as that one do not stand before it.
        best: how many best tokens are compared: `BEST`, or all of a smaller vocabulary.
        shared: over all positions, how many of the reference's best tokens are among the bundle's.
    """

    positions: int = 0
    within: dict[int, int] = field(default_factory=lambda: dict.fromkeys(WITHIN, 0))
    best: int = 0
    shared: int = 0

    def add(self, favourite: NDArray[np.intp], expected: NDArray[Any], found: NDArray[Any]) -> None:
        """Some positions.

        Args:
            favourite: the reference's best token of each, [n].
            expected, found: log-probabilities of the reference and of the bundle, [n, V]. What is no number counts as
                a token that stands before all others.
        """
        of_favourite = found[np.arange(len(found)), favourite]
        before = _per_row(~(found <= of_favourite[:, None]))
        self.positions += len(found)
        for number in WITHIN:
            self.within[number] += int(np.count_nonzero(before < number))
        self.best = min(BEST, found.shape[1])
        both = _among_best(expected)
        both &= _among_best(found)
        self.shared += int(np.minimum(_per_row(both), self.best).sum())  # values may be equal

    def joined(self, other: RankCounts) -> RankCounts:
        """Both."""
        within = {number: self.within[number] + other.within[number] for number in WITHIN}
        return RankCounts(
            self.positions + other.positions, within, max(self.best, other.best), self.shared + other.shared
        )

    def found(self) -> Ranks | None:
        """As the report has them; None where nothing was looked at."""
        within = {str(number): count for number, count in self.within.items()}
        return Ranks(self.positions, within, self.best, self.shared) if self.positions else None


def _per_row(truths: NDArray[np.bool_]) -> NDArray[np.intp]:
    """How many of each row [n, V] are true, [n]; quick where few are."""
    return np.bincount(np.flatnonzero(truths) // truths.shape[1], minlength=len(truths))


def _among_best(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Which values of each row [n, V] are among its `BEST` largest; none of a row that holds what is no number."""
    if rows.shape[1] <= BEST:
        return np.ones(rows.shape, bool)
    return rows >= _least_of_best(rows)[:, None]


def _least_of_best(rows: NDArray[Any]) -> NDArray[Any]:
    """The `BEST`-th largest value of each row, [n]."""
    count, width = rows.shape
    if width >= MANY:
        blocks = width // BLOCK
        whole = rows[:, : blocks * BLOCK].reshape(count, BLOCK, blocks)
        chosen = np.argpartition(whole.max(axis=1), blocks - BEST, axis=1)[:, blocks - BEST :]
        inside = np.take_along_axis(whole, chosen[:, None, :], axis=2).reshape(count, -1)
        rows = np.concatenate([inside, rows[:, blocks * BLOCK :]], axis=1)
    least: NDArray[Any] = np.partition(rows, rows.shape[1] - BEST, axis=1)[:, rows.shape[1] - BEST]
    return least
