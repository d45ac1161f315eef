"""Compares arrays bit by bit, and counts the values that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.types import Array, Arrays

REPEATED = "repeated call (bits)"
KEPT = "commit=False keeps the state (bits)"
IDLE = "idle rows (bits)"
INDEPENDENT = "independent sequences (bits)"
RESTORED = "restored snapshot (bits)"
FORMS = "fast form of the graphs (bits)"


class Bits:
    """Counts the values with wrong bits, separately for each kind of trial.

    Attributes:
        found: the counts by trial, e.g. {"idle rows (bits)": 0}.
    """

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def compare(self, tried: str, expected: Mapping[str, Array], found: Mapping[str, Array]) -> None:
        """Count the values that differ between arrays of the same name; an array that one side lacks counts 1.

        For example, 3 differing values of {"output y": [2, 4]} add 3 to the count of `tried`.
        """
        differing = sum(
            differing_values(expected[name], found[name]) if name in expected and name in found else 1
            for name in {*expected, *found}
        )
        self.found[tried] = self.found.get(tried, 0) + differing


def differing_values(expected: Array, found: Array) -> int:
    """Return the number of values with different bits: -0.0 and 0.0 differ. If shape or dtype differ, all values do.

    Example:
        >>> differing_values(np.float32([0, 1]), np.float32([-0.0, 1]))
        1
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return max(expected.size, found.size, 1)
    one, other = (np.ascontiguousarray(array).view(f"u{array.itemsize}") for array in (expected, found))
    return int(np.count_nonzero(one != other))


def named(outputs: Arrays, states: Arrays) -> dict[str, Array]:
    """Return outputs and states in one dictionary, with "output" or "state" before each name.

    For example, {"output logprobs": [2, 5, 256], "state h": [2, 32]}.
    """
    arrays = {f"output {name}": values for name, values in outputs.items()}
    return arrays | {f"state {name}": values for name, values in states.items()}


def rows_of(manifest: Manifest, results: Arrays, rows: Sequence[int] | NDArray[np.integer]) -> dict[str, Array]:
    """Return the sequences `rows` of `named` results; results without an axis of sequences are left out.

    For example, rows [0, 2] cut [4, 32] to [2, 32].
    """
    axes = {f"output {one.name}": one.axes for one in manifest.outputs if one.axes.batch is not None}
    axes |= {f"state {one.name}": one.axes for one in manifest.states if one.axes.batch is not None}
    return {name: values[axes[name].at(rows)] for name, values in results.items() if name in axes}
