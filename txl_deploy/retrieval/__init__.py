"""Datastores hold a feature and the next token for each position of texts that a model has read.

Commands search a datastore at each prediction, and mix the tokens after the nearest features into the prediction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from txl_runtime.errors import UsageError

KNN, KNN_TEMPERATURE, KNN_WEIGHT = 32, 1.0, 0.25
"""Defaults of K, T and W (see `Mixture`) in commands; docs/datastore.md has curves of the loss over them."""
MOST = 1024
"""Maximum number of neighbours."""


@dataclass(frozen=True)
class Mixture:
    """A datastore, and the numbers of log(W · p_neighbours + (1 - W) · p_model).

    Attributes:
        folder: the datastore's folder.
        neighbours: K, number of neighbours; None for 32, or with a gate for the gate's K.
        temperature: T, divisor of squared distances; None for 1, or with a gate for the gate's T.
        weight: W, the neighbours' share; "gate" for a W per position, which `datastore fit` learnt; None for 0.25.

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
