"""When a state is full, and whether its whole numbers still count: that decides how long a chain has to be."""

from __future__ import annotations

from typing import Any

import numpy as np
from txl_runtime.types import Array

FULL, MOST = 0.99, 0.75
"""A state is full when the first share has changed of all values that ever change. Where the second share had changed
in less than half of that time, the rest did not come row by row, e.g. a channel behind a ReLU that first fires late in
a buffer of 4 rows: the state is full with the second."""
LAST = 8
"""A whole number that grew in each of the last eight segments is said to count, if it never shrank, or has grown since
for longer than it was there before: the steps of an episode, when no flag comes any more. The place in a ring, which
goes back to 0 again and again, is not."""


class Filling:
    """One state along a chain.

    Args:
        fresh: its values before the first segment; None where it is absent then.
        whole: whether they are whole numbers.
    """

    def __init__(self, fresh: Array | None, whole: bool) -> None:
        self._fresh, self._whole = fresh, whole
        self._changed: list[int] = []
        self._held: Array | None = None
        self._up: Any = 0
        self._down: Any = 0

    def add(self, values: Array) -> None:
        """What the state holds after a segment; where it has another shape all whole numbers begin anew."""
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
        """The number of segments that it took until nearly everything had changed that ever did."""
        most = max(self._changed, default=0)
        full, early = (
            next((index + 1 for index, count in enumerate(self._changed) if count >= share * most), 0) if most else 0
            for share in (FULL, MOST)
        )
        return early if 2 * early < full else full

    @property
    def filling(self) -> bool:
        """Whether it is not full, or has not been for as long as it took."""
        return 2 * self.full_after > len(self._changed)

    @property
    def counting(self) -> bool:
        """Whether a whole number has changed in one direction for long."""
        return bool((np.maximum(self._up, self._down) >= LAST).any())
