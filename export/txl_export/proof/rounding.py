"""How far rounding alone takes a model: the reference in float32 beside itself in float64, over the same segments.

Some models make small differences larger with every segment, untrained ones above all. No two computations of such a
model stay together. Where the bundle can go on from the reference's states, the outputs and states in which rounding
grows are compared segment by segment, and all others along the whole chain. Elsewhere the failure stays, and its advice
says how far the model is from itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.ladder import explained, float32_limit, no_drift_limit
from txl_runtime.types import Array, Ids

from txl_export.proof.chains import Planned, calls_of
from txl_export.proof.comparing import ChainErrors, TensorErrors
from txl_export.proof.input_source import InputSource
from txl_export.proof.references import Reference, ReferenceStreams, run_together


class OwnRounding:
    """The reference beside itself in float32.

    Attributes:
        errors: how far each output and state is that is no whole number, by "output" or "state" and its name.
    """

    def __init__(self, manifest: Manifest, sides: Sequence[Reference], count: int) -> None:
        self._sides = [ReferenceStreams(manifest, side, count) for side in sides]
        self._nats = {f"output {output.name}" for output in manifest.outputs if output.role == "logprobs"}
        self.errors: dict[str, TensorErrors] = {}

    def segment(self, inputs: Mapping[str, Array], counts: Ids) -> float:
        """One segment on both sides: how far they are apart at most."""
        pairs: dict[str, list[tuple[Array, Array]]] = {}
        for name, rows, (exact, rounded) in run_together(self._sides, inputs, counts):
            if callable(exact) and callable(rounded):  # log-probabilities, of which no piece is relative to another
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
        made = TensorErrors(nats=nats, mask=self._sides[0].reference.mask(nats))
        return self.errors.setdefault(name, made)

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """These sequences, or all, begin anew on both sides."""
        for side in self._sides:
            side.reset(rows)

    def largest(self, kind: str) -> float:
        """The largest error of all outputs, or of all states."""
        return max((errors.largest for name, errors in self.errors.items() if name.startswith(kind)), default=0.0)


def rounding_of(
    manifest: Manifest, reference: Reference, calls: Iterable[tuple[dict[str, Array], Ids]]
) -> tuple[float, float] | None:
    """The largest differences of outputs and of states in these segments, each relative as `Tensor` says; None for a
    model that is not computed in both precisions.
    """
    sides, beside = reference.precisions(), None
    for inputs, counts in calls if sides is not None else ():
        beside = beside or OwnRounding(manifest, sides or (), len(counts))
        beside.segment(inputs, counts)
    return None if beside is None else (beside.largest("output"), beside.largest("state"))


@dataclass(frozen=True)
class Growing:
    """What rounding grows in.

    Attributes:
        far: outputs and states that rounding alone takes beyond `float32_limit`, and how far they are from themselves.
        drifting: others whose small distance from themselves becomes larger along a chain.
    """

    far: Mapping[str, float]
    drifting: Collection[str]


def own_rounding(
    manifest: Manifest,
    reference: Reference,
    samples: Mapping[str, Any] | None,
    chains: Sequence[tuple[Planned, ChainErrors]],
) -> Growing:
    """What rounding grows in in the model itself; nothing where it is not computed in both precisions.

    Args:
        manifest: of the bundle.
        reference: the model.
        samples: real inputs by name, or None.
        chains: that were run, of which those without operations are run again.
    """
    sides, largest, drifting = reference.precisions(), dict[str, float](), set[str]()
    for chain, ran in chains:
        if sides is None or chain.mixed == "operations":
            continue
        beside, draws = OwnRounding(manifest, sides, chain.streams), np.random.default_rng(chain.seed)
        count = chain.segments * chain.streams
        source = InputSource(manifest, samples, draws, count, reference.large, reference.below, reference.flags)
        for inputs, counts in islice(calls_of(chain, source, draws), ran.chain.segments):
            beside.segment(inputs, counts)
        for name, errors in beside.errors.items():
            largest[name] = max(largest.get(name, 0.0), errors.largest)
            ends = ran.early_and_late(errors.tensor.mean)
            if ends is not None and explained(ends[1]) > no_drift_limit(explained(ends[0])):
                drifting.add(name)
    far = {name: value for name, value in largest.items() if explained(value) > float32_limit()}
    return Growing(far, drifting - set(far))


def told_apart(manifest: Manifest, free: ChainErrors, handed: ChainErrors, growing: Growing) -> ChainErrors:
    """What to judge of one chain that ran twice: by itself (free), and segment by segment from the model's own states
    (handed).

    Outputs and states in which rounding grows are those of the handed run. Those that only drift along with them keep
    their own errors and have the handed run's drift. All others are those of the free run.
    """

    def chosen(kind: str) -> dict[str, TensorErrors]:
        found: dict[str, TensorErrors] = {}
        for name, errors in getattr(free, f"{kind}s").items():
            other: TensorErrors = getattr(handed, f"{kind}s")[name]
            if f"{kind} {name}" in growing.drifting:
                errors.tensor.mean = other.tensor.mean
            found[name] = other if f"{kind} {name}" in growing.far else errors
        return found

    logprobs = manifest.logprobs
    chain = handed if logprobs is not None and f"output {logprobs.name}" in growing.far else free
    return replace(chain, outputs=chosen("output"), states=chosen("state"))
