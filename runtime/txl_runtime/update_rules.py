"""What the ONNX Runtime that is installed can run."""

from __future__ import annotations

import re
from collections.abc import Sequence

FIRST_VERSIONS = {22: (1, 21), 23: (1, 23), 24: (1, 25)}
"""The first ONNX Runtime for graphs of an opset; those before 22 run with every version that is supported.

1.24 opens graphs of opset 24 and has no TensorScatter, for whose sake they are of it. Python 3.10 has no 1.24.
"""
RING = 24
"""The opset of graphs that write a ring."""


def missing_version(opset: int, installed: str) -> str:
    """The first ONNX Runtime that runs graphs of an opset, where the installed version is older; else ""."""
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    first = FIRST_VERSIONS.get(opset, (0, 0))
    old = numbers is not None and (int(numbers[1]), int(numbers[2])) < first
    return "{}.{}".format(*first) if old else ""


def wanted_version(opset: int, installed: str, update: str) -> str:
    """What an installed version lacks that cannot open a graph, in words; "" where it is not the graph's opset."""
    first = missing_version(opset, installed)
    other = ", or load with update rolled" if update == "ring" else ""
    return first and f"ONNX Runtime {first} or newer for opset {opset}, and this is {installed}; install that{other}"


def usable_updates(updates: Sequence[str]) -> tuple[str, ...]:
    """Those update rules of a bundle that can run here, in order; all where none could or it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return tuple(updates)
    old = missing_version(RING, onnxruntime.__version__)
    return tuple(rule for rule in updates if not (old and rule == "ring")) or tuple(updates)
