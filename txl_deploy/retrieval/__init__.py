"""Datastores: for each position of texts that a model has read, its feature and the next token, searched while
predicting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from txl_runtime.errors import UsageError

KNN, KNN_TEMPERATURE, KNN_WEIGHT = 32, 1.0, 0.25
"""Default K, T and W of commands; docs/datastore.md has curves over them."""
MOST = 1024
"""Maximum number of neighbours."""


@dataclass(frozen=True)
class Mixture:
    """A datastore, and the numbers of log(W · p_neighbours + (1 - W) · p_model).

    Attributes:
        folder: the datastore's folder.
        neighbours: K; None for 32, or that of the gate.
        temperature: T; None for 1, or that of the gate.
        weight: W; "gate" for one of each position's own, which `datastore fit` has learnt; None for 0.25.

    Raises:
        UsageError: a number is out of range.
    """

    folder: Path
    neighbours: int | None = None
    temperature: float | None = None
    weight: float | Literal["gate"] | None = None

    def __post_init__(self) -> None:
        if self.neighbours is not None and not 1 <= self.neighbours <= MOST:
            raise UsageError(f"--knn is {self.neighbours}, expected 1 … {MOST} neighbours; check it")
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise UsageError(f"--knn-temperature is {self.temperature}, expected a number above 0; check it")
        if self.weight is not None and self.weight != "gate" and not 0 <= self.weight < 1:
            raise UsageError(f"--knn-weight is {self.weight}, expected at least 0 and less than 1, or gate; check it")
