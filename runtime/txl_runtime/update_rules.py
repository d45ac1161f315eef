"""The opsets (versions of ONNX's operators) and update rules that the installed ONNX Runtime supports."""

from __future__ import annotations

import re
from collections.abc import Sequence

FIRST_VERSIONS = {22: (1, 21), 23: (1, 23), 24: (1, 25)}
"""First ONNX Runtime version that runs graphs of an opset; every supported version runs opsets before 22.

ONNX Runtime 1.24 opens graphs of opset 24, but lacks TensorScatter, for which graphs have that opset. Python 3.10 has
no ONNX Runtime 1.24.
"""
RING = 24
"""The opset of graphs with a ring: the first with TensorScatter."""


def missing_version(opset: int, installed: str) -> str:
    """Return the first ONNX Runtime version that runs an opset, if the installed version is older; else ""."""
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    first = FIRST_VERSIONS.get(opset, (0, 0))
    old = numbers is not None and (int(numbers[1]), int(numbers[2])) < first
    return "{}.{}".format(*first) if old else ""


def wanted_version(opset: int, installed: str, update: str) -> str:
    """Return the version to install and the reason, for a graph that cannot be opened; "" if the opset is fine."""
    first = missing_version(opset, installed)
    other = ", or load with update rolled" if update == "ring" else ""
    return first and f"ONNX Runtime {first} or newer for opset {opset}, and this is {installed}; install that{other}"


def usable_updates(updates: Sequence[str]) -> tuple[str, ...]:
    """Return the update rules of a bundle that can run here, in order; all if none can or ONNX Runtime is missing."""
    try:
        import onnxruntime
    except ImportError:
        return tuple(updates)
    old = missing_version(RING, onnxruntime.__version__)
    return tuple(rule for rule in updates if not (old and rule == "ring")) or tuple(updates)
