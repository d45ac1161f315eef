"""How far rounding alone takes a model: the reference in float32 against itself in float64, over the same segments.

There are models that make small differences larger with every segment, untrained ones above all. No two computations of
such a model stay together, so segments can only be compared one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.ladder import AMPLIFIED
from txl_runtime.types import Array

from txl_export.parity.steps.chains import Planned
from txl_export.parity.steps.inputs import InputSource
from txl_export.parity.steps.results import TensorErrors
from txl_export.parity.steps.truth import Reference, ReferenceStreams


class OwnRounding:
    """The reference beside itself in float32.

    Attributes:
        largest: largest |Δ| of any output or state that is no whole number, relative to max(1, largest value so far).
    """

    def __init__(self, manifest: Manifest, reference: Reference, single: Reference, count: int) -> None:
        self._sides = [ReferenceStreams(manifest, side, count) for side in (reference, single)]
        self._errors: dict[str, TensorErrors] = {}
        self.largest = 0.0

    def segment(self, inputs: Mapping[str, Array], counts: Any) -> None:
        """One segment on both sides."""
        outputs = [side.run(inputs, counts) for side in self._sides]
        for (_, exact), (_, rounded) in zip(*outputs, strict=True):
            for name, values in exact.items():
                self._compare(f"output {name}", values, rounded[name])
        exact_state, rounded_state = (side.state() for side in self._sides)
        for name, held in exact_state.items():
            other = rounded_state[name]
            if held is not None and other is not None:
                self._compare(f"state {name}", held, other)

    def reset(self) -> None:
        """Begin anew on both sides, as if nothing had been compared."""
        self._errors, self.largest = {}, 0.0
        for side in self._sides:
            side.reset()

    def _compare(self, name: str, exact: Array, rounded: Array) -> None:
        if np.issubdtype(exact.dtype, np.floating):
            errors = self._errors.setdefault(name, TensorErrors())
            errors.add((exact, rounded))
            self.largest = max(self.largest, errors.most[-1])


def own_rounding(
    manifest: Manifest, reference: Reference, samples: Mapping[str, Any] | None, chains: Sequence[Planned]
) -> float:
    """How far the reference in float32 is from itself at most in chains of whole segments; 0 where it has no higher
    precision. No more chains are run when one says enough.
    """
    single, largest = reference.in_single(), 0.0
    for chain in chains:
        if single is None or not chain.length or largest > AMPLIFIED:
            continue
        beside = OwnRounding(manifest, reference, single, chain.streams)
        source = InputSource(manifest, samples, np.random.default_rng(0))
        counts = np.full(chain.streams, chain.length, np.int32)
        for _ in range(chain.segments):
            beside.segment(source.take(chain.streams, chain.length), counts)
        largest = max(largest, beside.largest)
    return largest
