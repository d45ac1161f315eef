"""Runs segments with values that chains lack: very large ones, zeros, integers beyond 0 and 1, and NaN.

A module may have a branch for such values that the chains never reach, and its graph may lack that branch. Both sides
begin each segment with the module's state. If a step reads only tokens, states are made large or zero instead; then a
difference is only a warning, because the module may never reach such states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from txl_report.schema.verification import Gate
from txl_runtime.errors import BackendError, UsageError
from txl_runtime.ladder import float32_limit, limit_of
from txl_runtime.model import Model
from txl_runtime.selftest import relative_difference
from txl_runtime.types import Array, Arrays

from txl_export.proof.bits import named, rows_of
from txl_export.proof.chains import live_sequences
from txl_export.proof.input_source import POISON, InputSource
from txl_export.proof.references import Reference, ReferenceStreams, States, hand_over, run_together, whole

FAR = "large and zero inputs max abs (relative)"
FACTOR, NUMBERS = 100, 8
"""Factor of large inputs; number of values (0 to 7) of integer inputs, unless the module refuses these."""
TIMES = 3
"""Number of segments with large inputs, and of segments with zeros; each of them follows a usual segment."""

TOLD = {FACTOR: f"{FACTOR} times as large as usual", 0: "all zero", 1: "as usual after such a segment"}
ADVICE = "docs/own-models-reference.md#large-numbers has a table of functions and what to write in their place"

Samples: TypeAlias = Mapping[str, Any] | None
Found: TypeAlias = tuple[str, bool, Array, Array, Array]
"""The name of an output or state, True if it is in nats, and its values: the bundle's, and the module's in float32 and
in float64."""


class OddSegments:
    """Runs a bundle, and its module in float32 and float64; only the first `live` of `count` sequences run."""

    def __init__(self, model: Model, reference: Reference, samples: Samples, count: int, live: int) -> None:
        self._manifest, self.draws = model.manifest, np.random.default_rng(13)
        self._source, self._stream = InputSource(model.manifest, samples, self.draws), model.stream(count)
        sides = reference.in_single() or reference, reference
        self.module, self._exact = (ReferenceStreams(model.manifest, side, count) for side in sides)
        self._runs = np.arange(count) < live

    def take(self, length: int) -> dict[str, Array]:
        """Return the usual inputs of the next segment. For example, `take(5)` is {"x": [2, 5, 8]}."""
        self._counts = self._runs * np.int32(length)
        return self._source.take(len(self._runs), length)

    def run(self, inputs: Arrays, begun: list[States]) -> Iterator[Found]:
        """Run a segment from the states `begun`; yield each result, but none if the module refuses the inputs.

        For example, inputs {"x": [2, 5, 8]} full of zeros.
        """
        self.module.restore(begun)
        self._exact.restore(begun)
        hand_over(self._stream, self._manifest, self.module.state())
        try:
            returned = list(run_together((self.module, self._exact), inputs, self._counts))
        except UsageError:
            self.module.restore(begun)
            return
        ours = named(self._stream.run(inputs, lengths=self._counts), self._stream.state())
        nats = {f"output {one.name}" for one in self._manifest.outputs if one.role == "logprobs"}
        for what, rows, sides in returned:
            single, double = (whole(side, len(rows)) for side in sides)
            results = ours | rows_of(self._manifest, ours, rows)
            yield what, what in nats, results.get(what, np.zeros(0)), single, double


def far_gates(model: Model, reference: Reference, samples: Samples = None) -> tuple[list[Gate], str]:
    """Return a gate on the largest difference for large and zero values, and a sentence on where it was too large.

    No gate is returned if all inputs are booleans or tokens and no state is float32.
    """
    manifest, length = model.manifest, model.segment_lengths[0]
    features = [entry.name for entry in manifest.inputs if entry.role == "feature" and entry.dtype != "bool"]
    scaled = [] if features else [state.name for state in manifest.states if state.dtype == "float32"]
    if not features and not scaled:
        return [], ""
    whole = [entry.name for entry in manifest.inputs if entry.name in features and entry.dtype == "int32"]
    odd = OddSegments(model, reference, samples, manifest.batch_size, live_sequences(manifest))
    worst, place = 0.0, ""
    for factor in (1, FACTOR, 1, 0) * TIMES:
        usual, before = odd.take(length), odd.module.snapshot()
        tried = [{name: _times(part, factor) for name, part in usual.items()}]
        if factor == FACTOR and not samples:  # the module may refuse these integers; the usual ones are the second try
            ranged = {name: odd.draws.integers(0, NUMBERS, usual[name].shape).astype(np.int32) for name in whole}
            tried = [tried[0] | ranged, *tried]
        begun = [held | {name: _times(held[name], factor) for name in scaled} for held in before]
        try:
            results = next((results for one in tried if (results := list(odd.run(one, begun)))), [])
        except BackendError as error:
            worst, place = np.inf, str(error)
            break
        for what, nats, ours, single, exact in results:
            apart, sentence = _apart(ours, single, exact, nats)
            if apart > worst:
                worst, place = apart, f"with {', '.join(features or scaled)} {TOLD[factor]}, {what} is {sentence}"
        if scaled and factor != 1:
            odd.module.restore(before)
    close = worst <= _limit()
    gate = Gate(FAR, worst, _limit(), close or (None if scaled else False))
    return [gate], "" if close else f"{place}; {ADVICE}"


def _limit() -> float:
    """Return `FACTOR` times the float32 limit: rounding grows in proportion to the inputs."""
    return FACTOR * float32_limit()


def _times(values: Any, factor: int) -> Any:
    """Return a float array times the factor; return any other array, or None, unchanged."""
    with np.errstate(all="ignore"):  # 0 times infinity is NaN
        return values if values is None or values.dtype.kind != "f" else values * np.float32(factor)


def _apart(found: Array, single: Array, double: Array, nats: bool) -> tuple[float, str]:
    """Return the largest difference from the module in float32, and a phrase with the two values that differ most.

    Values are compared only where twice the module's own rounding (float32 against float64) is within the limit.
    """
    if found.shape != single.shape or single.shape != double.shape:
        return np.inf, f"of the shape {found.shape} where the module's is {single.shape}"
    with np.errstate(all="ignore"):  # infinite values have no rounding to judge
        own = np.abs(single.astype(np.float64) - double) / np.maximum(1, np.abs(double))
        close = limit_of("explained") * own <= _limit()
        found, single = found[close], single[close]
        differing = np.nan_to_num(np.abs(found.astype(np.float64) - single), nan=np.inf)
    if not differing.size:
        return 0.0, ""
    most = int(differing.argmax())
    sentence = f"{float(found[most]):.4g} where the module's is {float(single[most]):.4g}"
    return relative_difference(found, single, nats), sentence


def hidden_nan(model: Model, reference: Reference, samples: Samples) -> str:
    """Return a warning if the bundle hides a NaN in an input (a broken sensor) that the module shows; else "".

    NaN in states is not tried: a mask rightly hides it in rows that were never written, while PyTorch's attention does
    not. Devices are not tried, because their kernels promise nothing. Inputs that either side refuses hide nothing.
    """
    manifest, lengths = model.manifest, model.segment_lengths
    count = 1 if manifest.can.run_apart else manifest.batch_size
    odd = OddSegments(model, reference, samples, count, count)
    begun = odd.module.snapshot()
    features = [entry.name for entry in manifest.inputs if entry.dtype == "float32" and model.backend.name == "cpu"]
    for name, length in product(features, {lengths[0], lengths[-1]}):
        inputs = odd.take(length)
        inputs[name].flat[odd.draws.integers(inputs[name].size)] = POISON
        with suppress(BackendError, UsageError):
            for what, _, ours, _, exact in odd.run(inputs, begun):
                if np.isnan(exact).any() and not np.isnan(ours).any():
                    return (
                        f"a NaN in input {name} does not show in {what}, as it does in the module; where a sensor may "
                        "break, run with require_finite=True (docs/runtime.md#nan-and-infinity)"
                    )
    return ""
