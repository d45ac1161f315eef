"""Check that a competitor computes the same as the bundle; otherwise timing would compare different things."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
from txl_export.proof.comparing import TensorErrors
from txl_report.schema.measurement import Agreement
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import CheckError, TxlError, one_line
from txl_runtime.ladder import competitor_limit, competitor_step_limit
from txl_runtime.listener import Listener
from txl_runtime.model import Model
from txl_runtime.types import Array, Arrays

from txl_deploy.bench.competitor import BundleCompetitor, Competitor, Maker, fill
from txl_deploy.bench.driving import filling, is_transformer_xl, random_inputs
from txl_deploy.bench.works import Works

COMPILED = "torch-compile"
"""Name of the competitor that may fail with an error of any class: each part of a compiler raises its own classes."""


def compared(
    works: Works, makers: Mapping[str, Maker], listener: Listener
) -> tuple[list[Competitor], dict[str, Agreement], dict[str, str]]:
    """Make competitors and compare each with the bundle.

    Return the competitors that ran, whose states are full; their agreement by name; and the reason for each name that
    failed.

    Raises:
        CheckError: a competitor does not compute the same as the bundle.
    """
    others: list[Competitor] = []
    agreement: dict[str, Agreement] = {}
    failed: dict[str, str] = {}
    for name, make in makers.items():
        listener.stage(f"check that {name} agrees")
        try:
            other = make()
            agreement[name] = agree(works.ours, other, works.model)
            others.append(other)
        except TxlError:
            raise
        except Exception as error:
            if name != COMPILED:
                raise
            failed[name] = f"it fails on this module: {type(error).__name__}: {one_line(error)}"
    if failed:
        fill(works.ours, works.model)  # the failure may have left the bundle's state half full
    return others, agreement, failed


def agree(bundle: BundleCompetitor, other: Competitor, model: Model) -> Agreement:
    """Compare a competitor with the bundle over chained segments, first with new states, then with full states.

    The states of both are reset before, and full afterwards.

    Raises:
        CheckError: the two do not compute the same function.
    """
    started, manifest = time.monotonic(), model.manifest
    agreement = _Distributions(manifest, other.precision) if is_transformer_xl(manifest) else _Outputs(manifest)

    def compare(inputs: Arrays) -> None:
        agreement.add(bundle.run(inputs), other.run(inputs))

    bundle.reset()
    other.reset()
    for seed, length in enumerate(agreement.first):
        compare(random_inputs(manifest, length, 100 + seed))
    for inputs in filling(manifest, bundle.stream, seed=200):
        if agreement.while_filling:
            compare(inputs)
        else:
            bundle.advance(inputs)
            other.advance(inputs)
    for seed, length in enumerate(agreement.last):
        compare(random_inputs(manifest, length, 300 + seed))
    return agreement.judged(other.name, time.monotonic() - started)


class _Distributions:
    """The comparison of log-probabilities in nats, by their largest difference and by the mean KL divergence.

    Attributes:
        first, last: lengths of the segments that are compared before and after the state is filled.
        while_filling: True if the segments that fill the state are compared, too.
    """

    while_filling = False

    def __init__(self, manifest: Manifest, precision: str) -> None:
        longest = manifest.segment_lengths[0]
        self.first, self.last = (longest, 1), (longest, longest, 1, 1, 1, longest, 1)
        self._measure, self._limit = competitor_limit({precision, str(manifest.precision)})
        self._largest, self._divergences = list[float](), list[float]()  # each has one entry per segment

    def add(self, ours: Mapping[str, Array], theirs: Mapping[str, Array]) -> None:
        (one,), (other,) = ours.values(), theirs.values()
        worst, divergences = 0.0, []
        # row by row, because a float64 copy of all rows of a large vocabulary would take much memory
        for row in np.ndindex(one.shape[:-1]):
            p, q = one[row].astype(np.float64), other[row].astype(np.float64)
            worst = float(np.fmax(worst, np.abs(p - q).max())) if np.isfinite(p).all() else np.nan
            divergences.append(float((np.exp(q) * (q - p)).sum()))
        self._largest.append(worst)
        self._divergences.append(float(np.mean(divergences)))

    def judged(self, name: str, seconds: float) -> Agreement:
        """Return the agreement of the competitor called `name`, or raise a CheckError."""
        max_abs, kl = float(np.max(self._largest)), float(np.maximum(np.mean(self._divergences), 0))
        measure, limit, segments = self._measure, self._limit, len(self._largest)
        reached = kl if measure == "kl" else max_abs
        if not reached <= limit:  # this condition is also true for NaN
            raise CheckError(
                f"{name}: differs from the bundle by {measure} {reached:.3g} over {segments} chained segments, "
                f"expected at most {limit:g}; it computes something else, so it is not timed: leave it out of --against"
            )
        return Agreement(segments=segments, max_abs=max_abs, kl=kl, limit=limit, measure=measure)


class _Outputs:
    """The comparison of all outputs of a model that is no Transformer-XL; attributes are as in `_Distributions`.

    The bundle's precision decides the measure and its limit.
    """

    while_filling = True

    def __init__(self, manifest: Manifest) -> None:
        self.first, self.last, self.segments = manifest.segment_lengths, 3 * manifest.segment_lengths, 0
        self._measure, self._limit = competitor_step_limit(manifest.precision)
        self._errors = {output.name: TensorErrors(output.dtype in ("int32", "bool")) for output in manifest.outputs}

    def add(self, ours: Mapping[str, Array], theirs: Mapping[str, Array]) -> None:
        self.segments += 1
        for name, tensor in self._errors.items():
            tensor.add((theirs[name], ours[name]))

    def judged(self, name: str, seconds: float) -> Agreement:
        judgements: dict[str, float | None] = {}
        for output, tensor in self._errors.items():
            reached = tensor.deviation if self._measure == "deviation" and not tensor.exact else tensor.largest
            limit = 0 if tensor.exact else self._limit
            if tensor.shapes or not reached <= limit:
                what = "shape" if tensor.shapes else f"{self._measure} {reached:.3g}"
                raise CheckError(
                    f"{name}: {output} differs from the bundle's by {what} over {self.segments} chained segments, "
                    f"expected at most {limit:g}; it computes something else, so it is not timed: give the module and "
                    "the weights that the bundle was exported from"
                )
            judgements[output] = reached
        return Agreement(
            segments=self.segments, found=judgements, limit=self._limit, measure=self._measure, seconds=seconds
        )
