"""Types of arrays that several packages share. Their shapes are stated where the types are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int32]
"""Token ids and counts, int32."""
Floats: TypeAlias = NDArray[np.float32]
"""Results of programs, and memory rows as streams return them, float32."""
Indices: TypeAlias = NDArray[np.int64]
"""Indices into an array, int64."""
Array: TypeAlias = NDArray[Any]
"""An array whose type is declared in one of the bundle's tables."""
Arrays: TypeAlias = Mapping[str, Array]
"""Arrays by the names of a graph's inputs or outputs."""
Call: TypeAlias = Callable[[], None]
"""A function that runs a program on the arrays to which it was bound."""
