"""Types of arrays that several rooms speak of. Shapes are said where they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int32]
"""Token ids, and counts of them."""
Floats: TypeAlias = NDArray[np.float32]
"""What programs return and what memory rows are shown as."""
Indices: TypeAlias = NDArray[np.int64]
"""Places in another array."""
Array: TypeAlias = NDArray[Any]
"""An array whose dtype a table says."""
Arrays: TypeAlias = Mapping[str, Array]
"""Arrays by the names of a graph's inputs or outputs."""
Call: TypeAlias = Callable[[], None]
"""Runs a program on the arrays that it was bound to."""
