"""Average losses, and estimate the error of a mean from blocks of neighbouring tokens."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from txl_report.measuring.results import Loss

BLOCK = 64
"""Number of tokens in a block: neighbouring tokens are correlated, but blocks hardly are."""
FEWEST_BLOCKS = 8
"""Minimum number of block means from which an error is computed."""

Values: TypeAlias = NDArray[np.float64]
"""Values of tokens, e.g. their losses in nats."""


def loss_of(values: Values, length: int | None = None) -> Loss:
    """Return the loss over all values [sequences, segments, positions]; for `length` see `error_of`."""
    nll = float(values.mean())
    with np.errstate(over="ignore"):
        return Loss(values.size, nll, error_of(values, length), float(np.exp(nll)))


def error_of(values: Values, length: int | None = None) -> float | None:
    """Return the standard error of the mean of values [sequences, segments, positions]; None for too few blocks.

    The error is computed from means of blocks of neighbouring segments; segments at the end of a sequence that fill no
    block are left out. `length` is the length of a whole segment, if the values cover only some of its positions.
    """
    sequences, segments, positions = values.shape
    together = min(-(-BLOCK // (length or positions)), segments)
    whole = segments // together
    if sequences * whole < FEWEST_BLOCKS:
        return None
    means = values[:, : whole * together].reshape(sequences * whole, -1).mean(axis=1)
    return float(means.std(ddof=1) / np.sqrt(len(means)))
