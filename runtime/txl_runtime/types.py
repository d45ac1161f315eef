"""Types of arrays that several rooms share. Shapes stand where the types are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int32]
"""Token ids, and counts."""
Floats: TypeAlias = NDArray[np.float32]
"""Results of programs, and memory rows as streams return them."""
Indices: TypeAlias = NDArray[np.int64]
"""Indices into an array."""
Array: TypeAlias = NDArray[Any]
"""An array whose dtype a table has."""
Arrays: TypeAlias = Mapping[str, Array]
"""Arrays by the names of a graph's inputs or outputs."""
Call: TypeAlias = Callable[[], None]
"""A function that runs a program on the arrays that it was bound to."""
