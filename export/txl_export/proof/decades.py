"""Counts errors by decade, e.g. 12 errors between 1e-7 and 1e-6, instead of keeping each error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

EDGES = tuple(float(f"1e{power}") for power in range(-9, 1))
"""Edges 1e-9, 1e-8, …, 1 of the 11 bins: the first bin lies below 1e-9, the last begins at 1."""
KL_EDGES = tuple(float(f"1e{power}") for power in range(-15, 1))
"""Edges for KL divergence in nats. They begin at 1e-15, because KL is about the square of the underlying errors."""


def counts_of(sizes: ArrayLike, edges: Sequence[float] = EDGES, largest: float | None = None) -> NDArray[np.int64]:
    """Return the number of sizes in each bin, int64 [len(edges) + 1]: below edges[0], …, from edges[-1] on.

    NaN counts as infinitely large. `largest`, the maximum of the sizes if known, saves passes over the sizes.

    Example:
        >>> counts_of([0.5, 5, 50], edges=(1, 10, 100)).tolist()
        [1, 1, 1, 0]
    """
    each = np.asarray(sizes)
    most = np.inf if largest is None or np.isnan(largest) else largest
    below = [each.size if edge > most else int(np.count_nonzero(each < edge)) for edge in edges]
    return np.diff([0, *below, each.size])
