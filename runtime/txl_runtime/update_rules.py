"""What the ONNX Runtime that is installed can run."""

from __future__ import annotations

import re
from collections.abc import Sequence

FIRST_RING = (1, 25)
"""The first version with TensorScatter on the CPU; Python 3.10 has none of them."""


def usable_updates(updates: Sequence[str]) -> tuple[str, ...]:
    """Those update rules of a bundle that can run here, in order; all where none could or it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return tuple(updates)
    numbers = re.match(r"(\d+)\.(\d+)", onnxruntime.__version__)
    old = numbers is not None and (int(numbers[1]), int(numbers[2])) < FIRST_RING
    return tuple(rule for rule in updates if not (old and rule == "ring")) or tuple(updates)
