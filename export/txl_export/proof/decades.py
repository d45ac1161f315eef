"""How errors are spread over decades, counted as they come: nothing of a single position or value is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from txl_report.schema.verification import Counts

EDGES = tuple(float(f"1e{power}") for power in range(-9, 1))
"""Between the bins: one below 1e-9, one for every decade, and one from 1 on."""
KL_EDGES = tuple(float(f"1e{power}") for power in range(-15, 1))
"""Likewise of divergence, which is about the square of the errors behind it."""


class Decades:
    """How many sizes of errors lie in each decade.

    Attributes:
        edges: between the bins.
        counts: int64 [len(edges) + 1], of sizes below edges[0], from there to below edges[1], …, from edges[-1] on.
            What is no number counts as infinitely large.
    """

    def __init__(self, edges: Sequence[float] = EDGES) -> None:
        self.edges = edges
        self.counts: NDArray[np.int64] = np.zeros(len(edges) + 1, np.int64)

    def add(self, sizes: NDArray[np.floating[Any]], largest: float | None = None) -> None:
        """Count some more sizes; `largest` is that of them where it is known, and saves work."""
        most = np.inf if largest is None or np.isnan(largest) else largest
        below = [sizes.size if edge > most else int(np.count_nonzero(sizes < edge)) for edge in self.edges]
        self.counts += np.diff([0, *below, sizes.size])

    def found(self) -> Counts:
        """The counts, as the report has them."""
        return tuple(self.counts.tolist())


def joined(parts: Sequence[Decades]) -> Decades:
    """The counts of all parts, whose edges are `EDGES`."""
    whole = Decades()
    for part in parts:
        whole.counts += part.counts
    return whole


def decades_of(sizes: ArrayLike, edges: Sequence[float] = EDGES) -> Decades:
    """The counts of sizes that are all there."""
    found = Decades(edges)
    found.add(np.asarray(sizes, np.float64))
    return found
