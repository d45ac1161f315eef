"""Measures the model's own rounding: runs the reference in float32 and in float64 over the same segments.

Some models, mostly untrained ones, amplify small differences with every segment, so that any two computations diverge.
If the bundle can continue from the reference's states, outputs and states in which rounding grows are compared segment
by segment, all others along the whole chain. Otherwise the gate fails, and its advice says how far float32 is from
float64 in the model itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.ladder import explained, float32_limit, no_drift_limit
from txl_runtime.types import Array, Ids

from txl_export.proof.chains import Planned, calls_of, source_of
from txl_export.proof.comparing import ChainErrors, TensorErrors
from txl_export.proof.references import Reference, ReferenceStreams, run_together


class OwnRounding:
    """Runs a reference in float64 and in float32 and compares the two.

    Attributes:
        errors: the errors of float32 in each float output and state, under names such as "output y" and "state h".
    """

    def __init__(self, manifest: Manifest, sides: Sequence[Reference], count: int) -> None:
        self._sides = [ReferenceStreams(manifest, side, count) for side in sides]
        self._nats = {f"output {output.name}" for output in manifest.outputs if output.role == "logprobs"}
        self.errors: dict[str, TensorErrors] = {}

    def segment(self, inputs: Mapping[str, Array], counts: Ids) -> float:
        """Run one segment on both sides; return its largest error of float32.

        For example, inputs {"x": [2, 5, 8]} with counts [5, 3] give 2.1e-07.
        """
        pairs: dict[str, list[tuple[Array, Array]]] = {}
        for name, rows, (exact, rounded) in run_together(self._sides, inputs, counts):
            if callable(exact) and callable(rounded):  # both yield pieces of log-probabilities
                pairs.setdefault(name, [])
                for row in range(len(rows)):
                    for piece in zip(exact(row), rounded(row), strict=True):
                        self._of(name).compare(piece)
            elif not callable(exact) and not callable(rounded) and exact.dtype.kind == "f":
                pairs.setdefault(name, []).append((exact, rounded))
        for name, some in pairs.items():
            self._of(name).add(*some)
        return max((self._of(name).tensor.most[-1] or 0.0 for name in pairs), default=0.0)

    def _of(self, name: str) -> TensorErrors:
        nats = name in self._nats
        errors = TensorErrors(nats=nats, mask=self._sides[0].reference.mask(nats))
        return self.errors.setdefault(name, errors)

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Reset the sequences `rows`, or all for None, on both sides."""
        for side in self._sides:
            side.reset(rows)


def own_rounding(
    manifest: Manifest,
    reference: Reference,
    samples: Mapping[str, Any] | None,
    chains: Sequence[tuple[Planned, ChainErrors]],
) -> tuple[dict[str, float], set[str]]:
    """Run chains again with the reference in both precisions; chains with operations are left out.

    Returns:
        Errors of float32 by output or state, e.g. {"state h": 0.02}, which are so large that they explain errors above
            `float32_limit`; and the names of outputs and states whose smaller error drifts along a chain. Both are
            empty if the model does not run in both precisions.
    """
    sides, largest, drifting = reference.precisions(), dict[str, float](), set[str]()
    for chain, ran in chains:
        if sides is None or chain.mixed == "operations":
            continue
        beside, draws = OwnRounding(manifest, sides, chain.streams), np.random.default_rng(chain.seed)
        source = source_of(manifest, reference, samples, chain, draws)
        for inputs, counts in islice(calls_of(chain, source, draws), ran.chain.segments):
            beside.segment(inputs, counts)
        for name, errors in beside.errors.items():
            largest[name] = max(largest.get(name, 0.0), errors.largest)
            ends = ran.early_and_late(errors.tensor.mean)
            if ends is not None and explained(ends[1]) > no_drift_limit(explained(ends[0])):
                drifting.add(name)
    far = {name: value for name, value in largest.items() if explained(value) > float32_limit()}
    return far, drifting - set(far)


def told_apart(
    manifest: Manifest, free: ChainErrors, handed: ChainErrors, far: Collection[str], drifting: Collection[str]
) -> ChainErrors:
    """Merge two runs of a chain: a free one, and one (`handed`) that continues from the reference's state after each
    segment.

    A tensor in `far` gets the errors of `handed`. A tensor in `drifting` keeps the errors of `free`, but gets the curve
    of mean errors of `handed`. Any other tensor keeps the errors of `free`.
    """
    for kind, mine, theirs in (("output", free.outputs, handed.outputs), ("state", free.states, handed.states)):
        for name, errors in theirs.items():
            if f"{kind} {name}" in far:
                mine[name] = errors
            elif f"{kind} {name}" in drifting:
                mine[name].tensor.mean = errors.tensor.mean
    logprobs = manifest.logprobs
    chain = handed if logprobs is not None and f"output {logprobs.name}" in far else free
    return replace(chain, outputs=free.outputs, states=free.states)
