"""Detects states that are full, and whole numbers that still grow: both decide how many segments a chain must have."""

from __future__ import annotations

from typing import Any

import numpy as np
from txl_runtime.types import Array

FULL, MOST = 0.99, 0.75
"""Shares of the values of a state that ever change. A state counts as full when the share `FULL` has changed. If the
share `MOST` changed in less than half that time, the state counts as full from then: the other values were not filled
row by row, e.g. a channel behind a ReLU that first fires late, in a buffer of 4 rows."""
LAST = 8
"""Number of successive segments in which an integer has to grow (or shrink) to count as a counter, such as the steps of
an episode.

After a change in the opposite direction, the integer needs `LAST` segments more than have run so far. So the position
in a ring, which returns to 0 repeatedly, is no counter.
"""


class Filling:
    """The history of one state along a chain.

    Args:
        fresh: the values before the first segment; None if the state does not exist before it.
        whole: whether the values are integers.
    """

    def __init__(self, fresh: Array | None, whole: bool) -> None:
        self._fresh, self._whole = fresh, whole
        self._changed: list[int] = []
        self._held: Array | None = None
        self._up: Any = 0
        self._down: Any = 0

    def add(self, values: Array) -> None:
        """Record the state's values after a segment; if its shape changed, counting starts anew.

        For example, values [2, 16, 32] of which 9 rows differ from the fresh state.
        """
        same = self._fresh is not None and self._fresh.shape == values.shape
        self._changed.append(int((values != self._fresh).sum()) if same else values.size)
        if not self._whole:
            return
        if self._held is None or self._held.shape != values.shape:
            self._up = self._down = 0
        else:
            up, down, before = values > self._held, values < self._held, -len(self._changed)
            self._up = np.where(up, self._up + 1, np.where(down, before, np.minimum(self._up, 0)))
            self._down = np.where(down, self._down + 1, np.where(up, before, np.minimum(self._down, 0)))
        self._held = values

    @property
    def full_after(self) -> int:
        """The number of segments until nearly all values that ever change had changed, see `FULL`."""
        most = max(self._changed, default=0)
        full, early = (
            next((index + 1 for index, count in enumerate(self._changed) if count >= share * most), 0) if most else 0
            for share in (FULL, MOST)
        )
        return early if 2 * early < full else full

    @property
    def filling(self) -> bool:
        """True if filling took more than half of the segments, so that the state may still be filling."""
        return 2 * self.full_after > len(self._changed)

    @property
    def counting(self) -> bool:
        """True if an integer changed in one direction in the last `LAST` segments or more."""
        return bool((np.maximum(self._up, self._down) >= LAST).any())
