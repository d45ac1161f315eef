"""How far rounding alone takes a model: the reference in float32 against itself in float64, over the same segments.

Some models make small differences larger with every segment, untrained ones above all. No two computations of such a
model stay together, so the outputs and states in which rounding grows can only be compared segment by segment. Rounding
need not grow in all of them: the others are compared along the whole chain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.ladder import AMPLIFIED, DRIFT_SLACK, no_drift_limit
from txl_runtime.types import Array

from txl_export.proof.chains import Planned
from txl_export.proof.input_source import InputSource
from txl_export.proof.references import Reference, ReferenceStreams, run_together
from txl_export.proof.tensor_errors import StepChain, TensorErrors


class OwnRounding:
    """The reference beside itself in float32.

    Attributes:
        errors: how far each output and state is that is no whole number, by "output" or "state" and its name.
        sides: the reference, and itself in float32.
    """

    def __init__(self, manifest: Manifest, reference: Reference, single: Reference, count: int) -> None:
        self.sides = [ReferenceStreams(manifest, side, count) for side in (reference, single)]
        self._nats = {f"output {output.name}" for output in manifest.outputs if output.role == "logprobs"}
        self.errors: dict[str, TensorErrors] = {}

    def segment(self, inputs: Mapping[str, Array], counts: Any) -> float:
        """One segment on both sides: how far they are apart at most."""
        pairs: dict[str, list[tuple[Array, Array]]] = {}
        for name, _, (exact, rounded) in run_together(self.sides, inputs, counts):
            pairs.setdefault(name, []).append((exact, rounded))
        largest = 0.0
        for name, some in pairs.items():
            if np.issubdtype(some[0][0].dtype, np.floating):
                self.errors.setdefault(name, TensorErrors(nats=name in self._nats)).add(*some)
                largest = max(largest, self.errors[name].most[-1])
        return largest

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """These sequences, or all, begin anew on both sides."""
        for side in self.sides:
            side.reset(rows)


@dataclass(frozen=True)
class Growing:
    """What rounding grows in.

    Attributes:
        far: outputs and states that are further than `AMPLIFIED` from themselves in float32, and how far at most.
        drifting: others whose small distance from themselves becomes larger along a chain.
    """

    far: Mapping[str, float]
    drifting: Collection[str]


def own_rounding(
    manifest: Manifest,
    reference: Reference,
    samples: Mapping[str, Any] | None,
    chains: Sequence[tuple[Planned, StepChain]],
) -> Growing | None:
    """What rounding grows in in the module itself; None where nothing is far from itself in float32, and where it has
    no higher precision.

    Args:
        manifest: of the bundle.
        reference: the module.
        samples: real inputs by name, or None.
        chains: that were run, of which those of whole segments are run again.
    """
    single = reference.in_single()
    largest: dict[str, float] = {}
    drifting = set()
    for chain, ran in chains:
        if single is None or not chain.length:
            continue
        beside = OwnRounding(manifest, reference, single, chain.streams)
        source = InputSource(manifest, samples, np.random.default_rng(0), chain.segments * chain.streams)
        counts = np.full(chain.streams, chain.length, np.int32)
        for _ in range(ran.segments):
            beside.segment(source.take(chain.streams, chain.length), counts)
        for name, errors in beside.errors.items():
            largest[name] = max(largest.get(name, 0.0), errors.largest)
            ends = ran.early_and_late_of(errors.mean)
            if ends is not None and ends[1] > no_drift_limit(ends[0]) - DRIFT_SLACK:
                drifting.add(name)
    far = {name: value for name, value in largest.items() if value > AMPLIFIED}
    return Growing(far, drifting - set(far)) if far else None


def told_apart(manifest: Manifest, free: StepChain, handed: StepChain, growing: Growing) -> StepChain:
    """A chain as it ran by itself, but for what rounding grows in: that as it ran from the module's own states, and of
    what only drifts with it the drift.
    """

    def chosen(kind: str) -> dict[str, TensorErrors]:
        found: dict[str, TensorErrors] = {}
        for name, errors in getattr(free, f"{kind}s").items():
            other: TensorErrors = getattr(handed, f"{kind}s")[name]
            if f"{kind} {name}" in growing.drifting:
                found[name] = replace(errors, mean=other.mean)
            else:
                found[name] = other if f"{kind} {name}" in growing.far else errors
        return found

    logprobs = manifest.logprobs
    chain = handed if logprobs is not None and f"output {logprobs.name}" in growing.far else free
    return replace(chain, outputs=chosen("output"), states=chosen("state"))
