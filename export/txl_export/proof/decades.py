"""Counts of errors by decade: nothing of a single position or value is kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

EDGES = tuple(float(f"1e{power}") for power in range(-9, 1))
"""Between the bins: one below 1e-9, one for every decade, and one from 1 on."""
KL_EDGES = tuple(float(f"1e{power}") for power in range(-15, 1))
"""Likewise of divergence, which is about the square of the errors behind it."""


def counts_of(sizes: ArrayLike, edges: Sequence[float] = EDGES, largest: float | None = None) -> NDArray[np.int64]:
    """Count sizes below edges[0], from there to below edges[1], …, from edges[-1] on: int64 [len(edges) + 1].

    NaN counts as infinitely large. `largest` is that of the sizes where it is known, and saves work.
    """
    each = np.asarray(sizes)
    most = np.inf if largest is None or np.isnan(largest) else largest
    below = [each.size if edge > most else int(np.count_nonzero(each < edge)) for edge in edges]
    return np.diff([0, *below, each.size])
