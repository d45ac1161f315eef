"""Inputs far from the usual ones: very large, all zero, and whole numbers beyond 0 and 1.

A module may do something else there than what the chains show, and a graph may have lost it. A step that reads tokens
alone begins with states that are very large or zero. Rounding of such numbers is large as well, so each segment begins
with the module's state and is compared with the module in the bundle's own float32, only where that is close to
float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.errors import BackendError, UsageError
from txl_runtime.ladder import COMPARABLE, FAR_INPUTS
from txl_runtime.model import Model
from txl_runtime.selftest import relative_difference
from txl_runtime.types import Array, Arrays, Ids

from txl_export.parity.steps.chains import live_sequences
from txl_export.parity.steps.inputs import InputSource
from txl_export.parity.steps.origin import origin
from txl_export.parity.steps.truth import Indices, Reference, ReferenceStreams, States, hand_over

FACTOR, NUMBERS = 100, 8
"""What usual inputs are multiplied by, and how many whole numbers are tried from 0 on."""
TIMES = 3
"""Large inputs and zeros come so many times, each after a segment as usual."""

TOLD = {FACTOR: f"{FACTOR} times as large as usual", 0: "all zero", 1: "as usual after such a segment"}

Side = tuple[list[tuple[Indices, dict[str, Array]]], States]
"""What the reference returned for a segment, and its states."""


@dataclass
class Far:
    """The largest difference in such segments, see `relative_difference`; beyond the limit also where it is.

    Of states it is no failure, because a module may never hold such ones.
    """

    of_states: bool
    apart: float = 0.0
    place: str = ""


def far_inputs(model: Model, reference: Reference, samples: Mapping[str, Any] | None = None) -> Far | None:
    """Run such segments, but for inputs that the module itself refuses; None where no number can be large."""
    manifest = model.manifest
    count = manifest.batch_size if manifest.streams == "lockstep" else live_sequences(manifest)
    source = InputSource(manifest, samples, np.random.default_rng(13))
    single = reference.in_single()
    truth = ReferenceStreams(manifest, reference if single is None else single, count)
    exact = ReferenceStreams(manifest, reference, count)
    features = [entry.name for entry in manifest.inputs if entry.role == "feature" and entry.dtype != "bool"]
    scaled = [] if features else [state.name for state in manifest.states if state.dtype == "float32"]
    if not features and not scaled:
        return None
    stream, worst = model.stream(count), Far(bool(scaled))
    length = model.segment_lengths[0]
    counts = np.full(count, length, np.int32)
    draws = np.random.default_rng(17)
    for number, factor in enumerate((1, FACTOR, 1, 0) * TIMES):
        usual, before, kept = source.take(count, length), truth.snapshot(), truth.state()
        begun = [held | {name: _times(held[name], factor) for name in scaled} for held in before]
        for inputs in _tried(manifest, usual, factor, draws, ranged=not samples):
            truth.restore(begun)
            exact.restore(begun)
            states = truth.state()
            try:
                sides = [(side.run(inputs, counts), side.state()) for side in (truth, exact)]
            except UsageError:  # the module does not take these
                truth.restore(before)
                continue
            if number:
                hand_over(stream, manifest, states)
            try:
                found = stream.run(inputs, lengths=counts), stream.state()
            except BackendError as error:
                return Far(bool(scaled), np.inf, str(error))
            for what, apart, said in _differences(manifest, sides, found):
                if apart > worst.apart:
                    worst = Far(bool(scaled), apart)
                    if apart > FAR_INPUTS:
                        calls = [_call(manifest, *given, counts) for given in ((usual, kept), (inputs, states))]
                        operator = origin(model, length, *calls)
                        lost = f"; the first value that the graph loses is the result of {operator}" if operator else ""
                        worst.place = f"with {', '.join(features or scaled)} {TOLD[factor]}, {what} is {said}{lost}"
            if scaled and factor != 1:
                truth.restore(before)
            break
    return worst


def _times(values: Array | None, factor: int) -> Array | None:
    with np.errstate(all="ignore"):  # 0 times infinite
        return None if values is None else values * factor


def _call(manifest: Manifest, inputs: Arrays, states: States, counts: Ids) -> Arrays:
    """What a graph is given, by its own names."""
    held = ((state.input, states[state.name]) for state in manifest.states)
    return {**inputs, "valid": counts, **{name: values for name, values in held if values is not None}}


def _tried(
    manifest: Manifest, usual: Arrays, factor: int, draws: np.random.Generator, ranged: bool
) -> Iterator[dict[str, Array]]:
    """Inputs with numbers multiplied and, if asked for, whole ones from a wider range; then with those as usual."""
    roles = {entry.name: entry.role for entry in manifest.inputs}
    large = {
        name: values * np.float32(factor) if values.dtype == np.float32 else values for name, values in usual.items()
    }
    whole = [name for name, values in usual.items() if values.dtype == np.int32 and roles[name] == "feature"]
    if ranged and whole and factor == FACTOR:
        yield large | {name: draws.integers(0, NUMBERS, usual[name].shape).astype(np.int32) for name in whole}
    yield large


def _differences(
    manifest: Manifest, sides: list[Side], found: tuple[Mapping[str, Array], Mapping[str, Array]]
) -> Iterator[tuple[str, float, str]]:
    """Of every output and state of one segment what it is, and what `_apart` says."""
    truth, exact = sides
    for output in manifest.outputs:
        batch = output.shape.index("B") if "B" in output.shape else None
        for (rows, ours), (_, theirs) in zip(truth[0], exact[0], strict=True):
            values = found[0][output.name]
            values = values if batch is None else np.take(values, rows, axis=batch)
            apart = _apart(values, ours[output.name], theirs[output.name], output.role == "logprobs")
            yield f"output {output.name}", *apart
    for state in manifest.states:
        held, other = truth[1][state.name], exact[1][state.name]
        if held is not None and other is not None:
            yield f"state {state.name}", *_apart(found[1][state.name], held, other, False)


def _apart(found: Array, single: Array, double: Array, nats: bool) -> tuple[float, str]:
    """The difference from the module in float32, where that means something, and two values that differ most."""
    if found.shape != single.shape or single.shape != double.shape:
        return np.inf, f"of the shape {found.shape} where the module's is {single.shape}"
    with np.errstate(all="ignore"):  # infinities say nothing
        close = np.abs(single.astype(np.float64) - double) <= COMPARABLE * np.maximum(1, np.abs(double))
        found, single = found[close], single[close]
        differing = np.nan_to_num(np.abs(found.astype(np.float64) - single), nan=np.inf)
    if not differing.size:
        return 0.0, ""
    most = int(differing.argmax())
    said = f"{float(found[most]):.4g} where the module's is {float(single[most]):.4g}"
    return relative_difference(found, single, nats), said
