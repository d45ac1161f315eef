"""Bits that have to be the same, and how many values had others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.types import Array, Arrays

REPEATED = "repeated call (bits)"
KEPT = "commit=False keeps the state (bits)"
IDLE = "idle rows (bits)"
INDEPENDENT = "independent sequences (bits)"
RESTORED = "restored snapshot (bits)"


class Bits:
    """Values that had other bits than they should, by what was tried.

    Attributes:
        found: how many, by what was tried.
    """

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def compare(self, tried: str, expected: Mapping[str, Array], found: Mapping[str, Array]) -> None:
        """Add the values that differ between arrays of the same names."""
        differing = sum(
            differing_values(expected[name], found[name]) if name in expected and name in found else 1
            for name in {*expected, *found}
        )
        self.found[tried] = self.found.get(tried, 0) + differing


def differing_values(expected: Array, found: Array) -> int:
    """How many values have other bits; all where shape or dtype differ. NaN of the same bits is the same."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return max(expected.size, found.size, 1)
    pair = [np.frombuffer(array.tobytes(), np.uint8).reshape(-1, array.itemsize) for array in (expected, found)]
    return int((pair[0] != pair[1]).any(axis=1).sum())


def state_rows(manifest: Manifest, state: Arrays, rows: list[int]) -> dict[str, Array]:
    """Some sequences of every state that has an axis for them."""
    axes = {entry.name: entry.batch_axis for entry in manifest.states}
    return {
        name: np.take(values, rows, axis=axis)
        for name, values in state.items()
        if (axis := axes.get(name)) is not None and values is not None
    }


def output_rows(manifest: Manifest, outputs: Arrays, rows: list[int]) -> dict[str, Array]:
    """Some sequences of every output that has an axis for them."""
    return {
        output.name: np.take(outputs[output.name], rows, axis=output.shape.index("B"))
        for output in manifest.outputs
        if "B" in output.shape
    }
